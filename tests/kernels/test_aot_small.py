"""The small kernels compiled for a Hopper GPU, in a process without the interpreter."""

import pytest

from tests.kernels.triton_cases import compile_apart


def test_the_kernels_of_a_decode_step() -> None:
    compile_apart("aot_small")


@pytest.mark.slow
def test_all_of_them() -> None:
    compile_apart("aot_small", "all")
