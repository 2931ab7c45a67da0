"""Creates the window that fits a group: shared memory, several nodes, or memory of a GPU."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from moesaic.comm.collectives.group import Peers
from moesaic.comm.windows.device_window import CpuDeviceWindow, DeviceWindow, layout
from moesaic.comm.windows.held_window import HeldWindow
from moesaic.comm.windows.node_window import create_node_window
from moesaic.comm.windows.signals import MAX_RANKS
from moesaic.comm.windows.window import (
    CHANNELS,
    PlaneSpec,
    SharedWindow,
    check_names,
    layout_of,
    share_memory,
    window_bytes,
    with_link,
)
from moesaic.core.link import EmulatedLink


def create_window(
    group: Peers,
    specs: Sequence[PlaneSpec],
    timeout: float,
    channels: int = CHANNELS,
    link: EmulatedLink | None = None,
) -> SharedWindow:
    """All ranks of the group call it with the same planes. `link`: emulated between them."""
    check_names(specs)
    specs = with_link(specs, link, channels, group.size)
    if group.size > MAX_RANKS:
        raise ValueError(f"a shared window holds {MAX_RANKS} ranks, not {group.size}")
    if len(set(group.nodes)) > 1:
        if link is not None:
            raise ValueError("--emulate-link is for ranks of one node: between nodes is a network")
        return create_node_window(group, specs, timeout, channels)
    length = window_bytes(specs, group.size, channels)
    if group.size == 1:
        memory = mmap.mmap(-1, length)
    else:
        memory = share_memory(group, length, layout_of(specs, channels))
    return SharedWindow(memory, specs, group, timeout, channels, link)


def create_device_window(
    group: Peers,
    specs: Sequence[PlaneSpec],
    timeout: float,
    channels: int,
    device: torch.device,
    link: EmulatedLink | None = None,
) -> DeviceWindow:
    """All ranks of a node call it with the same planes. `timeout`: of a wait in a kernel. `link`:
    emulated between the ranks."""
    if not 1 <= group.size <= MAX_RANKS:
        raise ValueError(f"a window holds 1..{MAX_RANKS} ranks, not {group.size}")
    if len(set(group.nodes)) > 1:
        raise ValueError(
            f"ranks on nodes {sorted(set(group.nodes))}: kernels reach memory of one node only; "
            f"keep the ranks that share experts on one"
        )
    # Groups create tensors on the default device, and gloo needs them on the CPU; tensors created
    # in inference mode cannot be written outside it.
    with torch.device("cpu"), torch.inference_mode(False):
        window: DeviceWindow
        if group.size > 1 and (found := group.held_memory()) is not None:
            window = HeldWindow.create(group, *found, specs, timeout, channels, device, link)
        elif device.type == "cpu":
            window = CpuDeviceWindow.create(group, specs, timeout, channels, link)
        else:
            # Builds of torch without CUDA do not have what it imports.
            from moesaic.comm.windows.symmetric_memory import SymmetricWindow

            window = SymmetricWindow.create(group, specs, timeout, channels, device, link)
    window.members = group.members
    return window


def device_window_bytes(
    specs: Sequence[PlaneSpec],
    size: int,
    channels: int,
    device: torch.device,
) -> int:
    """The most device memory that one rank of such a window takes, without an emulated link."""
    nbytes = layout(specs, channels, size)[1]
    if device.type == "cpu" or size == 1:
        return nbytes
    from moesaic.comm.windows.symmetric_memory import symmetric_bytes

    return symmetric_bytes(nbytes)
