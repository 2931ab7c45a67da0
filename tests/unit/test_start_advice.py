"""What a start with sizes that do not fit advises."""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest

from moesaic.config.args import ServerArgs
from moesaic.config.resolve import resolve
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.setup.device_memory import DeviceRoom, HostRoom, TooLittleMemory
from moesaic.engine.setup.memory_plan import check_plan, loaded_tokens, plan_memory
from moesaic.models.locate import model_folder
from moesaic.models.tiny import materialise

RANKS = {"tp_size": 3, "ep_size": 3, "dp_size": 3, "enable_dp_attention": True}
HOST, GPU = {"device": "cpu"}, {"device": "cuda", "chunked_prefill_size": 64}
MOST_BYTES = 2**27


def arguments(model: str = "tiny:qwen3_moe", **flags: Any) -> ServerArgs:
    args = resolve(ServerArgs(model_path=model, device="cpu", **flags))
    return replace(args, model_path=model_folder(args))


def with_redundant(args: ServerArgs, number: int) -> ServerArgs:
    return replace(args, ep_num_redundant_experts=number)


def room_of(args: ServerArgs, nbytes: int) -> DeviceRoom | HostRoom:
    if args.device == "cuda":
        return DeviceRoom(nbytes, nbytes, 0)
    return HostRoom(nbytes, nbytes, args.tp_size)


def least_room(args: ServerArgs) -> int:
    """The fewest bytes with which all fits."""
    # A plan for which there is nothing to advise: it is checked for many rooms.
    plan = replace(plan_memory(args), args=with_redundant(args, 0))

    def fits(nbytes: int) -> bool:
        try:
            return plan.cache_tokens(room_of(args, nbytes)) > 0
        except TooLittleMemory:
            return False

    return bisect_left(range(MOST_BYTES), True, key=fits)


def refusal(args: ServerArgs, nbytes: int) -> str:
    with pytest.raises(TooLittleMemory) as caught:
        plan_memory(args).cache_tokens(room_of(args, nbytes))
    return str(caught.value)


def named(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"--ep-num-redundant-experts (\d+) it fits", text)]


def test_no_flags_of_the_experts_where_attention_cannot_be_split() -> None:
    args = resolve(ServerArgs(model_path="tiny:qwen3_moe", tp_size=3, device="cpu"))
    with pytest.raises(ValueError, match="cannot be split over 3 ranks") as caught:
        check_plan(replace(args, model_path=model_folder(args)))
    assert "--ep-size" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [
        HOST,
        HOST | {"max_total_tokens": 512},
        HOST | {"enable_eplb": True, "eplb_max_bytes_per_step": 2**20},
        GPU | {"max_total_tokens": 512},
        GPU | {"mem_fraction_static": 0.7, "enable_eplb": True},
    ],
    ids=lambda flags: " ".join(f"{name}={value}" for name, value in flags.items()),
)
def test_the_redundant_experts_that_fit_are_named(flags: dict[str, Any]) -> None:
    """8 experts on 3 ranks: 1, 4, 7, 10 and 13 redundant ones fill 3 to 7 slots of a rank."""
    args = replace(arguments(**RANKS), **flags)
    numbers = (1, 4, 7, 10, 13)
    least = [least_room(with_redundant(args, number)) for number in numbers]
    assert least == sorted(set(least)) and least[-1] < MOST_BYTES
    asked = with_redundant(args, numbers[-1])
    for number, enough, more in zip(numbers, least, least[1:], strict=False):
        plan_memory(with_redundant(args, number)).cache_tokens(room_of(args, enough))
        assert named(refusal(asked, enough)) == [number]
        assert named(refusal(with_redundant(args, number + 1), more - 1)) == [number]
    assert "does not fit without redundant experts either" in refusal(asked, least[0] - 1)


