"""What kernels put on an emulated link: against their twins, and against counts by hand.

The interpreter's clock stands still, so there a kernel waits for nothing; tests of ranks compare
times (tests/distributed/test_link.py, test_link_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moesaic.comm.windows.device_window import CpuDeviceWindow
from moesaic.core.link import EmulatedLink
from moesaic.kernels import a2a as twins
from moesaic.kernels.link import LinkLoad, LinkState, LinkWord, link_words
from moesaic.kernels.triton import a2a as kernels
from tests.kernels.a2a_cases import RESULTS, ROWS, Case, on_device
from tests.kernels.triton_cases import DEVICE

LINK = EmulatedLink(0.5, 3.0)  # 2 ns a byte
SENT = (LinkWord.ROWS, LinkWord.PAIRS, LinkWord.BYTES)
CASES = (
    Case(counts=(2, 0, 3), rows=3),
    Case(counts=(1, 0, 0, 1), rows=1, top_k=2, slots=3, width=2, hidden=40),
    Case(counts=(2, 1), rows=2, everywhere=True, payload="fp8", weights=True, hidden=200),
    Case(counts=(0, 2), rows=2, padded=True, hidden=1200),
)


def words(window: CpuDeviceWindow, word: LinkWord, channel: int = ROWS) -> list[int]:
    return link_words(window.signals, window.rank, channel, word).tolist()


def send_all(case: Case, windows: list[CpuDeviceWindow], send: Callable[..., None]) -> None:
    for window in windows:
        tokens = case.tokens(window.rank)
        tokens = tokens if send is twins.send.twin else on_device(tokens)
        call = window.call(ROWS, "dispatch")
        send(tokens, case.rows, case.planes(window), case.spread, call)


def by_hand(case: Case, source: int, to: int) -> tuple[int, int]:
    """Rows and pairs that one rank sends to another."""
    tokens = case.tokens(source)
    here_TK = (
        tokens.ids_TK[: tokens.count].div(case.slots, rounding_mode="floor") == to // case.width
    )
    rows_T = here_TK.any(1) | case.everywhere
    return int(rows_T.sum()), int(here_TK.sum())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_and_bytes_are_those_that_were_sent(case: Case) -> None:
    ours, theirs = case.windows(DEVICE, LINK), case.windows("cpu", LINK)
    send_all(case, ours, kernels.send)
    send_all(case, theirs, twins.send.twin)
    unit = case.planes(ours[0]).wire_bytes(case.top_k)
    for one, other in zip(ours, theirs, strict=True):
        assert [words(one, word) for word in SENT] == [words(other, word) for word in SENT]
        sources = [by_hand(case, source, one.rank) for source in range(case.size)]
        assert words(one, LinkWord.ROWS) == [rows for rows, _ in sources]
        assert words(one, LinkWord.PAIRS) == [pairs for _, pairs in sources]
        wanted = [unit * rows for rows, _ in sources]
        wanted[one.rank] = 0
        assert words(one, LinkWord.BYTES) == wanted
        assert words(one, LinkWord.ROWS_TO) == [0] * case.size


@pytest.mark.parametrize("kernel", [True, False])
def test_a_transfer_is_due_when_the_link_has_carried_it(kernel: bool) -> None:
    """Also behind one that is still on the link, of another channel."""
    case = CASES[0]
    windows = case.windows(DEVICE if kernel else "cpu", LINK)
    module = kernels if kernel else twins
    send_all(case, windows, kernels.send if kernel else twins.send.twin)
    unit = case.planes(windows[0]).wire_bytes(case.top_k)
    load = LinkLoad(fixed=7, unit=10, channel=ROWS, pairs=True)
    for window in windows:
        call = replace(window.call(RESULTS, "results"), load=load)
        (kernels.signal if kernel else module.signal.twin)(call)
    for source in range(case.size):
        others = [rank for rank in range(case.size) if rank != source]
        counts = [by_hand(case, source, rank) for rank in others]
        back = [by_hand(case, rank, source) for rank in others]
        rows_bytes = unit * sum(rows for rows, _ in counts)
        result_bytes = sum(7 + 10 * pairs for _, pairs in back)
        for rank in others:
            at = [words(windows[rank], word)[source] for word in (LinkWord.START, LinkWord.DUE)]
            assert at[1] - at[0] == 2 * rows_bytes + 3000
            then = [
                words(windows[rank], word, RESULTS)[source]
                for word in (LinkWord.START, LinkWord.DUE)
            ]
            assert then[0] >= at[1] - 3000
            assert then[1] - then[0] == 2 * result_bytes + 3000
        free = int(windows[source].signals.state[LinkState.FREE])
        assert free == words(windows[others[0]], LinkWord.DUE, RESULTS)[source] - 3000


def test_without_a_link_there_are_no_words() -> None:
    windows = Case().windows("cpu")
    with_link = Case().windows("cpu", LINK)
    assert windows[0].signals.link == 0 < with_link[0].signals.link
    assert windows[0].signals.state.tolist()[LinkState.COST : LinkState.FREE + 1] == [0, 0, 0]
    assert with_link[0].region_bytes >= windows[0].region_bytes


def test_answers_are_the_same_with_a_link() -> None:
    case = CASES[0]
    plain, late = case.windows(DEVICE), case.windows(DEVICE, LINK)
    for windows in (plain, late):
        send_all(case, windows, kernels.send)
        for window in windows:
            place = (case.rows, case.top_k, window.offset("ids"))
            kernels.receive(window.call(ROWS, "dispatch"), *place)
            window.check()
    for one, other in zip(plain, late, strict=True):
        for plane in ("values", "ids"):
            assert torch.equal(one.plane(plane), other.plane(plane))
