"""`flashinfer_cutedsl`: nvfp4 weights, masked blocks in decode."""

from moesaic.moe.registry import UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import register_native_runner

FLASHINFER_CUTEDSL = register_native_runner(
    RunnerBackend(
        name="flashinfer_cutedsl",
        summary="nvfp4 weights, masked blocks in decode",
        layouts={
            "standard": "standard",
            "deepep_normal": "standard",
            "deepep_ll": "masked",
            "fused": "standard",
        },
        weights=("nvfp4",),
        payloads=(*UNQUANTIZED, "nvfp4"),
        preferred=(),
    )
)
