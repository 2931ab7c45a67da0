"""Benchmarks: each file is a command, `python -m bench.NAME`."""
