"""What the real DeepEP and FlashInfer take: bf16, top-8, microseconds.

Measured on an H200 with the real libraries, 2026-11-15. DeepEP (v1 line): a process a rank under
MPS, 20 SMs a rank in normal mode, launched without a graph, the largest of the ranks' medians; in
normal mode with the worst-case number of rows, so that its host does not wait, and without the
computation of the layout, about 35 us more. Low latency in its send and receive phases, a quarter
of the SMs a rank. FlashInfer 0.6.12, one-sided: one process with a stream for each rank, dispatch
and combine inside one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    ranks: int
    hidden: int
    tokens: int


@dataclass(frozen=True)
class Peer:
    """`pair_us`: of a dispatch and a combine."""

    name: str
    pair_us: float


# Of a dispatch, and of a combine.
DEEPEP_NORMAL = {
    Key(2, 2048, 128): (67, 49),
    Key(2, 2048, 1024): (82, 63),
    Key(2, 2048, 4096): (248, 187),
    Key(4, 2048, 128): (76, 55),
    Key(4, 2048, 1024): (140, 116),
    Key(4, 2048, 4096): (415, 349),
    Key(2, 7168, 128): (69, 56),
    Key(2, 7168, 1024): (166, 165),
    Key(2, 7168, 4096): (507, 536),
    Key(4, 7168, 128): (85, 82),
    Key(4, 7168, 1024): (303, 289),
    Key(4, 7168, 4096): (1040, 975),
}
DEEPEP_LOW_LATENCY = {
    Key(4, 2048, 1): (63, 57),
    Key(4, 2048, 32): (80, 75),
    Key(4, 2048, 128): (65, 59),
    Key(4, 7168, 1): (77, 74),
    Key(4, 7168, 32): (88, 81),
    Key(4, 7168, 128): (109, 101),
}
DEEPEP = {"normal": DEEPEP_NORMAL, "low_latency": DEEPEP_LOW_LATENCY}
FLASHINFER = {
    Key(2, 2048, 1): 11.4,
    Key(2, 2048, 16): 12.0,
    Key(2, 2048, 64): 12.1,
    Key(2, 2048, 128): 13.0,
    Key(2, 7168, 1): 13.7,
    Key(2, 7168, 16): 14.6,
    Key(2, 7168, 64): 16.6,
    Key(2, 7168, 128): 18.9,
    Key(4, 2048, 1): 12.9,
    Key(4, 2048, 16): 14.1,
    Key(4, 2048, 64): 16.2,
    Key(4, 2048, 128): 23.2,
    Key(4, 7168, 1): 16.1,
    Key(4, 7168, 16): 17.2,
    Key(4, 7168, 64): 23.8,
    Key(4, 7168, 128): 39.8,
    Key(8, 2048, 1): 17.1,
    Key(8, 2048, 16): 17.8,
    Key(8, 2048, 64): 26.8,
    Key(8, 7168, 1): 20.0,
    Key(8, 7168, 16): 24.5,
    Key(8, 7168, 64): 47.9,
}


def peers_of(mode: str, key: Key, payload: str, graph: bool) -> list[Peer]:
    """Those that did the same and were launched so: FlashInfer in a graph, DeepEP one by one."""
    if payload != "bf16":
        return []
    if graph:
        us = None if mode == "normal" else FLASHINFER.get(key)
        return [] if us is None else [Peer("FlashInfer", us)]
    halves = DEEPEP.get(mode, {}).get(key)
    return [] if halves is None else [Peer("DeepEP", sum(halves))]
