"""Whole models on ranks: every rank holds its part, and serves the sequences of its group.

T tokens · R rows whose logits are wanted · V vocabulary.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.collectives.collective import Collective, SingleRank, WindowCollective
from moesaic.comm.collectives.group import Peers, RankGroup
from moesaic.comm.mesh import Mesh, RankPlace, share
from moesaic.core.step import Step
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.parallel import Parallel
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.blocks import CausalLM
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.registry import build_model
from moesaic.models.weights import load_weights
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem

POSITIONS, PAGE, SECONDS = 64, 16, 60.0
LENGTHS = (5, 1, 17, 9)
TURNS = 3


@dataclass(frozen=True)
class ModelCase:
    """A model and how it is cut. `tied`: the head's weights are the embedding's."""

    family: str
    mesh: Mesh
    a2a: str = "none"
    changes: dict[str, int] = field(default_factory=dict)
    tied: bool = False
    deterministic: bool = False
    waterfill: bool = False

    def __str__(self) -> str:
        mesh = self.mesh
        sizes = {"tp": mesh.tp, "dp": mesh.dp, "ep": mesh.ep, "pp": mesh.pp}
        parts = [self.family, self.a2a, *(f"{k}{v}" for k, v in sizes.items() if v > 1)]
        parts += [f"dense{mesh.dense_tp}", f"vocab{mesh.vocab_tp}"]
        return "-".join(
            parts
            + ["tied"] * self.tied
            + ["bits"] * self.deterministic
            + ["waterfill"] * self.waterfill
        )


@dataclass(frozen=True)
class Served:
    """`logits` by sequence and position, of those that the rank's group has."""

    place: RankPlace
    logits: dict[tuple[int, int], Tensor]
    nbytes: int
    cache_heads: int
    cache_layers: int


class Some(Peers):
    """Some ranks of a group, while the others of it do the same among themselves."""

    def __init__(self, group: RankGroup, ranks: Sequence[int]) -> None:
        self.group, self.ranks = group, list(ranks)
        self.rank, self.size = self.ranks.index(group.rank), len(self.ranks)
        self.name, self.timeout = f"{group.name} {self.ranks}", group.timeout

    def all_gather_bytes(self, data: bytes, operation: str) -> list[bytes]:
        everybody = self.group.all_gather_bytes(data, operation)
        return [everybody[rank] for rank in self.ranks]


def tokens_of(sequence: int, vocab: int) -> list[int]:
    """The prompt, and two tokens to decode."""
    generator = torch.Generator().manual_seed(sequence)
    return torch.randint(0, vocab, (LENGTHS[sequence] + 2,), generator=generator).tolist()


def sequences_of(group: int, groups: int) -> list[int]:
    return [number for number in range(len(LENGTHS)) if number % groups == group]


def work_of(turn: int, group: int, groups: int) -> list[tuple[int, int, int]]:
    """(sequence, first, stop) of what a group does in a turn: prefill all, then decode twice. With
    several groups the last one is idle at first, and the others are at the end."""
    late = groups > 1 and group == groups - 1
    turn -= late
    if not 0 <= turn < TURNS:
        return []
    return [
        (number, 0, LENGTHS[number])
        if turn == 0
        else (number, LENGTHS[number] + turn - 1, LENGTHS[number] + turn)
        for number in sequences_of(group, groups)
    ]


def run_turn(
    model: CausalLM,
    cache: PagedCache,
    work: Sequence[tuple[int, int, int]],
    step: Step,
    x_TH: Tensor | None,
) -> Tensor:
    vocab, pages = model.config.vocab_size, POSITIONS // PAGE
    ids: list[int] = []
    positions: list[int] = []
    spans: list[SequenceSpan] = []
    for sequence, first, stop in work:
        table = range(1 + sequence * pages, 1 + (sequence + 1) * pages)
        spans.append(SequenceSpan(len(ids), stop - first, stop, table))
        ids += tokens_of(sequence, vocab)[first:stop]
        positions += range(first, stop)
    return model(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        TorchAttention(cache, spans),
        step,
        x_TH,
    )


def new_cache(model: CausalLM) -> PagedCache:
    pages = len(LENGTHS) * POSITIONS // PAGE
    cache = PagedCache(model.cache, pages, PAGE, torch.float32)
    cache.clear(range(pages + 1))
    return cache


