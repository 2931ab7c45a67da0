"""The runner of other people's clients: what it says of a program that is not installed."""

from contextlib import contextmanager

import pytest

from tests.clients import run


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """No promtool, no packages, no servers; every tool passes."""

    @contextmanager
    def servers():
        yield tmp_path / "given.json"

    monkeypatch.setattr(run, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(run.shutil, "which", lambda _: None)
    monkeypatch.setattr(run, "environment", lambda name: tmp_path / name)
    monkeypatch.setattr(run, "servers", servers)
    monkeypatch.setattr(
        run, "run_tool", lambda name, *_: run.Outcome(name, "1.0", "3 passed", 1.0, True)
    )


@pytest.mark.parametrize(
    ("named", "status", "words"),
    [
        ([], 0, f"passed: {len(run.TOOLS) - 1} of {len(run.TOOLS)}; not run: promtool"),
        (["openai"], 0, "passed: 1 of 1"),
        (["promtool"], 1, "passed: 0 of 1; not run: promtool"),
        (["openai", "promtool"], 1, "passed: 1 of 2; not run: promtool"),
    ],
)
def test_a_program_that_is_not_installed(capsys, named, status, words):
    """Not to run is no failure, unless the program is asked for by its name."""
    assert run.main(named) == status
    *_, summary = said = capsys.readouterr().out.splitlines()
    assert summary == words
    rows = [line for line in said if line.startswith("promtool")]
    expected = "NOT RUN: it is not installed (Debian: apt install prometheus)"
    assert all(expected in row for row in rows) and len(rows) == ("not run" in words)
