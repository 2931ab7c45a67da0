"""Prompts that one layout computes and another continues, for pairs of any two: tokens and logprobs
are those of one rank, to the bit.

A family is served in a number of ways on both sides, and each prefill instance sends to each decode
instance, in an order and with prompts that a seed decides. All pairs are slow; a few, of a family
and layouts that the day's seed chooses, are always run. MOESAIC_PAIRS_SEED repeats one.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from bench.http_server import free_port
from moesaic import Engine
from tests.e2e.grid import model_path
from tests.e2e.test_disaggregation import SAME, Pair, without_times

DPA = {"enable_dp_attention": True}
CACHED = {"disaggregation_decode_enable_radix_cache": True}
Flags = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """Types, and whether weights are quantised, are those of all its instances."""

    name: str
    flags: Flags
    prefill: tuple[Flags, ...]
    decode: tuple[Flags, ...]


def mesh(tp: int = 1, dp: int = 1, pp: int = 1, page: int = 16, **more: Any) -> Flags:
    groups = DPA if dp > 1 and tp > 1 else {}
    return {"tp_size": tp, "dp_size": dp, "pp_size": pp, "page_size": page, **groups, **more}


DEEPEP = {"moe_a2a_backend": "deepep"}
NORMAL, LOW = DEEPEP | {"deepep_mode": "normal"}, DEEPEP | {"deepep_mode": "low_latency"}
# Prefill: chunks of several sizes; decode: with and without its prefix cache.
PREFILL = (
    mesh(),
    mesh(2, page=4, chunked_prefill_size=16),
    mesh(2, 2, page=1, chunked_prefill_size=32, **NORMAL),
    mesh(pp=2, page=8, chunked_prefill_size=16),
    mesh(4, page=32),
    mesh(2, pp=2, page=5, overlap="tbo", **NORMAL),
)
DECODE = (
    mesh(page=1, **CACHED),
    mesh(2, page=7),
    mesh(2, 2, page=16, **LOW, **CACHED),
    mesh(pp=3, page=4),
    mesh(4, 2, page=64, **LOW),
    mesh(1, 2, page=3),
)
BF16, FP16, FP8 = {"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "fp8"}
FAMILIES = (
    Family("qwen3_moe", BF16, PREFILL, DECODE),
    Family("mixtral", FP8, PREFILL, DECODE),
    Family("qwen2_moe", {}, PREFILL, DECODE),
    Family("deepseek_v2", BF16 | FP8, PREFILL, DECODE),
    Family("deepseek_v3", {}, PREFILL, DECODE),
    Family("gpt_oss", FP16, PREFILL, DECODE),
)
SOME_PREFILL, SOME_DECODE = 2, 3


@dataclass
class Sides:
    """What one family's instances answer, and what they should."""

    family: Family
    chooser: random.Random
    rooms: Iterator[int] = field(default_factory=lambda: count(1 << 41, 16))

    def __post_init__(self) -> None:
        lengths = [1, 2, *(self.chooser.randint(3, 90) for _ in range(4))]
        stem = [self.chooser.randrange(256) for _ in range(33)]
        self.prompts = [
            [self.chooser.randrange(256) for _ in range(length)] for length in lengths
        ] + [stem + [n] for n in range(2)]
        params: list[Flags] = [
            {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True} for _ in self.prompts
        ]
        params[2] |= {"temperature": 0.9, "sampling_seed": 3}
        params[3] |= {"repetition_penalty": 1.3}
        self.call: Flags = {
            "input_ids": self.prompts,
            "sampling_params": params,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        with self.instance({}) as one:
            self.expected: Any = without_times(one.generate(**self.call))  # type: ignore[arg-type]

    def instance(self, flags: Flags) -> Engine:
        apart = {"apart": True} if flags else {}
        path = model_path(self.family.name)
        return Engine(model_path=path, **SAME, **self.family.flags, **flags, **apart)

    def check(self, prefill: tuple[Flags, Engine, int], decode: tuple[Flags, Engine]) -> None:
        pair = Pair(prefill[1], decode[1], prefill[2], self.rooms)
        shown = f"{self.family.name}: {prefill[0]} to {decode[0]}"
        if self.chooser.random() < 0.5:  # else what it has sent before is in its prefix cache
            prefill[1].flush_cache()
        before = pair.counts()
        found = without_times(pair.generate(**self.call))
        assert found == self.expected, shown
        arrived, recomputed = (a - b for a, b in zip(pair.counts()[:2], before[:2], strict=True))
        assert (arrived, recomputed) == (len(self.prompts), 0), shown
        pair.check_idle()

    @contextmanager
    def decoding(self, layouts: tuple[Flags, ...]) -> Iterator[list[tuple[Flags, Engine]]]:
        with ExitStack() as stack:
            role = {"disaggregation_mode": "decode"}
            yield [(flags, stack.enter_context(self.instance(flags | role))) for flags in layouts]

    def run(self, prefill: tuple[Flags, ...], decode: tuple[Flags, ...]) -> int:
        """The number of pairs; prefill instances come one after the other."""
        pairs = 0
        with self.decoding(decode) as seconds:
            for flags in prefill:
                role: Flags = {
                    "disaggregation_mode": "prefill",
                    "disaggregation_bootstrap_port": (port := free_port()),
                    "disaggregation_transfer_backend": self.chooser.choice(("auto", "tcp")),
                }
                with self.instance(flags | role) as first:
                    for second in self.chooser.sample(seconds, len(seconds)):
                        self.check((flags, first, port), second)
                        pairs += 1
        return pairs


def chosen_seed() -> int:
    return int(os.environ.get("MOESAIC_PAIRS_SEED") or time.time() // 86400)


@pytest.mark.timeout(600)
def test_some_pairs() -> None:
    chooser = random.Random(seed := chosen_seed())
    family = chooser.choice(FAMILIES)
    prefill = chooser.sample(family.prefill, SOME_PREFILL)
    decode = chooser.sample(family.decode, SOME_DECODE)
    print(f"MOESAIC_PAIRS_SEED={seed}")
    assert Sides(family, chooser).run((*prefill,), (*decode,)) == SOME_PREFILL * SOME_DECODE


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_all_pairs(family: Family) -> None:
    """216 in all."""
    sides = Sides(family, random.Random(5))
    assert sides.run(family.prefill, family.decode) == len(family.prefill) * len(family.decode)
