"""What ranks do in the benchmark of dispatch and combine on a GPU, by the kernels' twins."""

import json
from pathlib import Path

import pytest

from bench import nodes
from bench.a2a_gpu import Row, main, places, summarise
from bench.a2a_rank import Job, device_name, work
from bench.common import read_rows
from moesaic.cli.main import main as command
from moesaic.config.devices import cuda_missing
from tests.distributed.moe_ranks import Pools

on_gpu = pytest.mark.skipif(bool(cuda_missing()), reason=f"needs a CUDA device: {cuda_missing()}")


@pytest.mark.parametrize(
    ("backend", "mode", "rows_back"),
    [("deepep", "normal", 2), ("deepep", "low_latency", 8), ("mooncake", "low_latency", 8)],
)
def test_ranks_measure_what_they_have_checked(
    pools: Pools, backend: str, mode: str, rows_back: int
):
    job = Job(backend, mode, 64, 128, 8, "bf16", (3,), (False,), 1)
    pool, where = pools(2), places(2, None, "cpu")
    assert pool.run(device_name, where) == ["cpu", "cpu"]
    found = [ranks[0] for ranks in pool.run(work, job, where)]
    row = summarise(job, found, False, "cpu")
    assert 0 <= row.error < 0.01 and row.pair_us > 0 and row.limit_us > row.meet_us > 0
    # Of 8 of 128 experts some are on either rank, for these tokens: rows of 128 bytes.
    assert row.bytes == 3 * (1 + 2 + rows_back + 1) * 128


def test_nodes_measure_what_they_have_checked(tmp_path: Path):
    out = tmp_path / "rows.json"
    words = "--device cpu --nodes 2x1 --hidden 64 --tokens 1 40 --payload fp8 --rounds 1".split()
    assert nodes.main([*words, "--out", str(out)]) == 0
    for row in read_rows(out, nodes.Row):
        # Of 8 of 128 experts some are on either node, for these tokens.
        assert row.crossing == 1.0 and 0 < row.error < 0.01
        assert row.pair_us > 0 and row.collectives_us > 0


@pytest.mark.gpu
@pytest.mark.timeout(300)
@on_gpu
def test_on_a_gpu(tmp_path: Path):
    out = tmp_path / "rows.json"
    words = "--ranks 2 --tokens 1 1024 --hidden 2048 --payload bf16 nvfp4 --rounds 2".split()
    assert main([*words, "--out", str(out)]) == 0
    rows = [Row(**row) for row in json.loads(out.read_text())]
    # Two payloads, of normal mode two numbers of tokens, with a graph and without.
    assert len(rows) == 2 * (2 + 1) * 2
    assert all(0 < row.meet_us < row.pair_us < 5000 and row.error < 0.02 for row in rows)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@on_gpu
def test_tuning_on_a_gpu(tmp_path: Path):
    words = ["tune", "128,8,2048,768", "--a2a", "--ranks", "2", "--tokens", "1,64"]
    assert command([*words, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-a2a.json")
    entries = json.loads(path.read_text())
    names = ["collect_pairs P=2 H=2048", "collect_rows P=2 H=2048", "send P=2 H=2048 bf16"]
    assert sorted(entries) == names
    assert all(sorted(sizes) == ["1", "64"] for sizes in entries.values())
    assert all(0 < entry["us"] < 1000 for sizes in entries.values() for entry in sizes.values())
