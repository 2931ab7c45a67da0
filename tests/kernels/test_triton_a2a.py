"""Kernels between ranks against their twins, byte by byte, and against an oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.comm.errors import PeerTimeout, WindowAborted
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.device_window import CpuDeviceWindow, OutOfStep
from moesaic.kernels import a2a as twins
from moesaic.kernels.a2a import (
    MAX_TAG,
    DeviceStateWord,
    Failure,
    FailureWords,
    LocalTokens,
    ResultPlane,
)
from moesaic.kernels.triton import a2a as kernels
from tests.kernels.a2a_cases import (
    RESULTS,
    ROWS,
    Case,
    assert_same_memory,
    on_device,
    oracle,
    write_results,
)
from tests.kernels.triton_cases import DEVICE, GPU, compile_apart

Windows = list[CpuDeviceWindow]
HALF, BF16 = torch.float16, torch.bfloat16
SMALL = [
    Case(counts=(1, 0, 2), rows=2),
    Case(counts=(0, 0), rows=0, top_k=1),
    Case(counts=(0, 1), rows=2, top_k=1, hidden=520, payload="fp16", dtype=HALF, padded=True),
    Case(counts=(1, 0, 0, 1), rows=1, top_k=2, slots=3, width=2, hidden=40),
]
PAYLOADS = [
    Case(counts=(1, 1), rows=1, payload="fp8", hidden=200, weights=True),
    Case(counts=(1, 0), rows=1, payload="int8", everywhere=True),
    Case(counts=(2, 0), rows=2, top_k=4, payload="nvfp4", scale=0.03),
    Case(counts=(1, 0), rows=1, payload="mxfp4", dtype=HALF),
    Case(counts=(1, 1), rows=1, payload="bf16", dtype=BF16, hidden=7),
]
# In the interpreter these take their time.
LARGE = [
    pytest.param(case, marks=() if GPU else pytest.mark.slow)
    for case in (
        Case(
            counts=(1, 3, 0, 2), rows=4, width=2, slots=3, payload="fp8", hidden=200, weights=True
        ),
        Case(counts=(2, 1, 1, 3), rows=3, width=2, everywhere=True, payload="int8"),
        Case(counts=(3, 2), rows=3, top_k=4, payload="nvfp4", scale=0.03, padded=True),
        Case(counts=(2,) * 8, rows=2, top_k=8, payload="mxfp4", dtype=HALF, weights=True),
        Case(counts=(2,), rows=2, top_k=1, payload="fp8", hidden=128),
        Case(counts=(9, 17), rows=17, top_k=2, hidden=1200),
    )
]


def both(case: Case) -> tuple[Windows, Windows]:
    return case.windows(DEVICE), case.windows("cpu")


def send_all(case: Case, windows: Windows, send: Callable[..., None], seed: int = 0) -> None:
    """The last one receives, too, as all others have sent."""
    for window in windows:
        tokens = case.tokens(window.rank, seed)
        tokens = tokens if send is twins.send.twin else on_device(tokens)
        call, receives = window.call(ROWS, "dispatch", tag=seed), window is windows[-1]
        send(tokens, case.rows, case.planes(window), case.spread, call, receives)


@pytest.mark.parametrize("case", [*SMALL, *PAYLOADS, *LARGE], ids=str)
def test_rows_arrive_as_those_of_the_twins(case: Case) -> None:
    ours, theirs = both(case)
    rounds = 2 if case is SMALL[0] or GPU else 1
    for seed in range(rounds):
        send_all(case, ours, kernels.send, seed)
        send_all(case, theirs, twins.send.twin, seed)
        assert_same_memory(case, ours, theirs)
        for window in ours:
            place = (case.rows, case.top_k, window.offset("ids"))
            kernels.receive(window.call(ROWS, "dispatch", tag=seed), *place)
            window.check()
    assert_same_memory(case, ours, theirs)
    assert ours[0].signals.state[DeviceStateWord.CHANNELS] == rounds


@pytest.mark.parametrize("case", [SMALL[0], PAYLOADS[0]], ids=str)
@pytest.mark.parametrize("code", [kernels, twins], ids=["kernels", "twins"])
def test_a_rank_that_only_compiles_writes_into_its_own_memory(case: Case, code: Any) -> None:
    """Others may serve while a rank starts; its own inbox is full of what its predecessor got."""
    windows = case.windows(DEVICE if code is kernels else "cpu")
    place_ids(case, windows)
    window, others = windows[0], [one.clone() for one in windows[0].signals.regions[1:]]
    tokens = case.tokens(0) if code is twins else on_device(case.tokens(0))

    def run(name: str, *given: Any) -> None:
        function = getattr(code, name)
        getattr(function, "twin", function)(*given)

    with window.isolated():
        rows, results = (window.call(channel, "start") for channel in (ROWS, RESULTS))
        run("send", tokens, case.rows, case.planes(window), case.spread, rows, True)
        run("receive", rows, case.rows, case.top_k, window.offset("ids"))
        for name, plane in (("collect_rows", "results"), ("collect_pairs", "pairs")):
            there = ResultPlane(case.rows, window.offset(plane), case.spread)
            run(name, torch.empty_like(tokens.x_TH), tokens, there, results, True)
        run("signal", results), run("wait", results)
    window.check()
    for region, before in zip(window.signals.regions[1:], others, strict=True):
        assert torch.equal(region, before)


def test_the_example_of_send() -> None:
    """Rank 1 with one token of ids [3, 0]; rank 0 has none."""
    case = Case(counts=(0, 1), rows=2, top_k=2, hidden=16)
    windows = case.windows(DEVICE)
    tokens = replace(case.tokens(1), ids_TK=torch.tensor([[3, 0]], dtype=torch.int32))
    call = windows[1].call(ROWS, "dispatch")
    kernels.send(on_device(tokens), 2, case.planes(windows[1]), case.spread, call)
    assert windows[0].plane("ids")[2:].tolist() == [[-1, 0], [-1, -1]]
    assert windows[1].plane("ids")[2:].tolist() == [[1, -1], [-1, -1]]
    for window in windows:
        values = window.plane("values").view(torch.float32).cpu()
        assert torch.equal(values[2:3], tokens.x_TH)
        assert values[:2].isnan().all() and values[3].isnan().all()


def collected(
    case: Case, windows: Windows, rank: int, pairs: bool, signals: bool, twin: bool = False
) -> Tensor:
    """Of what the twins collect, and of the kernels; rows that are no tokens are 7."""
    name = "collect_pairs" if pairs else "collect_rows"
    collect = getattr(twins, name).twin if twin else getattr(kernels, name)
    tokens = case.tokens(rank) if twin else on_device(case.tokens(rank))
    window = windows[rank]
    out_TH = torch.full_like(tokens.x_TH, 7.0)
    offset = window.offset("pairs" if pairs else "results")
    call = window.call(RESULTS, "combine", tag=int(pairs))
    results = ResultPlane(case.rows, offset, case.spread)
    out_TH = collect(out_TH, tokens, results, call, signals)
    window.check()
    return out_TH.cpu()


def check_collected(case: Case, windows: Windows, rank: int, pairs: bool, out_TH: Tensor) -> None:
    count, tokens = case.counts[rank], case.tokens(rank)
    assert (out_TH[count:] == 7).all()
    wanted_TH = oracle(case, windows, rank, tokens, pairs)
    bound = 1e-5 if case.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out_TH[:count].double(), wanted_TH, atol=bound, rtol=bound)


def place_ids(case: Case, windows: Windows) -> None:
    """As if they had arrived: by the twins, which the kernels that send are held against."""
    sent = case.windows("cpu")
    send_all(case, sent, twins.send.twin)
    for window in windows:
        window.plane("ids").copy_(sent[window.rank].plane("ids"))


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_results_are_summed_as_by_the_twins(case: Case) -> None:
    """The last rank signals as it collects."""
    ours, theirs = both(case)
    for windows in (ours, theirs):
        place_ids(case, windows)
    for pairs in (False, True):
        for windows in (ours, theirs):
            write_results(case, windows, seed=int(pairs))
        last = case.size - 1
        for rank in range(last):
            kernels.signal(ours[rank].call(RESULTS, "combine", tag=int(pairs)))
            twins.signal.twin(theirs[rank].call(RESULTS, "combine", tag=int(pairs)))
        for rank in reversed(range(case.size)):
            signals = rank == last
            out_TH = collected(case, ours, rank, pairs, signals)
            wanted_TH = collected(case, theirs, rank, pairs, signals, twin=True)
            assert torch.equal(out_TH, wanted_TH)
            check_collected(case, theirs, rank, pairs, out_TH)
    assert_same_memory(case, ours, theirs)


# The last but one before the count in a word begins anew, and a count that takes days.
BEFORE = (2**16 - 2, 2**32 - 2)
EITHER = [(kernels.signal, kernels.wait)]
if not GPU:
    EITHER.append((twins.signal.twin, twins.wait.twin))
Do = Callable[[twins.ChannelCall], None]


def after_days(count: int, signal: Do, wait: Do) -> tuple[Windows, list[twins.ChannelCall]]:
    """Two ranks that have raised their flags so often, in generation 1, and once more."""
    case = Case(counts=(1, 1), rows=1, hidden=16)
    windows = case.windows("cpu" if signal is twins.signal.twin else DEVICE)
    for window in windows:
        window.timeout = 0.05
        window.restart(Membership(1, tuple(range(window.size))))
        window.signals.state[DeviceStateWord.CHANNELS + 2 * RESULTS] = count
    calls = [window.call(RESULTS, "combine", tag=3) for window in windows]
    together(calls, signal, wait)
    return windows, calls


def together(calls: list[twins.ChannelCall], signal: Do, wait: Do) -> None:
    for call in calls:
        signal(call)
    for call in calls:
        wait(call)


def check(window: CpuDeviceWindow) -> None:
    if GPU:
        torch.cuda.synchronize()
    window.check()


@pytest.mark.parametrize("signal, wait", EITHER)
@pytest.mark.parametrize("count", BEFORE)
def test_a_count_that_begins_anew(count: int, signal: Do, wait: Do) -> None:
    """The next word is above the last one all the same: a peer is late, and not in another step."""
    windows, calls = after_days(count, signal, wait)
    generations = [int(flag) >> 32 for flag in windows[0].signals.flag(0, RESULTS)]
    together(calls, signal, wait)
    together(calls, signal, wait)
    assert (
        [int(flag) >> 32 for flag in windows[0].signals.flag(0, RESULTS)] == generations == [1, 1]
    )
    windows, calls = after_days(count, signal, wait)
    signal(calls[0])
    wait(calls[0])
    check(windows[1])
    with pytest.raises(PeerTimeout, match=r"rank 1 did not reach 'combine'.*last seen: 'combine'"):
        check(windows[0])


@pytest.mark.parametrize("signal, wait", EITHER)
@pytest.mark.parametrize("count", BEFORE)
def test_a_peer_that_has_gone_on_to_a_count_that_begins_anew(
    count: int, signal: Do, wait: Do
) -> None:
    windows, calls = after_days(count, signal, wait)
    signal(calls[1])
    wait(calls[0])
    with pytest.raises(OutOfStep, match="rank 1 has moved to a later step"):
        check(windows[0])


# (generation, count, tag) of two flags, in the order in which a rank raises them.
IN_ORDER = [
    ((0, 1, 9), (0, 1, 10)),
    ((0, 1, 9), (0, 2, 0)),
    ((0, 1, 0), (0, 2**15, MAX_TAG)),
    ((0, 2**16 - 1, MAX_TAG), (0, 2**16, 0)),
    ((0, 2**16 - 1, 0), (0, 2**16 + 2**15 - 2, MAX_TAG)),
    ((6, 2**32 - 1, 5), (6, 2**32, 5)),
    ((0, 2**16 - 1, MAX_TAG), (1, 1, 0)),
    ((0, 2**40, 9), (1, 1, 9)),
    ((7, 3, 1), (2**30, 2, 0)),
    ((2**31 - 2, 2**16 - 1, MAX_TAG), (2**31 - 1, 1, 0)),
]


@pytest.mark.parametrize("signal, wait", EITHER)
@pytest.mark.parametrize("earlier, later", IN_ORDER)
def test_which_of_two_flags_is_older(
    earlier: tuple[int, int, int], later: tuple[int, int, int], signal: Do, wait: Do
) -> None:
    case = Case(counts=(1, 1), rows=1, hidden=16)
    for order, failure in (
        ((earlier, later), Failure.OUT_OF_STEP),
        ((later, earlier), Failure.TIMEOUT),
    ):
        windows = case.windows("cpu" if signal is twins.signal.twin else DEVICE)
        for window, (generation, count, tag) in zip(windows, order, strict=True):
            window.signals.state[DeviceStateWord.TIMEOUT_NS] = 1_000_000
            window.signals.state[DeviceStateWord.GENERATION] = generation
            window.signals.state[DeviceStateWord.CHANNELS + 2 * RESULTS] = count - 1
            signal(window.call(RESULTS, "combine", tag))
        wait(windows[0].call(RESULTS, "combine", order[0][2]))
        if GPU:
            torch.cuda.synchronize()
        words = windows[0].signals.failure
        assert (words[FailureWords.FAILURE], words[FailureWords.PEERS]) == (
            failure,
            0b10,
        ), order
        assert words[FailureWords.SEEN] == windows[0].signals.flag(0, RESULTS)[1]


@pytest.mark.parametrize("signal, wait", EITHER)
@pytest.mark.parametrize("count", [2**16 + 9, 2**32 + 9, 3 * 2**32 + 9])
def test_a_peer_that_is_late_after_a_restart(count: int, signal: Do, wait: Do) -> None:
    """What it has raised before, however often, is of a generation that is over."""
    windows, calls = after_days(count, signal, wait)
    for window in windows:
        window.restart(Membership(2, tuple(range(window.size))))
    signal(calls[0])
    wait(calls[0])
    with pytest.raises(PeerTimeout, match=r"rank 1 did not reach 'combine'.*not seen before"):
        check(windows[0])
    for window in windows:
        window.restart(Membership(3, tuple(range(window.size))))
    together(calls, signal, wait)
    for window in windows:
        check(window)


FAILURES = [
    (Failure.TIMEOUT, PeerTimeout, r"\b2\b"),
    (Failure.OUT_OF_STEP, OutOfStep, "rank 2 is in layer 9, this rank in layer 1"),
    (Failure.ABORTED, WindowAborted, "because"),
]


@pytest.mark.parametrize("failure, error, text", FAILURES)
@pytest.mark.parametrize("collects", [False, True])
def test_a_peer_that_is_not_there(
    failure: Failure, error: type[Exception], text: str, collects: bool
) -> None:
    """What the wait leaves on the words, and that nothing is sent afterwards."""
    case = Case(counts=(1, 0, 1), rows=1, hidden=16)
    made = both(case)
    for windows, signal in zip(made, (kernels.signal, twins.signal.twin), strict=True):
        for window in windows:
            window.signals.state[DeviceStateWord.TIMEOUT_NS] = int(0.05e9)
        for rank in (0, 1):
            signal(windows[rank].call(RESULTS, "combine", tag=1))
        if failure == Failure.OUT_OF_STEP:
            signal(windows[2].call(RESULTS, "combine", tag=9))
        if failure == Failure.ABORTED:
            windows[0].abort("because")
    ours, theirs = made
    twins.wait.twin(theirs[0].call(RESULTS, "combine", tag=1))
    call = ours[0].call(RESULTS, "combine", tag=1)
    if collects:
        tokens = on_device(case.tokens(0))
        results = ResultPlane(case.rows, ours[0].offset("results"), case.spread)
        kernels.collect_rows(torch.empty_like(tokens.x_TH), tokens, results, call)
    else:
        kernels.wait(call)
    if GPU:
        torch.cuda.synchronize()
    assert_same_memory(case, ours, theirs)
    for windows in made:
        with pytest.raises(error, match=text):
            windows[0].check()
    send_all(case, ours[:1], kernels.send)
    kernels.signal(call)
    assert_same_memory(case, ours, theirs)


def test_a_new_generation_without_one_of_them() -> None:
    """Its rows get ids of -1, and its flags are not waited for."""
    case = Case(counts=(1, 1, 1), rows=1, hidden=16)
    ours, theirs = both(case)
    for windows, module in ((ours, kernels), (theirs, twins)):
        twin = module is twins
        for window in windows[1:]:
            window.restart(Membership(5, (1, 2)))
        send = twins.send.twin if twin else kernels.send
        send_all(case, windows[1:], send)
        assert (windows[2].plane("ids")[: case.rows] == -1).all()
        for window in windows[1:]:
            place = (case.rows, case.top_k, window.offset("ids"))
            receive = twins.receive.twin if twin else kernels.receive
            receive(window.call(ROWS, "dispatch"), *place)
            window.check()
            assert (window.plane("ids")[: case.rows] == -1).all()
        write_results(case, windows, seed=0)
        signal = twins.signal.twin if twin else kernels.signal
        for window in windows[1:]:
            signal(window.call(RESULTS, "combine"))
    assert_same_memory(case, ours, theirs)
    for rank in (1, 2):
        for pairs in (False, True):
            wanted_TH = collected_among(case, theirs, rank, pairs, twin=True)
            assert torch.equal(collected_among(case, ours, rank, pairs), wanted_TH)
            assert wanted_TH.isfinite().all()


def collected_among(
    case: Case, windows: Windows, rank: int, pairs: bool, twin: bool = False
) -> Tensor:
    """With the tag that was signalled."""
    name = "collect_pairs" if pairs else "collect_rows"
    collect = getattr(twins, name).twin if twin else getattr(kernels, name)
    tokens: LocalTokens = case.tokens(rank) if twin else on_device(case.tokens(rank))
    offset = windows[rank].offset("pairs" if pairs else "results")
    results = ResultPlane(case.rows, offset, case.spread)
    call = windows[rank].call(RESULTS, "combine")
    return collect(torch.empty_like(tokens.x_TH), tokens, results, call).cpu()


def test_few_programs_do_the_same() -> None:
    case = Case(counts=(3, 0), rows=3, top_k=2, hidden=600)
    ours, theirs = both(case)
    for window in ours:
        call = replace(window.call(ROWS, "dispatch"), programs=2)
        tokens = on_device(case.tokens(window.rank))
        kernels.send(tokens, case.rows, case.planes(window), case.spread, call)
    send_all(case, theirs, twins.send.twin)
    assert_same_memory(case, ours, theirs)


def test_compiled_for_a_hopper_gpu() -> None:
    compile_apart("aot_a2a")


@pytest.mark.slow
def test_all_of_them_compiled() -> None:
    compile_apart("aot_a2a", "all")
