"""Kernels that start while the one before them still runs (programmatic dependent launch, Hopper).

A kernel with `PDL` may begin before its predecessor has ended. Before `await_inputs` it must not
touch memory that other kernels of the step write or still read; it may load weights, which are
constant. `release_next` lets the successor begin, once all programs have called it. Small kernels
release before they wait: each kernel still waits for its predecessor, and the weights of a large
product arrive while several small kernels run. This requires that every kernel waits: one that
ended before its predecessor would release its successors too early. A kernel that reads results of
the step before it waits documents which predecessor must wait before it releases (experts_small.py,
experts_row.py). With PDL off, as in the interpreter, both do nothing. Every launch passes
`PDL=pdl.on` and `**pdl.options`:

    pdl = dependent_launch(x)
    kernel[grid](…, PDL=pdl.on, **pdl.options)

`Relaunch` launches the same kernel repeatedly at low host cost.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

HOPPER = 9
# Triton specialises kernels on multiples of this.
ALIGNED = 16
MOST = 2**31 - 1
# Guards what the interpreter lacks or does differently.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_RUNTIME = triton.knobs.runtime


@dataclass(frozen=True, slots=True)
class Launch:
    on: bool
    options: dict[str, Any]


OFF = Launch(False, {})
ON = Launch(True, {"launch_pdl": True})


def dependent_launch(x: Tensor) -> Launch:
    """MOESAIC_PDL=0 turns it off, for measurements and debugging."""
    return _launch_on(x.device.index) if x.is_cuda else OFF


@cache
def _launch_on(device: int | None) -> Launch:
    able = torch.cuda.get_device_capability(device)[0] >= HOPPER
    return ON if able and os.environ.get("MOESAIC_PDL", "1") != "0" else OFF


@cache
def is_hopper(device: int | None) -> bool:
    """Exactly this generation: its matrix units are programmed by hand."""
    return torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def num_processors(device: int | None) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class Relaunch:
    """Launches one kernel repeatedly, while few of its arguments vary.

        again = Relaunch(kernel, ("x_ptr",), ("rows",), out_ptr=out, BLOCK=64, num_warps=4)
        again(programs, (x,), (rows,))

    Triton's own launch binds all arguments by name and specialises on each: some 40 us for thirty
    of them. Here the first launch goes through Triton, and its compiled kernel is cached. Later
    ones pass their arguments, in order, to that kernel's launcher, on the current stream of the
    fixed tensors' device; so a graph can capture them, too.

    A launch uses the cached kernel that Triton would choose. The choice depends on the fixed
    arguments, which must not change, on the current device, and for each varying argument on
        a tensor    whether it is None, its type, whether its address is a multiple of 16
        a number    whether it is 1 or a multiple of 16, unless the kernel does not specialise it
                    (it is always an integer, or always none)
    which form the key of the cache. Varying tensors must be on the GPU: only Triton's own launch
    checks that. Fixed tensors are kept alive and must not be moved. Triton handles launches with
    numbers of more than 32 bits, launches in the interpreter, and launches that hooks observe.
    """

    def __init__(
        self, kernel: Any, tensors: tuple[str, ...], numbers: tuple[str, ...], **fixed: Any
    ) -> None:
        """`tensors`, `numbers`: names of varying arguments. `fixed`: all others, and options."""
        names: list[str] = kernel.arg_names
        assert len(names) > 1
        assert set(names) <= {*tensors, *numbers, *fixed}, "an argument is missing"
        self._kernel, self._varying, self._fixed = kernel, (*tensors, *numbers), fixed
        # The interpreter's kernels have none.
        params = getattr(kernel, "params", [])
        # These would change how Triton specialises.
        assert not any(
            p.annotation or p.do_not_specialize_on_alignment for p in params if not p.is_constexpr
        )
        self._specialised = [
            place
            for place, name in enumerate(numbers)
            if params and not params[names.index(name)].do_not_specialize
        ]
        others = [name for name in names if name not in self._varying]
        self._constant = [_address(fixed[name]) for name in others]
        self._device = device_of(fixed.values())
        given = (*self._varying, *others)
        self._in_order = itemgetter(*(given.index(name) for name in names))
        self._found: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> None:
        assert len(tensors) + len(numbers) == len(self._varying)
        if INTERPRETED.value or _has_launch_hook():
            self._by_triton(programs, tensors, numbers)
            return
        key: list[Any] = []
        addresses: list[int | None] = []
        low = 0
        for tensor in tensors:
            if tensor is None:
                key.append(None)
                addresses.append(None)
            else:
                key.append(tensor.dtype)
                address = tensor.data_ptr()
                addresses.append(address)
                low |= address
        for number in numbers:
            if not -MOST <= number <= MOST:
                self._by_triton(programs, tensors, numbers)
                return
        for place in self._specialised:
            number = numbers[place]
            key.append(number == 1 or 2 * (number % ALIGNED == 0))
        if low % ALIGNED:
            key += (address is None or address % ALIGNED for address in addresses)
        found = self._found.get(tuple(key))
        if found is None:
            assert driver.active.get_current_device() == self._device, (
                "the current device is another GPU"
            )
            self._found[tuple(key)] = self._by_triton(programs, tensors, numbers)
            return
        stream = driver.active.get_current_stream(self._device)
        found.run(
            programs, 1, 1, stream, found.function, found.packed_metadata, None, None, None,
            *self._in_order((*addresses, *numbers, *self._constant)),
        )  # fmt: skip

    def _by_triton(
        self, programs: int, tensors: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> Any:
        varying = dict(zip(self._varying, (*tensors, *numbers), strict=True))
        return self._kernel[(programs,)](**varying, **self._fixed)


def device_of(values: Iterable[Any]) -> int:
    """Index of the first GPU among the tensors' devices; 0 without any."""
    devices = (one.device.index for one in values if isinstance(one, Tensor))
    return next((index for index in devices if index is not None), 0)


def _address(value: Any) -> Any:
    """The address of a GPU tensor; Triton translates the addresses of host memory itself."""
    return value.data_ptr() if isinstance(value, Tensor) and value.is_cuda else value


def _has_launch_hook() -> bool:
    """Whether a launch hook is set, by a profiler for instance."""
    before, after = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


@triton.jit
def await_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(pointers):
    """Prefetches the 128-byte line at each pointer into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_rows(first, stride, rows, size):
    """Prefetches `size` bytes of each row into the L2 cache, rows being `stride` bytes long; all
    are multiples of 16 bytes. There are at most as many rows as threads; the warps share them, as
    each issues one at a time. Hopper and later."""
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred mine;
        .reg .u32 row, warp, warps;
        .reg .u64 at;
        mov.u32 row, %tid.x;
        mov.u32 warps, %ntid.x;
        shr.u32 warp, row, 5;
        shr.u32 warps, warps, 5;
        and.b32 row, row, 31;
        mad.lo.u32 row, row, warps, warp;
        setp.lt.u32 mine, row, $3;
        mad.wide.u32 at, row, $2, $1;
        @mine cp.async.bulk.prefetch.L2.global [at], $4;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r",
        [first, stride, rows, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
