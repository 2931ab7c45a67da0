"""`triton_kernel`: ragged blocks, weights down to four bits."""

from moesaic.moe.registry import FP8_WEIGHTS, UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import STANDARD, register_native_runner

register_native_runner(
    RunnerBackend(
        name="triton_kernel",
        summary="ragged blocks, weights down to four bits",
        layouts=STANDARD,
        weights=(*UNQUANTIZED, *FP8_WEIGHTS, "int8_w8a8", "int8_w8a16", "int4_w4a16", "mxfp4"),
        payloads=(*UNQUANTIZED, "fp8", "int8", "mxfp4"),
        preferred=("mxfp4",),
    )
)
