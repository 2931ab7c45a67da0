"""What launches cost the host: nothing is compiled for another number of rows; launches and
descriptors that are made quickly are those that Triton would make."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moesaic.kernels.triton import a2a, a2a_collect, experts_hopper, norm, routing, sampling, sort
from moesaic.kernels.triton.experts_product import LargeConfig
from tests.kernels.triton_cases import compile_apart

A_CALL = {"rank", "channel", "tag"}
# Of steps of any size the same kernel, and of all layers.
UNSPECIALISED = [
    (norm._norm_kernel, {"rows"}),
    (routing._route_kernel, {"num_rows"}),
    (routing._router_kernel, {"num_rows"}),
    (sampling._greedy_kernel, {"rows"}),
    (sampling._draw_kernel, {"rows"}),
    (sort._sort_few, {"num_counters"}),
    (sort._place_chunks, {"num_counters", "num_chunks"}),
    (sort._blocks, {"num_counters"}),
    (a2a._signal_kernel, A_CALL),
    (a2a._wait_kernel, A_CALL | {"fill"}),
    (a2a._send_kernel, A_CALL | {"rows", "num_rows"}),
    (a2a_collect.collect_kernel, {"rank", "rows", "num_rows"}),
]


@pytest.mark.parametrize(("kernel", "names"), UNSPECIALISED)
def test_no_kernel_is_compiled_for_a_number_of_rows(kernel: Any, names: set[str]):
    given = getattr(kernel, "kwargs", None) or vars(kernel)  # of the interpreter, of a GPU
    assert set(given["do_not_specialize"]) >= names
    assert names <= set(kernel.arg_names)


def test_launches_without_triton_are_those_of_triton() -> None:
    compile_apart("aot_launch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_descriptors_are_those_of_triton(dtype: torch.dtype):
    step = 128 // dtype.itemsize
    values = torch.zeros(3, 2, 128, 4 * step).to(dtype)
    made = experts_hopper._descriptor(values, 64, LargeConfig(block_k=step))
    flat = values.view(-1, values.shape[-1])
    own = TensorDescriptor.from_tensor(flat, [64, step], made.layout)
    assert (made.base.data_ptr(), made.base.dtype) == (flat.data_ptr(), dtype)
    assert made.layout.element_bitwidth == 8 * dtype.itemsize
    for name in {field.name for field in fields(TensorDescriptor)} - {"base", "shape", "strides"}:
        assert getattr(made, name) == getattr(own, name), name
    assert list(made.shape) == list(own.shape) == [768, 4 * step]
    assert list(made.strides) == list(own.strides) == [4 * step, 1]
