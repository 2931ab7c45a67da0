"""The registry of the parts that a rank restarts after a rollback."""

from __future__ import annotations

import gc

import pytest

from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.lifecycle import Lifecycle, Membership, Participant


class Recorder(Participant):
    def __init__(self, log: list[tuple[str, object]], name: str) -> None:
        self.log, self.name = log, name

    def restart(self, membership: Membership) -> None:
        self.log.append((self.name, membership))

    def abort(self, reason: str) -> None:
        self.log.append((self.name, reason))


def test_participants_restart_in_the_order_of_registration():
    lifecycle, log = Lifecycle(Membership(0, (0, 1, 2, 3))), []
    first, second = Recorder(log, "first"), Recorder(log, "second")
    lifecycle.register(first, (0, 1, 2, 3))
    lifecycle.register(second, (3, 1))
    lifecycle.restart(Membership(5, (1, 2, 3), epoch=2))
    # Each sees the live ranks in the numbering of its own group.
    assert log == [
        ("first", Membership(5, (1, 2, 3), epoch=2)),
        ("second", Membership(5, (0, 1), epoch=2)),
    ]
    log.clear()
    lifecycle.restart()
    assert [membership.generation for _, membership in log] == [6, 6]
    log.clear()
    lifecycle.abort("a rank failed")
    assert log == [("first", "a rank failed"), ("second", "a rank failed")]


def test_what_is_garbage_does_not_restart():
    lifecycle, log = Lifecycle(Membership(0, (0,))), []
    kept = Recorder(log, "kept")
    lifecycle.register(Recorder(log, "dropped"), (0,))
    lifecycle.register(kept, (0,))
    gc.collect()
    lifecycle.restart()
    assert [name for name, _ in log] == ["kept"]


def test_graphs_are_kept_unless_a_participant_loses_them():
    group, log = RankGroup.alone(), []
    one, other = Recorder(log, "one"), Recorder(log, "other")
    group.register(one)
    group.register(other)
    assert group.lifecycle.keeps_graphs
    other.keeps_graphs = False
    assert not group.lifecycle.keeps_graphs


def test_a_membership_is_checked():
    members = Membership(4, (0, 2))
    members.check(2, 3, previous=3, limit=9)
    with pytest.raises(ValueError, match="generation 4: give one above 4 and below 9"):
        members.check(2, 3, previous=4, limit=9)
    with pytest.raises(ValueError, match="generation 4: give one above 3 and below 4"):
        members.check(2, 3, previous=3, limit=4)
    with pytest.raises(ValueError, match=r"active ranks \[0, 2\]: give some of 0..2, with 1 among"):
        members.check(1, 3, previous=3, limit=9)
