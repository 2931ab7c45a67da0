"""Launches that do without most of Triton's own: the same kernels with the same arguments, and what
they cost the host.

A program: `python -m tests.kernels.aot_launch` compiles for a Hopper GPU that need not be there, as
Triton's driver is replaced by one that only writes down what it is given.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses import FakeTensorMode
from triton.runtime import driver

from moesaic.kernels.a2a import ResultPlane
from moesaic.kernels.triton import a2a as kernels
from moesaic.kernels.triton.launch import Relaunch, device_of
from tests.kernels.a2a_cases import RESULTS, ROWS, Case
from tests.kernels.aot import HOPPER

LAUNCHES = 300
# Grid, stream, compiled kernel and its own arguments, in order.
Launched = tuple[Any, ...]


class NoGpu:
    """Triton's driver, without what it drives."""

    def __init__(self) -> None:
        self.launched: list[tuple[bool, Launched]] = []
        self.device, self.stream = 0, 7
        self._loaded = count()
        self.utils = self
        self.launcher_cls = self.launcher

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> Any:
        return HOPPER

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), (name, next(self._loaded), device), 32, 0, 1024

    def launcher(self, source: Any, metadata: Any) -> Any:
        def launch(*given: Any) -> None:
            self.launched.append((metadata.launch_pdl, given))

        return launch

    def all(self) -> list[Launched]:
        """Tensors by their addresses; without what was for hooks."""
        found = []
        for pdl, (x, y, z, stream, function, options, _, _, _, *arguments) in self.launched:
            values = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
            found.append((x, y, z, stream, function, (options, pdl), values))
        self.launched.clear()
        return found

    def last(self) -> Launched:
        return self.all()[-1]


@triton.jit(do_not_specialize=["rows"])
def _kernel(x_ptr, extra_ptr, fixed_ptr, stride, rows, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + rows * stride + at)
    if extra_ptr is not None:
        x += tl.load(extra_ptr + at)
    tl.store(fixed_ptr + at, x)


def check_choices(gpu: NoGpu) -> None:
    """Every launch twice, of which the second is quick, against Triton's own."""
    memory = torch.zeros(1024)
    fixed = {"fixed_ptr": torch.zeros(64), "SIZE": 64, "num_warps": 2, "launch_pdl": True}
    again = Relaunch(_kernel, ("x_ptr", "extra_ptr"), ("stride", "rows"), **fixed)
    half = memory.half()
    functions = set()
    for x in (memory, memory[1:], memory[4:], half, half[4:]):
        for extra in (None, memory, memory[3:]):
            for stride in (1, 2, 16, 0, -16, 2**31, -(2**31)):
                for rows in (1, 16, 5):
                    given = {"x_ptr": x, "extra_ptr": extra, "stride": stride, "rows": rows}
                    _kernel[(3,)](**given, **fixed)
                    wanted = gpu.last()
                    for _ in range(2):
                        again(3, (x, extra), (stride, rows))
                        assert gpu.last() == wanted, given
                    functions.add(wanted[4])
    # Of x and of extra what they are and whether aligned, of stride whether 1 or a multiple of 16,
    # or of 64 bits.
    assert len(functions) == 4 * 3 * 4 and len(again._found) == 4 * 3 * 3, len(functions)
    check_surroundings(gpu, again, (memory, None))


