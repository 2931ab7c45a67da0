"""`flashinfer_cutlass`: floats of any width but mxfp4."""

from moesaic.moe.registry import FP8_WEIGHTS, UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import register_native_runner

FLASHINFER_CUTLASS = register_native_runner(
    RunnerBackend(
        name="flashinfer_cutlass",
        summary="floats of any width but mxfp4",
        layouts={
            "standard": "standard",
            "deepep_normal": "standard",
            "deepep_ll": "standard",
            "fused": "standard",
        },
        weights=(*UNQUANTIZED, *FP8_WEIGHTS, "nvfp4"),
        payloads=(*UNQUANTIZED, "fp8", "nvfp4"),
        preferred=(),
    )
)
