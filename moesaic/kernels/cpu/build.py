"""Compiles the package's C kernels for this machine, once, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from moesaic.core.process import child_environment

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
COMPILE_TIMEOUT = 60
TILE_FLAGS = {"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}
TILE_OPTIONS = ("-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")


@cache
def cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "moesaic" / "kernels"


def load_library(name: str, options: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library of a C file; None, with a log line, if it cannot be built."""
    compiler, *extra = shlex.split(os.environ.get("CC") or "cc") or ["cc"]
    if shutil.which(compiler) is None:
        logger.info("no C compiler (%s): torch computes %s, which is slower", compiler, name)
        return None
    source = FOLDER / f"{name}.c"
    command = [compiler, *extra, "-O3", *options, "-shared", "-fPIC", str(source)]
    try:
        library = _build(command, source)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # damaged: build it again
            library.unlink()
            return ctypes.CDLL(str(_build(command, source)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("torch computes %s, which is slower: %s", name, _reason(error))
        return None


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return said.strip() if isinstance(said, str) and said.strip() else str(error)


def _build(command: list[str], source: Path) -> Path:
    """The file name depends on the sources and the CPU, as machines may share a home. The file is
    moved into place atomically, as ranks may build it at the same time."""
    made_for = repr((command, sorted(cpu_flags()))).encode()
    headers = b"".join(path.read_bytes() for path in sorted(FOLDER.glob("*.h")))
    key = hashlib.sha256(source.read_bytes() + headers + made_for).hexdigest()[:16]
    folder = cache_folder()
    library = folder / f"{source.stem}-{key}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_if_others_write(folder)
    if library.is_file():
        _refuse_if_others_write(library)
        return library
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / library.name
        subprocess.run(
            [*command, "-o", str(made)],
            env=child_environment(),
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT,
        )
        made.chmod(0o700)
        made.replace(library)
    return library


def _refuse_if_others_write(path: Path) -> None:
    """Refuses files that other users could have written."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"other users can write {path}: remove it, or chmod go-w it")
