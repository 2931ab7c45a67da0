"""For all tests."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest

import moesaic  # noqa: F401  before torch, as in every program that uses the engine

# Each of several workers has one core; read by OpenMP when torch is loaded.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before anything imports Triton: without a GPU its kernels run in its interpreter.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tests that do not name a device are written for the CPU; those for a GPU say so.
os.environ.setdefault("MOESAIC_DEVICE", "cpu")

# Shells make what they start in the background ignore Ctrl-C, and so would every process of a test.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _default_log_level() -> None:
    """An Engine sets the level of the package's logger for the whole process."""
    logging.getLogger("moesaic").setLevel(logging.NOTSET)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes in one thread."""
    import torch  # not before the environment above is set

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
