"""What both halves of a request must have in common, as digests: the model, and the prompt. Rooms
are only numbers: of another prompt or model a KV cache would fit as well, and answer wrongly."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from moesaic.config import ServerArgs

DIGEST_BYTES: Final = 16


def prompt_digest(token_ids: Sequence[int], cache_namespace: str) -> bytes:
    tokens = np.asarray(token_ids, "<i8").tobytes()
    return _digest(len(cache_namespace).to_bytes(8, "little"), cache_namespace.encode(), tokens)


def model_digest(args: ServerArgs) -> bytes:
    """A hash of config.json and of the names and sizes of the weight files, or of how dummy weights
    are drawn. It does not depend on the folder."""
    folder = Path(args.model_path)
    if args.load_format == "dummy":
        weights = repr((args.random_seed or 0, args.dummy_router_zipf))
    else:
        files = sorted(folder.glob("*.safetensors"))
        weights = repr([(path.name, path.stat().st_size) for path in files])
    return _digest((folder / "config.json").read_bytes(), weights.encode())


def _digest(*parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        made.update(part)
    return made.digest()
