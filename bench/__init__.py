"""Benchmarks: each file is a command, `python -m bench.NAME`."""

import moesaic  # noqa: F401  before torch, so that all contenders' threads wait alike
