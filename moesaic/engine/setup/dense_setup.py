"""Which weights beside the experts stay quantised."""

from __future__ import annotations

from pathlib import Path

from moesaic.models.checkpoint import Checkpoint
from moesaic.models.dense import KEPT, DenseWeights
from moesaic.models.schemes import Scheme
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.weights import WeightFormat


def dense_weights(scheme: Scheme, folder: Path, moe: MoeContext) -> DenseWeights | None:
    """None: none do. A GPU multiplies float8 numbers as they are. On a CPU that would be slower
    than the model's type, and in deterministic mode there is no such product."""
    if moe.resolved.device != "cuda" or moe.deterministic:
        return None
    if scheme.storage is None:
        return _kept(moe.weight_format)  # what --quantization makes of the experts
    return stored_weights(scheme, folder)


def stored_weights(scheme: Scheme, folder: Path) -> DenseWeights | None:
    """Those that the checkpoint has quantised, if they can be multiplied so."""
    kept = _kept(None if scheme.storage is None else scheme.storage.format)
    if kept is None or not any(folder.glob("*.safetensors")):  # --load-format dummy
        return kept
    with Checkpoint(folder) as checkpoint:
        names = (name for name in checkpoint.location if name.endswith(".weight"))
        quantised = frozenset(name for name in names if checkpoint.dtype(name) == "F8_E4M3")
    return DenseWeights(kept.format, quantised)


def _kept(format: WeightFormat | None) -> DenseWeights | None:
    """Formats that ask for float8 activations, too."""
    fits = format is not None and format.name in KEPT and format.activation is not None
    return DenseWeights(format) if format is not None and fits else None