def reference(folder: Path) -> dict[int, Tensor]:
    """Logits of every position of each sequence, on one rank in one pass."""
    raw = RawConfig.read(folder)
    model = build_model(raw, BuildContext.single(torch.float32, POSITIONS))
    load_weights(model, folder)
    work = [(number, 0, length + 2) for number, length in enumerate(LENGTHS)]
    with torch.inference_mode():
        x_TH = run_turn(model, new_cache(model), work, Step(), None)
        logits_TV = model.logits(x_TH)
    return dict(enumerate(logits_TV.split([stop for _, _, stop in work])))


def load_part(group: RankGroup, case: ModelCase, folder: Path) -> CausalLM:
    """What a rank holds of the model."""
    mesh, place = case.mesh, case.mesh.place(group.rank)
    stage_peers = Some(group, mesh.stage_ranks(place))
    parallel = Parallel(
        attention=_collective(Some(group, mesh.attention_ranks(place))),
        stage=_collective(stage_peers),
        dp=mesh.dp,
        dense_tp=mesh.dense_tp,
        vocab_tp=mesh.vocab_tp,
        layers=share(RawConfig.read(folder).integer("num_hidden_layers"), place.stage, mesh.pp),
        is_first=place.stage == 0,
        is_last=place.stage == mesh.pp - 1,
        deterministic=case.deterministic,
    )
    model = build_model(
        RawConfig.read(folder), BuildContext(POSITIONS, _moe(case, stage_peers), parallel)
    )
    load_weights(model, folder)
    return model


def serve(group: RankGroup, case: ModelCase, folder: Path) -> Served:
    """A rank's part of the work."""
    place, model = case.mesh.place(group.rank), load_part(group, case, folder)
    with torch.inference_mode():
        logits = _serve(group, case, place, model)
    return Served(place, logits, model.nbytes, model.cache.num_heads, model.cache.num_layers)


def _serve(
    group: RankGroup, case: ModelCase, place: RankPlace, model: CausalLM
) -> dict[tuple[int, int], Tensor]:
    dp, cache = case.mesh.dp, new_cache(model)
    logits: dict[tuple[int, int], Tensor] = {}
    for turn in range(TURNS + (dp > 1)):
        works = [work_of(turn, number, dp) for number in range(dp)]
        work = works[place.dp_rank]
        counts = tuple(sum(stop - first for _, first, stop in w) for w in works)
        step = Step(prefill=turn < 2, counts=counts if dp > 1 else ())
        x_TH = through_stages(group, case.mesh, place, model, cache, work, step)
        if model.lm_head is None:
            continue
        ends = torch.tensor([stop - first for _, first, stop in work], dtype=torch.int64)
        rows_RH = x_TH[ends.cumsum(0) - 1]
        logits_RV = model.logits(rows_RH, [len(w) for w in works] if dp > 1 else ())
        # The first rank of an attention group gets them, for all.
        told = work if place.attention_rank == 0 else []
        for (sequence, _, stop), logits_V in zip(told, logits_RV, strict=True):
            logits[sequence, stop - 1] = logits_V.clone()
    return logits


def through_stages(
    group: RankGroup,
    mesh: Mesh,
    place: RankPlace,
    model: CausalLM,
    cache: PagedCache,
    work: Sequence[tuple[int, int, int]],
    step: Step,
) -> Tensor:
    """What came out of this rank's own stage."""
    x_TH: Tensor | None = None
    mine = torch.empty(0)
    for stage in range(mesh.pp):
        if place.stage == stage:
            mine = x_TH = run_turn(model, cache, work, step, x_TH)
        told = group.all_gather_bytes(_pack(x_TH), "hidden states")
        x_TH = _unpack(told[mesh.rank(place.replica, stage, place.tp_rank)])
    return mine


def _pack(tensor: Tensor | None) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _collective(peers: Some) -> Collective:
    return SingleRank() if peers.size == 1 else WindowCollective(peers, 1 << 12, SECONDS)


def _moe(case: ModelCase, peers: Peers) -> MoeContext:
    mesh = case.mesh
    problem = MoeProblem(
        a2a=case.a2a, weights=WEIGHT_FORMATS["fp32"], dtype="fp32", ep=mesh.ep, tp=mesh.tp
    )
    return MoeContext.make(
        problem,
        torch.float32,
        peers,  # type: ignore[arg-type]
        timeout=SECONDS,
        max_tokens=POSITIONS,
        max_decode_tokens=POSITIONS,
        replicated=case.a2a == "none" and mesh.dp == 1 and mesh.tp > 1,
        deterministic=case.deterministic,
        waterfill=case.waterfill,
        dispatch_algorithm="lp" if case.waterfill else "dynamic",
    )
