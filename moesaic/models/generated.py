"""Folders of generated models, which are named `KIND:NAME,KEY=INTEGER,…`."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_DIGITS = 18


def parse_model_name(model_path: str, prefix: str, example: str) -> tuple[str, dict[str, int]]:
    """tiny:mixtral,num_hidden_layers=4 -> mixtral and {"num_hidden_layers": 4}."""
    name, *texts = model_path.removeprefix(prefix).split(",")
    changes: dict[str, int] = {}
    for text in texts:
        key, _, value = text.partition("=")
        is_number = value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS
        if not key.isidentifier() or not is_number:
            raise ValueError(f"{text!r} in {model_path!r} is not KEY=INTEGER, as in {example}")
        if key in changes:
            raise ValueError(f"{model_path!r} gives {key} twice")
        changes[key] = int(value)
    return name, changes


def with_changes(
    config: dict[str, Any], changes: Mapping[str, int], name: str, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Replaces integers of config.json, and sets those of `more`."""
    known = sorted({key for key, value in config.items() if type(value) is int}.union(more))
    for key in changes:
        if key not in known:
            raise ValueError(f"{name} has no {key!r} to change; it has {', '.join(known)}")
    return config | dict(changes)


def cached_folder(name: str, made_of: bytes, make: Callable[[Path], object]) -> Path:
    """The folder that `make` fills, cached by the hash of `made_of`."""
    key = hashlib.sha256(made_of).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesaic"
    folder = root / f"{name}-{key}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    # Filled elsewhere and renamed: no process sees half a checkpoint.
    work = Path(tempfile.mkdtemp(dir=root))
    try:
        make(work / "model")
        (work / "model").rename(folder)
    except OSError:  # another process was faster
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
