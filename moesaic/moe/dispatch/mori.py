"""`mori`: normal mode; what is sent follows the weights."""

from __future__ import annotations

from moesaic.moe.dispatch.deepep import DeviceNormal, NormalDispatcher
from moesaic.moe.dispatch.local import device_provider
from moesaic.moe.registry import UNQUANTIZED, A2aBackend, Provider, register_a2a


class MoriDispatcher(NormalDispatcher):
    name = "mori"


class DeviceMori(DeviceNormal):
    name = "mori"


register_a2a(
    A2aBackend(
        name="mori",
        summary="a token once per rank; the payload follows the weights",
        formats={"normal": "deepep_normal"},
        payloads=(*UNQUANTIZED, "fp8", "int8", "mxfp4"),
        providers={
            "cpu": Provider(MoriDispatcher, MoriDispatcher.buffers),
            "cuda": device_provider(lambda config: DeviceMori),
        },
        modes_in_rounds=("normal",),
    )
)
