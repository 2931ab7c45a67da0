"""Products of bfloat16 matrices on processors that have none: torch takes a hundred times as long
for them as in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
PRODUCTS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten.matmul.default,
    _aten._grouped_mm.default,
}


class QuickProducts(TorchDispatchMode):
    """On CPU they are summed in float32 and rounded once, as torch does: all but a few results, of
    another order of sums, have the same bits."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in PRODUCTS or not all(map(_fits, args)):
            return func(*args, **(kwargs or {}))
        wide = (arg.float() if _is_bfloat16(arg) else arg for arg in args)
        return func(*wide, **(kwargs or {})).bfloat16()


def _fits(arg: Any) -> bool:
    """Also what is no matrix: sizes of groups, factors."""
    return _is_bfloat16(arg) or not (isinstance(arg, torch.Tensor) and arg.is_floating_point())


def _is_bfloat16(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dtype == torch.bfloat16 and arg.is_cpu
