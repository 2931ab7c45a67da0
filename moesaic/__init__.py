"""Moesaic: expert-parallel inference for Mixture-of-Experts language models."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.core.sampling import SamplingParams
    from moesaic.engine.engine import Engine

# Read by OpenMP when torch is loaded, hence here. Threads that spin at the end of a parallel loop
# take the core from the one they wait for as soon as anything else runs on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

_HOMES = {"Engine": "moesaic.engine.engine", "SamplingParams": "moesaic.core.sampling"}


def __getattr__(name: str) -> Any:
    """Import on first use: `import moesaic` and `moesaic --help` must not pay for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
