"""Configuration: flags declared on frozen dataclasses, read from command line, file or keywords."""

from moesaic.config.args import ServerArgs
from moesaic.config.resolve import resolve

__all__ = ["ServerArgs", "resolve"]
