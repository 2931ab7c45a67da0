"""`cutlass`: contiguous rows."""

from moesaic.moe.registry import FP8_WEIGHTS, UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.device.torch_grouped import TorchGroupedCore
from moesaic.moe.runner.native import register_native_runner

register_native_runner(
    RunnerBackend(
        name="cutlass",
        summary="contiguous rows",
        layouts={
            "standard": "contiguous",
            "deepep_normal": "contiguous",
            "deepep_ll": "contiguous",
            "fused": "standard",
        },
        weights=(*UNQUANTIZED, *FP8_WEIGHTS, "nvfp4"),
        payloads=(*UNQUANTIZED, "fp8", "nvfp4"),
        providers={"cuda": TorchGroupedCore},
    )
)