@pytest.mark.parametrize(
    ("moves", "drafts"),
    [
        (False, {"speculative_algorithm": "NEXTN"}),
        (True, {"speculative_algorithm": "NEXTN", "speculative_moe_a2a_backend": "deepep"}),
        (
            True,
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": materialise("tiny:mixtral"),
            },
        ),
    ],
    ids=["its layer", "a layer with a backend of its own", "another model"],
)
def test_the_draft_layer_has_redundant_experts_too(moves: bool, drafts: dict[str, Any]) -> None:
    """The number that fits counts them, as they are as many as the target's."""
    model = "tiny:deepseek_v3,num_nextn_predict_layers=1"
    flags: dict[str, Any] = RANKS | {"enable_eplb": moves}
    args = arguments(model, **flags, **drafts)
    numbers = (1, 4, 7)
    least = [least_room(with_redundant(args, number)) for number in numbers]
    plain = [least_room(with_redundant(arguments(model, **flags), n)) for n in numbers]
    assert least[1] - least[0] > 1.2 * (plain[1] - plain[0])
    for number, enough, more in zip(numbers, least, least[1:], strict=False):
        asked = with_redundant(args, 7)
        assert named(refusal(asked, enough)) == named(refusal(asked, more - 1)) == [number]


def test_buffers_of_moving_experts_need_room() -> None:
    args = with_redundant(arguments(**RANKS), 4)
    moving = replace(args, enable_eplb=True)
    staged = sum(share.moving_bytes for share in plan_memory(moving).ranks)
    assert staged > 0 and least_room(moving) == least_room(args) + staged


def test_nothing_is_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    args = with_redundant(arguments(**RANKS), 13)
    plan, room = plan_memory(args), room_of(args, least_room(with_redundant(args, 4)))
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "moesaic"), pytest.raises(TooLittleMemory):
        plan.cache_tokens(room)
    assert not caplog.records


def test_a_placement_of_other_slots_is_not_advised() -> None:
    """A file with a placement fits one number of slots; one with counts fits all."""
    args = with_redundant(arguments(**RANKS), 4)
    placement = {"physical_to_logical_map": [[slot % 8 for slot in range(12)]] * 2}
    counts = {"logical_count": [[1.0] * 8] * 2}
    nbytes = least_room(args) - 1
    given = [replace(args, init_expert_location=json.dumps(x)) for x in (placement, counts)]
    assert [named(refusal(args, nbytes)) for args in given] == [[], [1]]


def test_a_rank_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    args = with_redundant(arguments(max_running_requests=4, max_total_tokens=64), 9)
    fits, more = (least_room(with_redundant(args, number)) for number in (5, 6))
    monkeypatch.setattr(
        "moesaic.engine.setup.device_memory.total_memory", lambda: (fits + more) // 2
    )
    for number in (9, 6):
        with (
            monkeypatch.context() as patch,
            pytest.raises(ValueError, match="-experts 5 it fits"),
        ):
            patch.setattr("moesaic.engine.runner.weight_source.load_weights", pytest.fail)
            ModelRunner(with_redundant(args, number))
    assert ModelRunner(with_redundant(args, 5)).num_pages == 4


def test_a_rank_that_holds_more_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the planned memory was free, and when the rank has loaded nothing is left."""
    args = with_redundant(arguments(max_running_requests=4), 9)
    planned = least_room(args)
    free = iter((planned, 0))
    monkeypatch.setattr("moesaic.engine.setup.device_memory.free_memory", lambda: next(free))
    with pytest.raises(ValueError, match=r"nothing is left for a KV cache.*-experts 8 it fits"):
        ModelRunner(args)
    assert list(free) == []


def test_stages_that_are_not_alike() -> None:
    """A node that holds both has no room for two like the larger one."""
    model = "tiny:qwen3_moe,num_hidden_layers=3"
    flags = {"pp_size": 2, "max_running_requests": 4}
    args = resolve(ServerArgs(model_path=model, device="cpu", **flags))
    args = replace(args, model_path=model_folder(args))
    plan = plan_memory(args)
    larger = max(plan.ranks, key=lambda share: share.fixed_bytes)
    total = (plan.node_bytes[0] + 2 * larger.fixed_bytes) // 2
    loaded = HostRoom(total, total - plan.node_bytes[0], 2)
    assert plan.node_bytes[0] < total < 2 * larger.fixed_bytes
    assert loaded_tokens(args, plan.model, larger, loaded) > 0
