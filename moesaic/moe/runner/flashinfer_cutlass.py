"""`flashinfer_cutlass`: floats of any width but mxfp4."""

from moesaic.moe.registry import FP8_WEIGHTS, UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import STANDARD, register_native_runner

register_native_runner(
    RunnerBackend(
        name="flashinfer_cutlass",
        summary="floats of any width but mxfp4",
        layouts=STANDARD,
        weights=(*UNQUANTIZED, *FP8_WEIGHTS, "nvfp4"),
        payloads=(*UNQUANTIZED, "fp8", "nvfp4"),
    )
)
