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
SECONDS = 60


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
    """The library of a C file; None, with a line in the log, where it cannot be made."""
    compiler, *extra = shlex.split(os.environ.get("CC") or "cc") or ["cc"]
    if shutil.which(compiler) is None:
        logger.info("no C compiler (%s): %s is computed by torch, which is slower", compiler, name)
        return None
    source = FOLDER / f"{name}.c"
    command = [compiler, *extra, "-O3", *options, "-shared", "-fPIC", str(source)]
    try:
        library = _built(command, source)
        try:
            return ctypes.CDLL(str(library))
        except OSError:  # damaged: make it again
            library.unlink()
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
            timeout=SECONDS,
        )
        made.chmod(0o700)
        made.replace(library)
    return library


def _refuse_if_others_write(path: Path) -> None:
    """What others could have written is not run."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{path} may be written by others: remove it, or chmod go-w it")
