"""Which GPU each rank gets."""

import pytest

from moesaic.config.gpus import (
    MAX_MPS_CLIENTS,
    crowding_warning,
    describe_shares,
    is_shared,
    processor_percent,
    share_gpus,
)


@pytest.mark.parametrize(
    ("ranks", "gpus", "devices"),
    [
        (1, 1, (0,)),
        (2, 8, (0, 1)),
        (4, 4, (0, 1, 2, 3)),
        (4, 1, (0, 0, 0, 0)),
        (5, 2, (0, 0, 0, 1, 1)),
        (8, 3, (0, 0, 0, 1, 1, 1, 2, 2)),
    ],
)
def test_the_gpu_of_each_rank(ranks: int, gpus: int, devices: tuple[int, ...]):
    assert share_gpus(ranks, gpus) == devices
    assert is_shared(devices) == (ranks > gpus)


def test_no_gpu_is_left_out_and_none_has_two_more_than_another():
    for ranks in range(1, 20):
        for gpus in range(1, 9):
            devices = share_gpus(ranks, gpus)
            counts = [devices.count(gpu) for gpu in range(min(ranks, gpus))]
            assert sum(counts) == ranks and max(counts) - min(counts) <= 1
            assert list(devices) == sorted(devices)


def test_what_is_said():
    assert describe_shares((0,)) == "1 rank, a GPU each"
    assert describe_shares((0, 1)) == "2 ranks, a GPU each"
    assert describe_shares((0, 0, 1)) == (
        "3 ranks share 2 GPUs under MPS (GPU 0: ranks 0-1, GPU 1: rank 2); each has at least "
        "1/2 of a GPU's memory"
    )
    assert describe_shares((0, 0, 0, 0)) == (
        "4 ranks share 1 GPU under MPS (GPU 0: ranks 0-3); each has at least 1/4 of a GPU's memory"
    )


def test_part_of_the_processors():
    """A rank may use twice its even part. On an H200 even crowded ranks have more processors than
    there are waiting ranks."""
    assert [processor_percent(sharers) for sharers in (1, 2, 3, 4, 6, 8)] == [
        100, 100, 67, 50, 34, 25,
    ]  # fmt: skip
    crowded = [processor_percent(sharers, crowded=True) for sharers in (1, 2, 3, 4, 6, 8)]
    assert crowded == [100, 100, 67, 50, 50, 50]
    assert [processor_percent(sharers) for sharers in (9, MAX_MPS_CLIENTS)] == [50, 50]
    assert 132 * min(crowded) // 100 - MAX_MPS_CLIENTS >= 4


def test_more_ranks_on_a_gpu_than_were_tried():
    assert [crowding_warning(share_gpus(ranks, 2)) for ranks in (1, 2, 16)] == [""] * 3
    assert crowding_warning(()) == ""
    assert crowding_warning(share_gpus(17, 2)) == (
        "9 ranks share a GPU, and more than 8 are untested: CUDA may run out of queues, "
        'which it reports as "out of memory"'
    )


@pytest.mark.parametrize(("ranks", "gpus"), [(0, 1), (2, 0)])
def test_nothing_to_share(ranks: int, gpus: int):
    with pytest.raises(ValueError, match=f"^{ranks} ranks"):
        share_gpus(ranks, gpus)
