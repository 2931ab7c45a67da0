"""Selects the dense weights that stay quantised."""

from __future__ import annotations

from pathlib import Path

from moesaic.models.checkpoint import Checkpoint
from moesaic.models.dense import FP8_FORMATS, DenseWeights
from moesaic.models.schemes import Scheme
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.weights import WeightFormat


def dense_weights(scheme: Scheme, folder: Path, moe: MoeContext) -> DenseWeights | None:
    """None if none stays quantised: only GPUs multiply float8, and not in deterministic mode."""
    if moe.resolved.device != "cuda" or moe.deterministic:
        return None
    if scheme.storage is None:
        return _kept(moe.weight_format)  # as --quantization formats the experts
    return stored_weights(scheme, folder)


def stored_weights(scheme: Scheme, folder: Path) -> DenseWeights | None:
    """The weights that the checkpoint has quantised, if kernels can use them as they are."""
    kept = _kept(None if scheme.storage is None else scheme.storage.format)
    if kept is None or not any(folder.glob("*.safetensors")):  # --load-format dummy
        return kept
    with Checkpoint(folder) as checkpoint:
        names = (name for name in checkpoint.location if name.endswith(".weight"))
        quantised = frozenset(name for name in names if checkpoint.dtype(name) == "F8_E4M3")
    return DenseWeights(kept.format, quantised)


def _kept(format: WeightFormat | None) -> DenseWeights | None:
    """The format must quantise activations to float8, too."""
    fits = format is not None and format.name in FP8_FORMATS and format.activation is not None
    return DenseWeights(format) if format is not None and fits else None
