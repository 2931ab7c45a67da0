"""`flashinfer_mxfp4`: mxfp4 weights."""

from moesaic.moe.registry import UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import STANDARD, register_native_runner

register_native_runner(
    RunnerBackend(
        name="flashinfer_mxfp4",
        summary="mxfp4 weights",
        layouts=STANDARD,
        weights=("mxfp4",),
        payloads=(*UNQUANTIZED, "mxfp4"),
    )
)
