"""Small cases of the kernels between ranks, one after the other, for compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitizer_cases
    python -m tests.kernels.sanitizer_cases overrun      # writes behind a tensor, to be found

Ranks of one process take turns, and each finds what it waits for: nothing spins. Every case is
compared with its twin as well.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from tests.kernels import test_triton_a2a as a2a
from tests.kernels import test_triton_collectives as collectives
from tests.kernels.triton_cases import DEVICE

FINE = "all cases are right"


@triton.jit
def _fill_kernel(x_ptr, count, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(x_ptr + place, 1.0, place < count)


def overrun() -> None:
    x = torch.zeros(64, device=DEVICE)
    _fill_kernel[(1,)](x, 65, BLOCK=128)
    torch.cuda.synchronize()


def between_ranks() -> None:
    for case in (*a2a.SMALL, *a2a.PAYLOADS):
        a2a.test_rows_arrive_as_those_of_the_twins(case)
    for case in (a2a.SMALL[0], a2a.SMALL[3]):
        a2a.test_results_are_summed_as_by_the_twins(case)
    a2a.test_few_programs_do_the_same()


def dense() -> None:
    collectives.test_small_sums(torch.float32)
    collectives.test_large_sums(3, torch.float16)
    for pushed in (True, False):
        collectives.test_columns(6, (1, 9, 0), pushed)


ALL = {"between_ranks": between_ranks, "dense": dense}


def main(names: list[str]) -> None:
    for name in names or ALL:
        (ALL | {"overrun": overrun})[name]()
    print(FINE)


if __name__ == "__main__":
    main(sys.argv[1:])