def check_surroundings(gpu: NoGpu, again: Relaunch, tensors: tuple[Tensor | None, ...]) -> None:
    """The stream is the current one, of the device of what is fixed; who listens hears of all."""
    gpu.stream, gpu.device = 11, 1
    again(5, tensors, (16, 1))
    assert gpu.last()[:4] == (5, 1, 1, 11)
    with FakeTensorMode():
        assert device_of([3, torch.zeros(1), torch.empty(1, device="cuda:1")]) == 1
    gpu.device, heard = 0, len(again._found)
    runtime = triton.knobs.runtime
    for name in ("launch_enter_hook", "launch_exit_hook"):
        kept = getattr(runtime, name)
        kept.calls.append(lambda metadata: None)
        again(5, tensors, (3, 1))
        kept.calls.clear()
        assert len(again._found) == heard and gpu.last()[6][3] == 3
        setattr(runtime, name, lambda metadata: None)
        again(5, tensors, (3, 1))
        setattr(runtime, name, None)
        assert len(again._found) == heard
        again(5, tensors, (16, 1))
        assert gpu.last()[6][3] == 16
        setattr(runtime, name, kept)
    for wrong in ((), (16, 1, 7)):
        try:
            again(5, tensors, wrong)
        except AssertionError:
            continue
        raise AssertionError(f"launched with {wrong}")


def check_kernels_between_ranks(gpu: NoGpu) -> None:
    """What a window's second step, in another layer, launches: as a new window's first would."""
    case = Case(counts=(2, 3), rows=3, top_k=2, hidden=64, weights=True)
    old, new = case.windows("cpu")[0], case.windows("cpu")[0]
    step(case, old, 0)
    gpu.launched.clear()
    step(case, old, 1)
    again = gpu.all()
    step(case, new, 1)
    first = gpu.all()
    assert len(again) == len(first) == 7
    names = [launched[4][0] for launched in again]
    assert names[:3] == ["_send_kernel", "_wait_kernel", "_signal_kernel"], names
    regions = [window.signals.bases_P.data_ptr() for window in (old, new)]
    for ours, theirs in zip(again, first, strict=True):
        assert ours[:6] == theirs[:6]
        differ = [(a, b) for a, b in zip(ours[6], theirs[6], strict=True) if a != b]
        # Nothing but addresses: of what windows own, and of tensors that were made anew.
        assert all(min(pair) > 2**20 for pair in differ), differ
        assert tuple(regions) in differ


def step(case: Case, window: Any, seed: int) -> None:
    tokens = case.tokens(0, seed)
    rows, results = (window.call(channel, "test", tag=seed) for channel in (ROWS, RESULTS))
    kernels.send(tokens, case.rows, case.planes(window), case.spread, rows)
    kernels.receive(rows, case.rows, case.top_k, window.offset("ids"))
    kernels.signal(results)
    out_TH = torch.empty_like(tokens.x_TH)
    plane = ResultPlane(case.rows, window.offset("results"), case.spread)
    kernels.collect_rows(out_TH, tokens, plane, results)
    kernels.collect_pairs(out_TH, tokens, plane, results, True)


def check_cost(gpu: NoGpu) -> None:
    """Of the host, with nothing behind the launcher: printed; Triton's way is gone once."""
    case = Case(counts=(2, 3), rows=3, top_k=2, hidden=64, weights=True)
    window, tokens = case.windows("cpu")[0], case.tokens(0)
    planes, call = case.planes(window), window.call(ROWS, "test")
    quick = microseconds(lambda: kernels.send(tokens, case.rows, planes, case.spread, call))
    (found,) = (one for one in window.signals.prepared.values())
    (launch,) = found.launches.values()
    tensors = (tokens.x_TH, tokens.ids_TK, tokens.weights_TK, None)
    numbers = (64, 2, 3, 0, 0, 1.0)
    plain = microseconds(lambda: launch._by_triton(2, tensors, numbers))
    print(f"send {quick:.1f} us, of which Triton's own launch alone would be {plain:.1f} us")
    assert len(launch._found) == 1


def microseconds(work: Any) -> float:
    """Of the best of some rounds: others may be at work here."""
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            work()
        best = min(best, (time.perf_counter() - begin) / LAUNCHES)
    return 1e6 * best


def main() -> None:
    gpu = NoGpu()
    driver.set_active(gpu)
    check_choices(gpu)
    check_kernels_between_ranks(gpu)
    check_cost(gpu)


if __name__ == "__main__":
    main()
