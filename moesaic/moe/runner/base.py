"""The contract of a runner: from what dispatch gave to what combine takes.

    pre-permute (format -> layout) · core (grouped products) · post-permute (layout -> format)

or one fused function instead of the three. R rows received · K chosen · e local slots · H hidden ·
I intermediate (of this rank) · J = 2 * I · Y rows of all slots · M rows of a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import torch
from torch import Tensor

from moesaic.moe.activations import Activation, silu_and_mul
from moesaic.moe.formats import CombineInput, DispatchOutput
from moesaic.moe.permute import POOL
from moesaic.moe.quant.weights import ExpertMatrix
from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY


class Rounding(Enum):
    """How the number of rows of a product is rounded."""

    EXACT = "exact"
    """Not at all: the compiled kernel takes any number."""
    SHAPES = "shapes"
    """Up, to few different shapes."""
    PIECES = "pieces"
    """Into pieces of one size, whose bits do not depend on their number: deterministic mode."""


@dataclass(frozen=True, slots=True)
class MoeRunnerConfig:
    num_experts: int
    """Local slots."""
    hidden_size: int
    intermediate_size: int
    top_k: int
    dtype: torch.dtype
    activation: Activation = silu_and_mul
    deterministic: bool = False
    kernel: bool = False
    """Whether rows go to the compiled kernel."""

    @property
    def rounding(self) -> Rounding:
        if self.kernel:
            return Rounding.EXACT
        return Rounding.PIECES if self.deterministic else Rounding.SHAPES


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Gate rows precede up rows in `w13`. One of the ranks that share an expert holds `b2_eH`."""

    w13_eJH: ExpertMatrix
    w2_eHI: ExpertMatrix
    b13_eJ: Tensor | None = None
    b2_eH: Tensor | None = None
    input_scale: float = 1.0
    inner_scale: float = 1.0
    """Global scales of what the first and the last product take, for formats that have one."""


class Workspace:
    """Buffers that runners borrow by name; contents do not outlive a call.

    On a GPU every call allocates: the allocator caches memory, and a captured graph would keep
    writing into a buffer that was replaced by a larger one.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def borrow(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=self.device)
        size = prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):  # or it could not be written outside that mode
                buffer = torch.empty(size, dtype=dtype)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


@dataclass(frozen=True)
class RunnerInput:
    """What pre-permute gives to the core, in a layout of the runner's own."""


@dataclass(frozen=True)
class RunnerOutput:
    """`y`: results at the input's rows."""

    y: Tensor


class MoeRunnerCore(ABC):
    """The grouped products of one layout or several."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        self.config = config

    @abstractmethod
    def run(
        self, inputs: RunnerInput, weights: ExpertWeights, workspace: Workspace
    ) -> RunnerOutput: ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """What permutes and fused functions use."""

    config: MoeRunnerConfig
    core: MoeRunnerCore
    weights: ExpertWeights
    workspace: Workspace
    load_e: Tensor | None = None
    """Where the device adds up the rows of each slot (int64)."""
    defers_reduce: bool = False
    """Whether the results of a row's pairs may stay unsummed (`DeferredCombineInput`)."""


class MoeRunner:
    """Runs the experts of one layer by the backend's functions."""

    def __init__(self, a2a: str, runner: str, config: MoeRunnerConfig, device: str = "cpu") -> None:
        self.a2a, self.runner, self.config, self.device = a2a, runner, config, device
        self.core: MoeRunnerCore = RUNNER_REGISTRY[runner].providers[device](config)
        self.fused = POOL.fused_func(a2a, runner, device)
        if self.fused is None:
            formats = A2A_REGISTRY[a2a].formats_for(device).values()
            for format in set(formats) & set(RUNNER_REGISTRY[runner].layouts):
                POOL.pre_permute(format, runner, device)
                POOL.post_permute(runner, format, device)

    def run(
        self,
        rows: DispatchOutput,
        weights: ExpertWeights,
        workspace: Workspace,
        load_e: Tensor | None = None,
        defers_reduce: bool = False,
    ) -> CombineInput:
        context = RunContext(self.config, self.core, weights, workspace, load_e, defers_reduce)
        if self.fused is not None:
            return self.fused(rows, context)
        pre = POOL.pre_permute(rows.format, self.runner, self.device)
        post = POOL.post_permute(self.runner, rows.format, self.device)
        inputs: Any = pre(rows, context)
        outputs = self.core.run(inputs, weights, workspace)
        return post(outputs, inputs, rows, context)
