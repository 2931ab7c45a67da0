"""`tiny:FAMILY` as a model path: a small random checkpoint, made once and kept in a cache."""

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

PREFIX = "tiny:"


def materialise(model_path: str) -> str:
    """The folder of a `tiny:FAMILY` checkpoint; any other path as it is."""
    if not model_path.startswith(PREFIX):
        return model_path
    family = model_path.removeprefix(PREFIX)
    if not family.isidentifier():
        raise ValueError(f"{model_path!r} is not tiny:FAMILY: give a family, as in tiny:qwen3_moe")
    folder = _cached(family)
    print(f"{model_path}: random weights, so the text is noise ({folder})", file=sys.stderr)
    return str(folder)


def _cached(family: str) -> Path:
    from moesaic.models import tiny

    # The key covers the maker's source: a changed maker must not find an old checkpoint.
    key = hashlib.sha256(Path(tiny.__file__).read_bytes()).hexdigest()[:12]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesaic"
    folder = root / f"tiny-{family}-{key}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    # Made aside and renamed, so that nobody ever sees half a checkpoint.
    work = Path(tempfile.mkdtemp(dir=root))
    try:
        tiny.make_tiny_checkpoint(family, work / "model")
        if not folder.is_dir():
            (work / "model").rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
