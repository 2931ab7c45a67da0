"""`flashinfer_mxfp4`: mxfp4 weights."""

from moesaic.moe.registry import UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import register_native_runner

FLASHINFER_MXFP4 = register_native_runner(
    RunnerBackend(
        name="flashinfer_mxfp4",
        summary="mxfp4 weights",
        layouts={
            "standard": "standard",
            "deepep_normal": "standard",
            "deepep_ll": "standard",
            "fused": "standard",
        },
        weights=("mxfp4",),
        payloads=(*UNQUANTIZED, "mxfp4"),
        preferred=(),
    )
)
