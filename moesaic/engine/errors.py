"""Why the engine does not take a request in, although it could be asked for."""


class QueueFull(RuntimeError):
    """More requests than may wait: try again later."""
