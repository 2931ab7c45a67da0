"""What --emulate-link may say, and what it means."""

import pytest

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.lifecycle import Membership
from moesaic.comm.windows.device_window import CpuDeviceWindow
from moesaic.comm.windows.factory import create_window
from moesaic.config import ServerArgs
from moesaic.config.resolve import contradictions
from moesaic.core.link import EmulatedLink
from moesaic.kernels.link import LinkState


def test_a_link_is_read_and_named_with_its_units():
    link = EmulatedLink.parse(" us=5, gbps=50 ")
    assert (link.gigabytes, link.latency_us, link.latency_ns) == (50.0, 5.0, 5000)
    assert str(link) == "50 GB/s (400 Gbit/s), 5 us"
    assert EmulatedLink.parse("gbps=450").latency_us == 0.0


@pytest.mark.parametrize(("gigabytes", "nbytes", "ns"), [(1, 10**9, 10**9), (50, 10**6, 20_000)])
def test_a_gigabyte_a_second_is_a_byte_a_nanosecond(gigabytes: float, nbytes: int, ns: int):
    assert EmulatedLink(gigabytes).ns(nbytes) == pytest.approx(ns, rel=1e-4)
    assert EmulatedLink(gigabytes).ns(0) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("50", "'50' is no link"),
        ("us=5", "has no gbps"),
        ("gbps=fast", "gbps='fast' is no number"),
        ("gbps=1,gbps=2", "is no link"),
        ("gbps=0", "gbps=0: give at least 0.01"),
        ("gbps=nan", "gbps=nan: give at least"),
        ("gbps=1,us=-1", "us=-1: give 0 to 1000000"),
    ],
)
def test_what_is_no_link_is_refused(text: str, told: str):
    with pytest.raises(ValueError, match=told):
        EmulatedLink.parse(text)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"tp_size": 2, "emulate_link": "fast"}, "--emulate-link: 'fast' is no link: give gbps"),
        ({"emulate_link": "gbps=50"}, "--emulate-link with one rank: it sends nothing"),
        (
            {"tp_size": 2, "nnodes": 2, "emulate_link": "gbps=50"},
            "there is a network between nodes",
        ),
    ],
)
def test_contradictions(flags: dict[str, object], told: str):
    args = ServerArgs(model_path="tiny:mixtral", **flags)  # type: ignore[arg-type]
    assert any(told in text for text in contradictions(args))


def test_a_link_changes_its_speed_between_measurements():
    """bench.overlap measures several links with the same windows, and graphs of them."""
    slow, fast = EmulatedLink(1.0, 5.0), EmulatedLink(8.0, 1.0)
    window = CpuDeviceWindow.between(2, [], 1.0, channels=1, link=slow)[0]
    window.set_link(fast)
    state = window.signals.state
    assert (int(state[LinkState.COST]), int(state[LinkState.LATENCY])) == (fast.cost, 1000)
    window.restart(Membership(1, (0, 1)))
    assert int(window.signals.state[LinkState.COST]) == fast.cost, "a restart keeps it"
    host = create_window(RankGroup.alone(), [], 1.0, link=slow)
    host.set_link(fast)
    assert host.link is not None and host.link.link == fast
