"""Two micro-batches: where batches are cut, how lists of operations run, and who decides it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.config import ServerArgs
from moesaic.config.overlap import overlap_contradictions
from moesaic.config.resolve import resolve
from moesaic.core.overlap import Overlap, schedules_of
from moesaic.core.step import Step
from moesaic.engine.schedule.plan import DecodeRows, PlanItem, StepAgreement, StepPlan
from moesaic.engine.setup.memory_plan import plan_memory
from moesaic.engine.worker.step_splitter import WHOLE, StepSplitter
from moesaic.layers.paged_cache import PagedCache, Sequences, SequenceSpan
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.blocks import CausalLM
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.halves import Half, Halves, forward_halves
from moesaic.models.locate import materialise
from moesaic.models.registry import build_model
from moesaic.models.weights import load_weights
from moesaic.overlap.executor import run_two
from moesaic.overlap.operations import (
    YIELD,
    MicroBatch,
    OnceState,
    Operation,
    YieldOperation,
    fills_wait,
    plain_order,
)
from moesaic.overlap.policy import POLICIES, StepShape, TwoBatches
from moesaic.overlap.split import BatchCut, cut_decodes, cut_prompts

# SGLang's table for a threshold of 0.48: new tokens, whole sequences and tokens in the first half.
CUTS = [
    ([42], (0, 21)),
    ([42, 999], (1, 520)),
    ([999, 42], (0, 520)),
    ([498, 502], (1, 498)),
    ([4096, 4096, 4096, 4096], (2, 8192)),
    ([4095, 4096, 4096, 4096, 1], (2, 8191)),
    ([1, 4095, 4096, 4096, 4096], (3, 8192)),
    ([4097, 4096, 4096, 4095, 1], (2, 8193)),
    ([1, 1, 1, 1, 99999], (4, 50001)),
    ([99999, 1, 1, 1, 1], (0, 50001)),
    ([], (0, 0)),
]


@pytest.mark.parametrize(("lengths", "expected"), CUTS)
def test_prompts_are_cut_like_sglangs(lengths: list[int], expected: tuple[int, int]) -> None:
    assert cut_prompts(np.array(lengths, np.int64), 0.48) == expected


@pytest.mark.parametrize(
    ("lengths", "threshold", "expected"),
    [
        ([42, 999], 0, (1, 42)),  # never inside of a sequence
        ([42], 0, (1, 42)),
        ([1], 0.48, (1, 1)),  # a token cannot be cut
        ([1, 1], 0.5, (1, 1)),
        ([498, 502], 0.5, (1, 500)),
        ([3, 5, 3], 0.5, (1, 5)),
    ],
)
def test_thresholds(lengths: list[int], threshold: float, expected: tuple[int, int]) -> None:
    assert cut_prompts(np.array(lengths), threshold) == expected


def test_decodes_are_cut_between_sequences() -> None:
    assert cut_decodes(np.ones(99, np.int64)) == (49, 49)
    assert cut_decodes(np.array([3, 1, 2, 5])) == (2, 4), "with drafts a sequence has several"
    assert cut_decodes(np.ones(1, np.int64)) == (0, 0)
    assert cut_decodes(np.ones(0, np.int64)) == BatchCut(0, 0)


def sequences(lengths: list[int], held: list[int]) -> Sequences:
    """`held`: tokens of each sequence before the step."""
    new = np.array(lengths, np.int32)
    starts = (np.cumsum(new) - new).astype(np.int32)
    first = 100 * np.arange(len(new), dtype=np.int32)
    return Sequences(starts, new, new + np.array(held, np.int32), first)


def rows(part: Sequences) -> list[tuple[int, int]]:
    """(table row, position) of each new token, in the order of rows."""
    number, position = part.positions()
    row = part.starts_B[number] + position - (part.kv_lens_B - part.lengths_B)[number]
    order = np.argsort(row)
    assert row[order].tolist() == list(range(len(row))), "rows follow each other from 0 on"
    return list(zip(part.first_B[number][order].tolist(), position[order].tolist(), strict=True))


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5, 9, 10])
def test_a_cut_keeps_every_token_at_its_position(cut: int) -> None:
    whole = sequences([3, 1, 6], [0, 7, 2])
    first, second = whole.cut(cut)
    assert rows(first) + rows(second) == rows(whole)
    assert len(rows(first)) == cut
    assert (first.lengths_B > 0).all() and (second.lengths_B > 0).all()
    ends = dict(zip(second.first_B.tolist(), second.kv_lens_B.tolist(), strict=True))
    assert ends.get(200, 8) == 8, "the second part of a sequence sees all of it"


def test_nothing_can_be_cut() -> None:
    first, second = sequences([], []).cut(0)
    assert len(first) == len(second) == 0


class State(OnceState):
    batch: str
    value: int


def test_a_state_refuses_overwriting() -> None:
    state = State()
    with pytest.raises(AttributeError, match="no operation has set value of State"):
        _ = state.value
    state.value = 3
    with pytest.raises(AttributeError, match="value is set: no operation may replace"):
        state.value = 4
    del state.value
    state.value = 5
    assert state.value == 5


@dataclass
class Noting:
    """A layer as one from outside writes it: operations note when they run. It needs no class of
    this project."""

    name: str
    log: list[str]
    yields: int = 2
    ran: list[Any] = field(default_factory=list)

    def ops(self) -> list[Operation]:
        found: list[Operation] = [self._attn]
        for number in range(self.yields):
            found += [YieldOperation(), lambda state, n=number: self._note(state, f"after {n}")]
        return found

    def begin(self, batch: MicroBatch) -> OnceState:
        state = State()
        state.batch = str(batch.ctx)
        return state

    def end(self, state: State, batch: MicroBatch) -> None:
        self.ran.append((state.batch, batch))

    def _attn(self, state: State) -> None:
        self._note(state, "attn")

    def _note(self, state: State, what: str) -> None:
        self.log.append(f"{state.batch} {self.name} {what}")


def batches() -> Iterator[MicroBatch]:
    return (MicroBatch(name, torch.zeros(0)) for name in "AB")  # type: ignore[arg-type]


def test_two_batches_take_turns_at_yields() -> None:
    log: list[str] = []
    run_two([Noting("l0", log, 1), Noting("dense", log, 0), Noting("l1", log, 1)], *batches())
    assert log == [
        "A l0 attn", "B l0 attn",
        "A l0 after 0", "A dense attn", "A l1 attn",  # no yield between layers
        "B l0 after 0", "B dense attn", "B l1 attn",
        "A l1 after 0", "B l1 after 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("delta", "order"),
    [(0, "ABABAB"), (1, "AABABB"), (2, "AAABBB"), (5, "AAABBB")],
)
def test_the_first_may_be_stages_ahead(delta: int, order: str) -> None:
    log: list[str] = []
    run_two([Noting("l", log)], *batches(), delta)
    assert "".join(line[0] for line in log) == order
    for name in "AB":
        own = [line.split(" ", 2)[2] for line in log if line[0] == name]
        assert own == ["attn", "after 0", "after 1"]


def test_layers_without_a_yield_and_no_layers() -> None:
    log: list[str] = []
    run_two([Noting("a", log, 0), Noting("b", log, 0)], *batches())
    assert log == ["A a attn", "A b attn", "B a attn", "B b attn"]
    run_two([], *batches())


def test_plain_order() -> None:
    """Without yields; what fills a wait runs last."""

    def first(state: State) -> None: ...

    @fills_wait
    def shared(state: State) -> None: ...

    def last(state: State) -> None: ...

    assert plain_order([first, YIELD, shared, last, YIELD]) == (first, last, shared)


@pytest.mark.parametrize(
    ("counts", "first", "splits"),
    [
        ((4, 0), (2, 0), True),
        ((1, 1), (0, 0), False),  # nothing in the first half
        ((1, 2), (1, 0), True),
        ((1,), (1,), False),
        ((4, 4), (), False),  # some group has to keep its batch whole
    ],
)
def test_a_step_is_split_if_both_halves_have_tokens(
    counts: tuple[int, ...], first: tuple[int, ...], splits: bool
) -> None:
    shape = StepShape(counts, first, prefill=False)
    assert shape.can_split == splits
    assert TwoBatches().choose(shape) == (Overlap.TBO if splits else Overlap.OFF)
    assert POLICIES["off"]().choose(shape) == Overlap.OFF


@pytest.mark.parametrize(
    ("counts", "first", "halves", "rows"),
    [
        ((5, 2), (2, 1), ((2, 1), (3, 1)), 5),
        ((8, 0), (6, 0), ((6, 0), (2, 0)), 11),  # a half of 6 rows is one of 11 or 12
        ((2, 1), (1, 0), ((1, 0), (1, 1)), 2),
    ],
)
def test_rows_of_a_step_in_halves(
    counts: tuple[int, ...], first: tuple[int, ...], halves: Any, rows: int
) -> None:
    agreement = StepAgreement(1, counts, overlap=Overlap.TBO, first_half=first)
    assert agreement.halves == halves and agreement.most_rows == rows
    assert StepAgreement(1, counts).most_rows == max(counts)


def decodes(count: int) -> DecodeRows:
    column = np.arange(count, dtype=np.int64)
    return DecodeRows(column, column, column + 5, column)


def prompt(length: int, **more: Any) -> PlanItem:
    return PlanItem(9, list(range(length)), 0, 0, **more)


def test_what_a_group_tells_of_its_batch() -> None:
    splitter = StepSplitter(TwoBatches(), 0.48)
    assert splitter.first_half(StepPlan(decodes=decodes(7))) == 3
    mixed = StepPlan([prompt(40)], prefill=True, decodes=decodes(2))
    assert splitter.first_half(mixed) == 21
    assert splitter.first_half(StepPlan()) == 0, "an idle group has two halves without tokens"
    assert splitter.first_half(StepPlan([prompt(9)], is_routed=True)) == WHOLE
    assert StepSplitter().first_half(mixed) == WHOLE


def test_all_agree_if_each_group_can_split() -> None:
    splitter, whole = StepSplitter(TwoBatches(), 0.48), StepAgreement(3, (4, 0, 7))
    split = splitter.settle(whole, (2, 0, 3))
    assert (split.overlap, split.first_half) == (Overlap.TBO, (2, 0, 3))
    for halves in ((2, 0, WHOLE), (0, 0, 0)):
        agreed = splitter.settle(whole, halves)
        assert (agreed.overlap, agreed.first_half) == (Overlap.OFF, ())


def args(**flags: Any) -> ServerArgs:
    return ServerArgs.from_kwargs(model_path="m", device="cpu", **flags)


TWO = {"tp_size": 2, "ep_size": 2}


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ({}, "off"),
        (TWO, "off"),
        ({**TWO, "overlap": "tbo"}, "tbo"),
        ({**TWO, "enable_two_batch_overlap": True}, "tbo"),
        ({"enable_two_batch_overlap": True}, "off"),  # one rank sends nothing
        ({"overlap": "tbo", "pp_size": 2}, "off"),
    ],
)
def test_what_overlap_resolves_to(flags: dict[str, Any], value: str) -> None:
    found = resolve(args(**flags))
    assert found.overlap == value
    assert resolve(found) == found, "resolved flags stay"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({**TWO, "overlap": "tbo"}, ""),  # the ranks say what it does
        ({**TWO, "enable_two_batch_overlap": True}, "tbo: --enable-two-batch-overlap"),
        ({"enable_single_batch_overlap": True}, "off: the experts of a layer are on one rank"),
        ({"overlap": "auto"}, "off: the experts of a layer are on one rank"),
        ({"overlap": "off"}, ""),
        (TWO, ""),
    ],
)
def test_the_log_says_what_is_not_as_asked(
    flags: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moesaic")
    resolve(args(**flags))
    lines = [line for line in caplog.messages if line.startswith("--overlap")]
    assert len(lines) == bool(told) and all(f"--overlap is {told}" in line for line in lines)


def test_contradictions() -> None:
    both = args(**TWO, overlap="off", enable_two_batch_overlap=True)
    assert list(overlap_contradictions(both)) == [
        "--enable-two-batch-overlap and --overlap off exclude each other: keep one"
    ]
    assert list(overlap_contradictions(args(**TWO, enable_two_batch_overlap=True))) == []
    (refused,) = overlap_contradictions(args(**TWO, overlap="auto", pp_size=2))
    assert refused.startswith("--overlap auto with --pp-size 2: it measures steps")


def test_every_choice_has_schedules_and_a_policy() -> None:
    assert set(POLICIES) == {name for name in ("off", "sbo", "tbo") if schedules_of(name)}
    assert schedules_of(None) == (Overlap.OFF,) and Overlap.TBO in schedules_of("tbo")
    assert Step().overlap == Overlap.OFF


PAGE, POSITIONS, NEW = 4, 32, 9


def tiny_model() -> CausalLM:
    folder = Path(materialise("tiny:qwen3_moe"))
    model = build_model(RawConfig.read(folder), BuildContext.single(torch.float32, POSITIONS))
    load_weights(model, folder)
    return model


def hidden_states(model: CausalLM, cut: int | None = None) -> torch.Tensor:
    """Of one sequence, in two halves if there is a cut."""
    cache = PagedCache(model.cache, POSITIONS // PAGE, PAGE, torch.float32)
    cache.clear(range(POSITIONS // PAGE + 1))
    pages, ids_T = range(1, 1 + POSITIONS // PAGE), torch.arange(NEW)
    positions_T = torch.arange(NEW)

    def attention(length: int, kv_len: int) -> TorchAttention:
        return TorchAttention(cache, [SequenceSpan(0, length, kv_len, pages)] if length else [])

    if cut is None:
        return model(ids_T, positions_T, attention(NEW, NEW))
    step = Step(overlap=Overlap.TBO)
    first = Half(slice(0, cut), attention(cut, cut), step)
    second = Half(slice(cut, NEW), attention(NEW - cut, NEW), replace(step, lane=1))
    return forward_halves(model, ids_T, positions_T, Halves(first, second))


@torch.inference_mode()
@pytest.mark.parametrize("cut", [0, 4, NEW])
def test_a_model_in_halves(cut: int) -> None:
    """Inside of a sequence, and with nothing in one half."""
    model = tiny_model()
    error = (hidden_states(model, cut) - hidden_states(model)).abs().max()
    assert error < 1e-5


@torch.inference_mode()
def test_the_layer_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/overlap.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], found)
    model = tiny_model()
    whole, halves = hidden_states(model), hidden_states(model, 4)
    for layer in model.model.layers:
        layer.__class__ = found["MyLayer"]
        layer.__dict__.pop("_orders")
    assert torch.equal(hidden_states(model), whole)
    assert torch.equal(hidden_states(model, 4), halves)


@pytest.mark.parametrize("backend", ["deepep", "none"])
def test_the_memory_plan_has_the_second_lane(backend: str) -> None:
    """Of a GPU's buffers, before they are allocated; ranks on CPU have two lanes anyway."""

    def buffers(device: str, **flags: Any) -> int:
        given = {"model_path": materialise("tiny:qwen3_moe"), "moe_a2a_backend": backend}
        found = resolve(ServerArgs.from_kwargs(**given, **TWO, device="cpu", **flags))
        return plan_memory(replace(found, device=device)).ranks[0].a2a_bytes

    one, two = buffers("cuda"), buffers("cuda", overlap="tbo")
    assert one < two <= 2 * one, "regions are multiples of 2 MiB"
    assert buffers("cpu") == buffers("cpu", overlap="tbo")
