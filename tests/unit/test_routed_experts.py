"""Routed experts of requests: by position, each once, whatever happens between the steps."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.config import ServerArgs, resolve
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.frontend import routed_experts
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.runner.routed_experts import RoutedSlots, join_layers
from moesaic.engine.schedule.plan import PlanItem, StepPlan, StepResult
from moesaic.engine.schedule.plan_codec import PlanReceiver, PlanSender
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import materialise
from moesaic.moe.placement import Placement

ROW = 8
PROMPTS = [[n * 7 % 250 + k for k in range(3 + 9 * n)] for n in range(6)]


@pytest.fixture(scope="module")
def core() -> Iterator[LocalCore]:
    """With so few pages that requests are retracted."""
    args = resolve(
        ServerArgs.from_kwargs(
            model_path="tiny:qwen3_moe",
            enable_deterministic_inference=True,
            page_size=4,
            chunked_prefill_size=16,
            max_total_tokens=96,
            schedule_conservativeness=0.01,
        )
    )
    args = replace(args, model_path=materialise(args.model_path))
    yield LocalCore(args, ModelRunner(args, asynchronous=True))


def request(number: int, **fields: Any) -> Request:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    fields = {"routed_start": 0, "routed_row": ROW, **fields}
    return Request(str(number), PROMPTS[number], params, number, 20, number, **fields)


def serve(core: LocalCore, requests: list[Request]) -> list[Request]:
    for one in requests:
        core.add(RequestState(one, None, lambda progress: None))
    while core.has_work:
        core.step()
    return requests


@pytest.fixture(scope="module")
def alone(core: LocalCore) -> list[Request]:
    """Each request by itself."""
    return [serve(core, [request(number)])[0] for number in range(len(PROMPTS))]


def test_retracted_requests_have_each_token_once(core: LocalCore, alone: list[Request]) -> None:
    found = serve(core, [request(number) for number in range(len(PROMPTS))])
    assert sum(one.retractions for one in found) > 0
    assert [one.routed for one in found] == [one.routed for one in alone]
    assert [len(one.routed) for one in found] == [(len(p) + 19) * ROW for p in PROMPTS]


def test_a_request_that_another_rank_had(core: LocalCore, alone: list[Request]) -> None:
    """It computes emitted tokens again, and their experts; the caller keeps those it has."""
    for number in (0, 3):
        emitted = alone[number].output_ids[:7]
        (found,) = serve(core, [request(number, emitted=emitted)])
        assert found.routed == alone[number].routed
        caller = request(number)
        caller.add_routed(0, bytes(found.routed[: 5 * ROW]))
        caller.add_routed(0, bytes(3 * ROW))
        assert caller.routed == found.routed[: 5 * ROW] and caller.next_routed == 5
        caller.add_routed(2, bytes(found.routed[2 * ROW :]))
        assert caller.routed == found.routed


def test_steps_that_fail_are_done_again(
    core: LocalCore, alone: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, steps = core.runner.steps.begin, iter(range(1000))

    def fail(*given: Any) -> Any:
        if next(steps) in (1, 5):
            raise RuntimeError("on purpose")
        return begin(*given)

    monkeypatch.setattr(core.runner.steps, "begin", fail)
    found = serve(core, [request(0), request(2)])
    assert [one.routed for one in found] == [alone[0].routed, alone[2].routed]


def test_only_steps_that_a_request_asks_about_are_routed(
    core: LocalCore, alone: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, plans = core.runner.steps.begin, list[StepPlan]()

    def record(plan: StepPlan, *given: Any) -> Any:
        plans.append(plan)
        return begin(plan, *given)

    monkeypatch.setattr(core.runner.steps, "begin", record)
    asked = request(0, routed_start=len(PROMPTS[0]) + 4)
    serve(core, [asked, request(2, routed_start=None)])
    assert asked.routed == alone[0].routed[asked.routed_start * ROW :]
    found = [plan.is_routed for plan in plans]
    assert found == [any(item.num_routed for item in plan.items) for plan in plans]
    assert sum(found) == 15 and not any(found[:4])
    sender, receiver = PlanSender(), PlanReceiver()
    sent = [receiver.decode(sender.encode(plan)).is_routed for plan in plans]
    assert sent == found


def test_rows_of_items_and_layers_of_stages() -> None:
    items = [
        PlanItem(0, [1, 2, 3], 0, 0, num_routed=2),
        PlanItem(1, [4], 0, 1),
        PlanItem(2, [5, 6], 0, 2, num_routed=2),
    ]
    assert StepPlan(items).routed_rows() == [1, 2, 4, 5]
    first, last = np.arange(8, dtype=np.uint16), np.arange(100, 104, dtype=np.uint16)
    joined = join_layers([first.tobytes(), b"", last.tobytes()], 4)
    expected = [[0, 1, 100], [2, 3, 101], [4, 5, 102], [6, 7, 103]]
    assert np.frombuffer(joined, np.uint16).reshape(4, 3).tolist() == expected
    parts = list(StepResult([], joined).routed_of(items))
    assert parts == [joined[:12], b"", joined[12:]]
    assert list(StepResult([]).routed_of(items)) == [b"", b"", b""]


def test_slots_become_logical_experts() -> None:
    """Layer 1 of three has experts; two of its three experts have a replica."""
    reader: Any = SimpleNamespace(num_layers=3, top_k=2, moe_layers=[1])
    slots_RMK = torch.tensor([[[0, 4]], [[3, 2]]], dtype=torch.int32)
    found = RoutedSlots(reader, slots_RMK, [Placement(3, (2, 1, 0, 1, 2))]).experts()
    experts = np.frombuffer(found, np.uint16).reshape(2, 3, 2)
    assert experts.tolist() == [[[0, 0], [2, 2], [0, 0]], [[0, 0], [1, 0], [0, 0]]]


def test_an_aborted_request_has_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed_experts, "PIECE", 9)
    one = request(1, routed_start=2)
    one.add_routed(2, bytes(range(3 * ROW)))
    found = np.frombuffer(base64.b64decode(routed_experts.encoded(one)), np.int32)
    assert found.tolist() == np.arange(24).astype(np.uint8).view(np.uint16).tolist()
    assert routed_experts.encoded(request(0)) == ""
