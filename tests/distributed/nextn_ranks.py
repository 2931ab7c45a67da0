"""The MTP layer on ranks, which follows the main model from turn to turn.

T tokens · R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from moesaic.comm.collectives.group import RankGroup
from moesaic.core.step import Step
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.nextn import NextN, load_nextn
from moesaic.models.registry import build_model
from moesaic.models.weights import load_weights
from tests.distributed.model_ranks import (
    LENGTHS,
    PAGE,
    POSITIONS,
    TURNS,
    ModelCase,
    load_part,
    new_cache,
    run_turn,
    through_stages,
    tokens_of,
    work_of,
)

AFTER = 7  # the token after a sequence's last
Work = Sequence[tuple[int, int, int]]


def run_mtp(mtp: NextN, cache: PagedCache, work: Work, step: Step, hidden_TH: Tensor) -> Tensor:
    vocab, pages = mtp.config.vocab_size, POSITIONS // PAGE
    ids: list[int] = []
    positions: list[int] = []
    spans: list[SequenceSpan] = []
    for sequence, first, stop in work:
        table = range(1 + sequence * pages, 1 + (sequence + 1) * pages)
        spans.append(SequenceSpan(len(ids), stop - first, stop, table))
        ids += [*tokens_of(sequence, vocab), AFTER][first + 1 : stop + 1]
        positions += range(first, stop)
    return mtp(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        hidden_TH,
        TorchAttention(cache, spans),
        step,
    )


def reference_mtp(folder: Path) -> dict[int, Tensor]:
    """Logits of every position of each sequence, on one rank in one pass."""
    model = build_model(RawConfig.read(folder), BuildContext.single(torch.float32, POSITIONS))
    load_weights(model, folder)
    mtp = load_nextn(model, folder)
    work = [(number, 0, length + 2) for number, length in enumerate(LENGTHS)]
    with torch.inference_mode():
        x_TH = run_turn(model, new_cache(model), work, Step(), None)
        logits_TV = mtp.logits(run_mtp(mtp, new_cache(mtp), work, Step(), x_TH))
    return dict(enumerate(logits_TV.split([stop for _, _, stop in work])))


def serve_mtp(group: RankGroup, case: ModelCase, folder: Path) -> dict[tuple[int, int], Tensor]:
    """Logits by sequence and position; only first ranks of attention groups have any."""
    dp, place = case.mesh.dp, case.mesh.place(group.rank)
    model = load_part(group, case, folder)
    mtp = None if model.lm_head is None else load_nextn(model, folder)
    cache = new_cache(model)
    mtp_cache = None if mtp is None else new_cache(mtp)
    logits: dict[tuple[int, int], Tensor] = {}
    for turn in range(TURNS + (dp > 1)):
        works = [work_of(turn, number, dp) for number in range(dp)]
        work = works[place.dp_rank]
        counts = tuple(sum(stop - first for _, first, stop in w) for w in works)
        step = Step(prefill=turn < 2, counts=counts if dp > 1 else ())
        with torch.inference_mode():
            x_TH = through_stages(group, case.mesh, place, model, cache, work, step)
            if mtp is None or mtp_cache is None:
                continue
            x_TH = run_mtp(mtp, mtp_cache, work, step, x_TH)
            ends = torch.tensor([stop - first for _, first, stop in work], dtype=torch.int64)
            rows = [len(w) for w in works] if dp > 1 else ()
            logits_RV = mtp.logits(x_TH[ends.cumsum(0) - 1], rows)
        told = work if place.attention_rank == 0 else []
        for (sequence, _, stop), logits_V in zip(told, logits_RV, strict=True):
            logits[sequence, stop - 1] = logits_V.clone()
    return logits
