"""`flashinfer_cutedsl`: nvfp4 weights, masked blocks in decode."""

from moesaic.moe.registry import UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import STANDARD, register_native_runner

register_native_runner(
    RunnerBackend(
        name="flashinfer_cutedsl",
        summary="nvfp4 weights, masked blocks in decode",
        layouts={**STANDARD, "deepep_ll": "masked"},
        weights=("nvfp4",),
        payloads=(*UNQUANTIZED, "nvfp4"),
    )
)
