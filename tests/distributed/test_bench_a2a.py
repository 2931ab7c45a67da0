"""What ranks do in the benchmark of dispatch and combine on a GPU, by the kernels' twins."""

import pytest

from bench.a2a_gpu import places, summarise
from bench.a2a_rank import Job, device_name, work
from tests.distributed.moe_ranks import Pools


@pytest.mark.parametrize(("mode", "rows_back"), [("normal", 2), ("low_latency", 8)])
def test_ranks_measure_what_they_have_checked(pools: Pools, mode: str, rows_back: int):
    job = Job("deepep", mode, 64, 128, 8, "bf16", (3,), (False,), 1)
    pool, where = pools(2), places(2, None, "cpu")
    assert pool.run(device_name, where) == ["cpu", "cpu"]
    found = [ranks[0] for ranks in pool.run(work, job, where)]
    row = summarise(job, found, False, "cpu")
    assert 0 <= row.error < 0.01 and row.pair_us > 0 and row.limit_us > row.meet_us > 0
    # Of 8 of 128 experts some are on either rank, for these tokens: rows of 128 bytes.
    assert row.bytes == 3 * (1 + 2 + rows_back + 1) * 128
