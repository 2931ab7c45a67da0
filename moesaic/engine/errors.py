"""Errors of requests that are valid but cannot be accepted now."""


class QueueFull(RuntimeError):
    """Too many requests are waiting: try again later."""
