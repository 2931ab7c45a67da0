"""What sampling takes beside the logits, against what the memory plan counts for it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling.sampler import CPU_PIECE, SampleRow, sample
from moesaic.engine.setup.device_memory import SAMPLED_BYTES, logit_bytes
from moesaic.engine.setup.memory_plan import DRAFT_LOGIT_BYTES, LOG_BYTES, plan_memory
from tests.unit.test_draft_model import RANDOM, arguments

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.2},
)


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors at once that were made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(found):
            key = storage._cdata
            if key not in self._sizes and key not in given:
                self._sizes[key] = storage.nbytes()
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._free, key)
        return found

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def storages(tree: Any) -> list[torch.UntypedStorage]:
    return [one.untyped_storage() for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_sampling_takes_what_is_counted(params: dict[str, Any]) -> None:
    vocab = 1 << 16
    for rows in (CPU_PIECE // vocab, 4 * CPU_PIECE // vocab):
        logits_RV = torch.randn(rows, vocab)
        wanted = [
            SampleRow(SamplingParams(**params), n, 5, return_logprob=n % 2 == 0, top_logprobs_num=5)
            for n in range(rows)
        ]
        with PeakBytes() as peak:
            sample(logits_RV, wanted)
        assert peak.most < SAMPLED_BYTES * CPU_PIECE
        if "frequency_penalty" in params:
            assert peak.most > 0.9 * SAMPLED_BYTES * CPU_PIECE


def test_the_likeliest_branches_take_what_is_counted() -> None:
    logits_RV = torch.randn(16, 1 << 16, dtype=torch.bfloat16)
    with PeakBytes() as peak:
        logits_RV.float().log_softmax(-1).topk(4)
    assert logits_RV.nbytes + peak.most <= 1.001 * logits_RV.numel() * (
        DRAFT_LOGIT_BYTES + LOG_BYTES
    )


def test_rows_of_drafts_are_counted() -> None:
    """8 requests, each with its newest token and 5 drafts."""
    steps = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
    found = []
    for given in ({}, {"steps": 3, **steps}):
        plan = plan_memory(arguments(RANDOM, max_running_requests=8, **given))
        found.append(plan.ranks[0].step)
    plain, drafted = found
    vocab = plain.counters // (8 * 4)
    assert plain.logits == logit_bytes(8, vocab, "cpu") and plain.drafts == 0
    assert drafted.logits == logit_bytes(8 * 6, vocab, "cpu")
    assert drafted.drafts == 8 * 2 * vocab * (DRAFT_LOGIT_BYTES + LOG_BYTES)


def test_of_many_rows_only_a_piece_is_sampled_at_once() -> None:
    vocab, piece = 150_000, 1 << 24
    assert logit_bytes(16, vocab, "cuda") == 16 * vocab * (6 + SAMPLED_BYTES)
    assert logit_bytes(300, vocab, "cuda") == 300 * vocab * 6 + piece * SAMPLED_BYTES
    assert logit_bytes(1280, vocab, "cuda") == 1280 * vocab * 14
