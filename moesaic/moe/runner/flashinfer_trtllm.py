"""`flashinfer_trtllm`: eight and four bit floats."""

from moesaic.moe.registry import FP8_WEIGHTS, UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import register_native_runner

FLASHINFER_TRTLLM = register_native_runner(
    RunnerBackend(
        name="flashinfer_trtllm",
        summary="eight and four bit floats",
        layouts={
            "standard": "standard",
            "deepep_normal": "standard",
            "deepep_ll": "standard",
            "fused": "standard",
        },
        weights=(*FP8_WEIGHTS, "nvfp4"),
        payloads=(*UNQUANTIZED, "fp8", "nvfp4"),
        preferred=("nvfp4",),
    )
)
