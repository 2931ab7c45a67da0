"""`triton`: sorts pairs into blocks; the portable one."""

from moesaic.moe.registry import FP8_WEIGHTS, UNQUANTIZED, RunnerBackend
from moesaic.moe.runner.native import STANDARD, register_native_runner

register_native_runner(
    RunnerBackend(
        name="triton",
        summary="sorts pairs into blocks; the portable one",
        layouts=STANDARD,
        weights=(*UNQUANTIZED, *FP8_WEIGHTS, "int8_w8a8", "int8_w8a16", "int4_w4a16"),
        payloads=(*UNQUANTIZED, "fp8", "int8"),
        preferred=(
            *UNQUANTIZED,
            "fp8_channel",
            "fp8_tensor",
            "int8_w8a8",
            "int8_w8a16",
            "int4_w4a16",
        ),
    )
)
