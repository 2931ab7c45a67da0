"""Compiles the package's C kernels for this machine, once, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SECONDS = 60


@cache
def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moesaic" / "kernels"


def load_library(name: str, options: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library of a C file; None, with a line in the log, where it cannot be made."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        logger.info("no C compiler: %s is computed by torch, which is slower", name)
        return None
    source = FOLDER / f"{name}.c"
    command = [compiler, "-O3", *options, "-shared", "-fPIC", str(source)]
    try:
        return ctypes.CDLL(str(_built(command, source)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s is computed by torch, which is slower: %s", name, _reason(error))
        return None


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return said.strip() if isinstance(said, str) and said.strip() else str(error)


def _built(command: list[str], source: Path) -> Path:
    """Named by what it is made from and for, since homes may be shared between machines; and put in
    place whole, since ranks may build at the same time."""
    made_for = repr((command, sorted(cpu_flags()))).encode()
    key = hashlib.sha256(source.read_bytes() + made_for).hexdigest()[:16]
    folder = cache_folder()
    library = folder / f"{source.stem}-{key}.so"
    if library.is_file() and library.stat().st_uid == os.getuid():
        return library
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / library.name
        subprocess.run(
            [*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=SECONDS
        )
        made.replace(library)
    return library
