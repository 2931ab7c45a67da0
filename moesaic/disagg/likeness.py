"""What both halves of a request must have in common, as digests: the model, and the prompt. Rooms
are only numbers: of another prompt or model a KV cache would fit as well, and answer wrongly."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from moesaic.config import ServerArgs
from moesaic.core.speculation import ALGORITHMS

DIGEST_BYTES: Final = 16
# Of each weight file, at even distances.
SAMPLES: Final = 64
SAMPLE_BYTES: Final = 64
# In front of a safetensors file's header. The format allows no longer header.
LENGTH: Final = struct.Struct("<Q")
MOST_HEADER: Final = 100 << 20


def prompt_digest(token_ids: Sequence[int], cache_namespace: str) -> bytes:
    tokens = np.asarray(token_ids, "<i8").tobytes()
    return _digest(len(cache_namespace).to_bytes(8, "little"), cache_namespace.encode(), tokens)


def model_digest(args: ServerArgs) -> bytes:
    """A hash of config.json and of the weight files: their names and headers, and SAMPLES of their
    bytes; or of how dummy weights are drawn. It does not depend on the folder. What is computed in
    deterministic mode differs from what is not: a cache of both would have bits of its own."""
    folder = Path(args.model_path)
    if args.load_format == "dummy":
        weights = [repr((args.random_seed or 0, args.dummy_router_zipf)).encode()]
    else:
        weights = [file_digest(path) for path in sorted(folder.glob("*.safetensors"))]
    mode = [b"deterministic"] if args.enable_deterministic_inference else []
    return _digest((folder / "config.json").read_bytes(), *weights, *mode)


def draft_digest(args: ServerArgs) -> bytes:
    """Of the draft model whose cache is sent; nothing if there is none, or if it can be computed
    from tokens. Without a folder it is a layer of the checkpoint."""
    algorithm = ALGORITHMS.get(args.speculative_algorithm or "")
    if algorithm is None or not algorithm.reads_target:
        return b""
    if args.speculative_draft_model_path is None:
        return _digest(b"a layer of the checkpoint")
    folder = Path(args.speculative_draft_model_path)
    files = [file_digest(path) for path in sorted(folder.glob("*.safetensors"))]
    return _digest((folder / "config.json").read_bytes(), *files)


def file_digest(path: Path) -> bytes:
    """Reads as much of a small file as of a large one, except for its header."""
    with path.open("rb") as file:
        size = path.stat().st_size
        begin = file.read(LENGTH.size)
        length = LENGTH.unpack(begin)[0] if len(begin) == LENGTH.size else 0
        parts = [path.name.encode(), str(size).encode(), begin, file.read(min(length, MOST_HEADER))]
        first = min(LENGTH.size + length, size)
        for number in range(SAMPLES):
            file.seek(first + (size - first) * number // SAMPLES)
            parts.append(file.read(SAMPLE_BYTES))
    return _digest(*parts)


def _digest(*parts: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        made.update(part)
    return made.digest()
