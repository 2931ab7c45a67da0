"""Dumps of the recorders of two ranks: what fails, what is lost meanwhile, and what is empty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.balance.files import read_loads
from moesaic.comm.mesh import Mesh
from moesaic.config import ServerArgs
from moesaic.engine.frontend.expert_records import FOLDER_VARIABLE, ExpertRecords, RecordNotWritten
from moesaic.engine.frontend.queries import RankAnswers, RankReply
from moesaic.engine.runner import expert_recorder
from moesaic.engine.runner.expert_recorder import ExpertRecorder
from tests.unit.test_expert_recorder import Layers, run

LAYERS = 5
READ, DISCARD = "expert_record_read", "expert_record_discard"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


class Ranks:
    """Two ranks with three of six slots each, whose recorders keep four passes."""

    def __init__(self, mode: str) -> None:
        self.layers: list[Any] = [Layers(2, False, rank=rank) for rank in range(2)]
        self.recorders = [ExpertRecorder(layers, passes=4) for layers in self.layers]
        self.before: dict[str, tuple[int, int]] = {}
        """The passes that run before ranks answer a query, once."""
        args = ServerArgs(expert_distribution_recorder_mode=mode)  # type: ignore[arg-type]
        self.records = ExpertRecords(self._ask, args, Mesh(tp=2, ep=2), LAYERS)

    def run(self, first: int, end: int) -> None:
        for layers, recorder in zip(self.layers, self.recorders, strict=True):
            run(layers, recorder, first, end)

    def _ask(self, what: str, options: dict[str, Any]) -> RankAnswers:
        self.run(*self.before.pop(what, (0, 0)))
        replies = {
            rank: RankReply(recorder.answer(what, options, rank), 0, 0)
            for rank, recorder in enumerate(self.recorders)
        }
        return RankAnswers(replies)


def test_a_failed_dump_leaves_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has all passes, which must be counted once."""
    ranks = Ranks("per_pass")
    ranks.records.start()
    ranks.run(1, 3)
    save, saved = torch.save, []

    def full(content: Any, stream: Any) -> None:
        saved.append(content["rank"])
        if content["rank"] == 1:
            raise OSError(28, "No space left on device")
        save(content, stream)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RecordNotWritten, match="No space left on device; nothing is lost"):
        ranks.records.dump()
    assert saved == [0, 1] and list(folder.iterdir()) == []
    monkeypatch.setattr(torch, "save", save)
    assert ranks.records.dump().passes == 2
    assert read_loads(folder)[:, 3].tolist() == [[1, 0, 2, 1, 0, 2], [2, 0, 4, 2, 0, 4]]


@pytest.mark.parametrize(
    ("moment", "end", "told"),
    [
        (READ, 11, [(0, 0), (4, 6)]),
        (READ, 7, [(2, 2), (2, 0)]),
        (DISCARD, 11, [(4, 0), (4, 2)]),
        (DISCARD, 7, [(4, 0), (2, 0)]),
    ],
)
def test_passes_that_are_overwritten_during_a_dump_are_told(
    moment: str, end: int, told: list[tuple[int, int]], folder: Path
) -> None:
    """Each pass is either written or told as lost, once. A rank keeps four."""
    ranks = Ranks("stat")
    ranks.records.start()
    ranks.run(1, 5)
    ranks.before[moment] = (5, end)
    dumps = [ranks.records.dump() for _ in range(2)]
    assert [(dump.passes, dump.lost) for dump in dumps] == told
    assert ranks.records.dump().lost == 0


def test_passes_that_are_overwritten_between_two_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_recorder, "CHUNK_BYTES", 1)  # one pass in each reply
    ranks = Ranks("stat")
    ranks.records.start()
    ranks.run(1, 5)
    answer, asked = ranks.records._target._ask, []

    def ask(what: str, options: dict[str, Any]) -> RankAnswers:
        asked.append(what)
        if what == READ and asked.count(READ) == 2:
            ranks.run(5, 8)
        found: RankAnswers = answer(what, options)
        return found

    ranks.records._target._ask = ask
    dumps = [ranks.records.dump() for _ in range(2)]
    assert [(dump.passes, dump.lost) for dump in dumps] == [(2, 2), (3, 0)]


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_a_dump_without_any_pass_is_empty(mode: str, folder: Path) -> None:
    """Before the first start, and right after it."""
    ranks = Ranks(mode)
    dumps = [ranks.records.dump()]
    ranks.records.start()
    dumps.append(ranks.records.dump())
    assert [(dump.passes, dump.lost, dump.incomplete) for dump in dumps] == [(0, 0, 0)] * 2
    for path in (path for dump in dumps for path in dump.files):
        content = torch.load(path, weights_only=True)
        assert len(content["logical_count" if mode == "stat" else "records"]) == 0
    ranks.run(1, 3)
    assert ranks.records.dump().passes == 2
