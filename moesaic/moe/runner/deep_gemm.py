"""`deep_gemm`: contiguous rows in prefill, masked blocks in decode."""

from moesaic.moe.registry import UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import STANDARD, register_native_runner

register_native_runner(
    RunnerBackend(
        name="deep_gemm",
        summary="contiguous rows in prefill, masked blocks in decode",
        layouts={**STANDARD, "deepep_normal": "contiguous", "deepep_ll": "masked"},
        weights=(*UNQUANTIZED, "fp8_block"),
        payloads=(*UNQUANTIZED, "fp8"),
        preferred=("fp8_block",),
    )
)
