"""Figures of prefill and decode apart: what is measured on a CPU, and how it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import pd
from bench.pd_transfer import TOKEN_BYTES, TransferRow, measure

ROW = TransferRow("cpu", "shm", 1 << 20, 1 << 22, 2.0, 500.0, 6.0, 10.0)


def test_a_transfer_is_measured() -> None:
    """The receiver's copy is part of a stream, and a single chunk takes longer than that."""
    (row,) = measure("shm", "cpu", [2 * TOKEN_BYTES], "cpu", 1)
    assert row.chunk_bytes == 2 * TOKEN_BYTES and row.total_bytes == 32 * row.chunk_bytes
    assert row.read_gbs is not None and row.copy_gbs > 0
    assert row.one_us > row.chunk_bytes / row.read_gbs / 1e3


def test_rows_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, faster = tmp_path / "pd.json", TransferRow("cpu", "shm", 1 << 20, 1, 3.0, 1.0, 9.0, 10.0)
    tcp = TransferRow("cpu", "tcp", 1 << 20, 1, 1.0, 1.0, None, 10.0)
    pd.store(path, "transfer", [ROW, tcp])
    pd.store(path, "transfer", [faster])
    assert pd.read(path) == {"transfer": [faster, tcp], "serving": []}
    pd.report({"transfer": [ROW, faster, tcp], "serving": []}, markdown=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[6] for line in lines[2:]] == ["60% MISSED", "90%", ""]


def test_shares_are_of_two_instances() -> None:
    with pytest.raises(SystemExit, match="give PREFILL,DECODE in percent"):
        pd.main(["--device", "cpu", "--parts", "serving", "--shares", "60"])
