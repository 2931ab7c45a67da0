"""How checkpoints store their matrices; `detect_scheme` finds out."""

from moesaic.models.schemes.detect import detect_scheme
from moesaic.models.schemes.scheme import MatrixReader, Scheme
from moesaic.models.schemes.storage import Matrix

__all__ = ["Matrix", "MatrixReader", "Scheme", "detect_scheme"]
