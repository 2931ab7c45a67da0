"""`moesaic tune --a2a` on ranks without a GPU: by the kernels' twins, which take every plan."""

from pathlib import Path

import pytest

from moesaic.cli.tune_a2a import TuneJob, tune_ranks
from moesaic.comm.launch.local_ranks import PerRank
from moesaic.kernels import a2a_tuned
from moesaic.kernels.timing_ranks import TimedRank
from tests.distributed.moe_ranks import Pools


def test_what_is_measured_is_written_once(
    pools: Pools, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    wanted = TuneJob(((8, 2, 64),), (2,), ("bf16",), (1,), tmp_path)
    places = PerRank([TimedRank({}, -1)] * 2)
    tune_ranks(wanted, pools(2), places)
    names = ["collect_pairs P=2 H=64", "collect_rows P=2 H=64", "send P=2 H=64 bf16"]
    found = a2a_tuned.load("cpu", tmp_path)
    assert sorted(found) == [(name, 1) for name in names]
    assert all(plan.programs == 1 for plan in found.values())
    assert "wrote" in capsys.readouterr().out
    tune_ranks(wanted, pools(2), places)
    assert "all results are in" in capsys.readouterr().out
