"""Errors of valid requests that the engine does not accept."""


class QueueFull(RuntimeError):
    """Too many requests are waiting: try again later."""


class IdInUse(ValueError):
    """Another request that is open has this id."""


class EngineShutDown(RuntimeError):
    def __init__(self) -> None:
        super().__init__("the engine is shut down: make a new Engine")
