"""The command lines of the benchmarks between nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench import node_links, nodes


@pytest.mark.parametrize("main", [nodes.main, node_links.main])
@pytest.mark.parametrize("word", ["2", "abc", "2x0", "2x2x2"])
def test_wrong_nodes(
    main: Callable[[list[str]], int], word: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        main(["--nodes", word])
    assert f"{word!r}: give NODESxRANKS such as 2x2" in capsys.readouterr().err


def test_a_part_of_the_links_is_not_written_over_all_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(node_links, "RESULTS", tmp_path)
    monkeypatch.setattr(node_links, "run", lambda args: [])
    assert node_links.main(["--rounds", "1"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["cpu_node_links.json"]
    assert node_links.main([]) == 0
    assert (tmp_path / "node_links.json").exists()
