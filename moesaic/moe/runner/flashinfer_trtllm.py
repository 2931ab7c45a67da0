"""`flashinfer_trtllm`: eight and four bit floats."""

from moesaic.moe.registry import FP8_WEIGHTS, UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import STANDARD, register_native_runner

register_native_runner(
    RunnerBackend(
        name="flashinfer_trtllm",
        summary="eight and four bit floats",
        layouts=STANDARD,
        weights=(*FP8_WEIGHTS, "nvfp4"),
        payloads=(*UNQUANTIZED, "fp8", "nvfp4"),
        preferred=("nvfp4",),
    )
)
