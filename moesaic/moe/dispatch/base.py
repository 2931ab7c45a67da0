"""The contract of a dispatcher: tokens go to their experts, results come back.

Dispatch and combine have two halves each, so that other work overlaps with the transfer: `_a`
starts it, `_b` finishes it. The caller holds the state between them in a handle: two micro-batches
may be in flight at once, each in its own lane.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from moesaic.comm.collectives.group import Peers
from moesaic.comm.windows.window import PlaneSpec
from moesaic.core.link import EmulatedLink
from moesaic.core.stats import TrafficStats
from moesaic.core.step import PREFILL, Step
from moesaic.moe.formats import CombineInput, DispatchOutput, TopKOutput
from moesaic.moe.placement import EpLayout
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload, PayloadFormat
from moesaic.moe.registry import BufferSpec
from moesaic.observe.spans import SpanKind, Spans

Buffer = TypeVar("Buffer")


@dataclass(frozen=True, slots=True)
class DispatchConfig:
    """What a layer's dispatcher is built from."""

    layout: EpLayout
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    payload: PayloadFormat
    max_tokens: int
    """The most of a rank in one step."""
    max_decode_tokens: int
    """The most of a rank in a step without prefill."""
    layer: int = 0
    global_scale: float = 1.0
    deterministic: bool = False
    replicated: bool = False
    """All ranks have the same tokens, and all need all results."""
    mode: str = "auto"
    lanes: int = 2
    """Micro-batches that may be in flight; on a GPU each lane has its own buffers, and with two
    `dispatch_a` sends on a side stream."""
    dispatch_programs: int = 0
    """The most programs of normal mode's kernels; 0: no limit."""
    combine_programs: int = 0
    activation: str | None = None
    """The payload format that the weights are multiplied with; None: any."""

    def encode(self, x_TH: Tensor) -> Payload:
        return self.payload.encode(x_TH, self.global_scale)


@dataclass(frozen=True, slots=True)
class RowSpec:
    """The rows of a dispatcher's buffers; all layers with an equal spec share them."""

    payload: str
    hidden_size: int
    dtype: torch.dtype
    top_k: int

    @classmethod
    def of(cls, config: DispatchConfig, **sizes: Any) -> Self:
        return cls(config.payload.name, config.hidden_size, config.dtype, config.top_k, **sizes)

    def host_planes(self, *rows: int) -> list[PlaneSpec]:
        """Rows in shared memory, with their ids and weights."""
        codec = PAYLOAD_FORMATS[self.payload].codec
        planes = [(p.name, p.width(self.hidden_size), wire_dtype(p.dtype)) for p in codec.planes]
        planes += [("ids", self.top_k, torch.int32), ("weights", self.top_k, torch.float32)]
        return [PlaneSpec(name, (*rows, width), dtype) for name, width, dtype in planes]


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Types of one byte are stored as uint8: torch cannot index all of them."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


@dataclass(frozen=True, slots=True)
class CommContext:
    """What the dispatchers of all layers share."""

    group: Peers
    timeout: float = 60.0
    buffers: dict[Any, Any] = field(default_factory=dict)
    traffic: dict[str, TrafficStats] = field(default_factory=dict)
    spans: Spans = field(default_factory=Spans)
    link: EmulatedLink | None = None
    """Between the ranks, in place of their memory's speed."""
    overlaps: bool = False
    """Whether a single batch may compute while its rows travel."""

    def shared(self, spec: Hashable, make: Callable[[], Buffer]) -> Buffer:
        """The buffer of all layers with an equal spec; the first one makes it."""
        if spec not in self.buffers:
            self.buffers[spec] = make()
        buffer: Buffer = self.buffers[spec]
        return buffer


Hook = Callable[..., Any]
Value = TypeVar("Value")


class BaseDispatcher(ABC):
    """Subclasses implement the four halves with a leading underscore.

    Hooks run in the order of registration, with the dispatcher and the input or output; what a hook
    returns, if not None, replaces it. The value of `pre_dispatch` is (x, topk). `mid_dispatch` and
    `mid_combine` run between the two halves, while rows travel, with None.
    """

    name: ClassVar[str]
    HOOKS: ClassVar = (
        *("pre_dispatch", "mid_dispatch", "post_dispatch"),
        *("pre_combine", "mid_combine", "post_combine"),
    )

    def __init__(self, config: DispatchConfig, comm: CommContext) -> None:
        self.config, self.layout, self.comm = config, config.layout, comm
        self.traffic = comm.traffic.setdefault(self.name, TrafficStats())
        self.spans = comm.spans
        self._hooks: dict[str, OrderedDict[int, Hook]] = {p: OrderedDict() for p in self.HOOKS}

    @classmethod
    def buffer_spec(cls, config: DispatchConfig) -> BufferSpec | None:
        """The buffer that it allocates, or shares with others that need the same."""
        return None

    @classmethod
    def buffers(cls, config: DispatchConfig) -> Sequence[BufferSpec]:
        spec = cls.buffer_spec(config)
        return () if spec is None else (spec,)

    def register_hook(self, point: str, hook: Hook) -> RemovableHandle:
        if point not in self._hooks:
            raise ValueError(f"there is no hook {point!r}: choose one of {', '.join(self.HOOKS)}")
        handle = RemovableHandle(self._hooks[point])
        self._hooks[point][handle.id] = hook
        return handle

    def register_pre_dispatch_hook(self, hook: Hook) -> RemovableHandle:
        """`hook(dispatcher, x_TH, topk)` may return both, or None. `handle.remove()` ends it."""
        return self.register_hook("pre_dispatch", lambda own, value: hook(own, *value))

    def register_post_dispatch_hook(self, hook: Hook) -> RemovableHandle:
        """`hook(dispatcher, dispatch_output)`."""
        return self.register_hook("post_dispatch", hook)

    def register_pre_combine_hook(self, hook: Hook) -> RemovableHandle:
        """`hook(dispatcher, combine_input)`."""
        return self.register_hook("pre_combine", hook)

    def register_post_combine_hook(self, hook: Hook) -> RemovableHandle:
        """`hook(dispatcher, y_TH)`."""
        return self.register_hook("post_combine", hook)

    def register_mid_dispatch_hook(self, hook: Hook) -> RemovableHandle:
        """`hook(dispatcher)`, while tokens travel to their experts."""
        return self.register_hook("mid_dispatch", lambda own, _: hook(own))

    def register_mid_combine_hook(self, hook: Hook) -> RemovableHandle:
        """`hook(dispatcher)`, while results travel back."""
        return self.register_hook("mid_combine", lambda own, _: hook(own))

    def dispatch(self, x_TH: Tensor, topk: TopKOutput, step: Step = PREFILL) -> DispatchOutput:
        return self.dispatch_b(self.dispatch_a(x_TH, topk, step))

    @property
    def defers_reduce(self) -> bool:
        """Whether combine takes a `DeferredCombineInput`, which the next norm sums."""
        return False

    def combine(self, results: CombineInput) -> Tensor:
        return self.combine_b(self.combine_a(results))

    def dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step = PREFILL) -> Any:
        begin, before = time.monotonic_ns(), self.traffic.dispatch_bytes
        x_TH, topk = self._call("pre_dispatch", (x_TH, topk))
        self._check(x_TH, topk)
        self.traffic.dispatches += 1
        pending = self._dispatch_a(x_TH, topk, step)
        self.note_dispatch_time(begin, before, x_TH.shape[0])
        return pending

    def dispatch_b(self, pending: Any) -> DispatchOutput:
        self._call("mid_dispatch", None)
        begin, before = time.monotonic_ns(), self.traffic.dispatch_bytes
        output = self._call("post_dispatch", self._dispatch_b(pending))
        self.note_dispatch_time(begin, before)
        return output

    def combine_a(self, results: CombineInput) -> Any:
        begin, before = time.monotonic_ns(), self.traffic.combine_bytes
        self.traffic.combines += 1
        pending = self._combine_a(self._call("pre_combine", results))
        self.note_combine_time(begin, before)
        return pending

    def combine_b(self, pending: Any) -> Tensor:
        self._call("mid_combine", None)
        begin, before = time.monotonic_ns(), self.traffic.combine_bytes
        y_TH = self._call("post_combine", self._combine_b(pending))
        self.note_combine_time(begin, before, y_TH.shape[0])
        return y_TH

    def note_dispatch_time(self, begin: int, bytes_before: int, tokens: int = 0) -> None:
        """Counts a half that has just ended."""
        now, traffic = time.monotonic_ns(), self.traffic
        traffic.dispatch_seconds += (now - begin) * 1e-9
        if self.spans.on:
            moved = traffic.dispatch_bytes - bytes_before
            self.spans.add(SpanKind.DISPATCH, begin, self.config.layer, tokens, moved, now)

    def note_combine_time(self, begin: int, bytes_before: int, tokens: int = 0) -> None:
        now, traffic = time.monotonic_ns(), self.traffic
        traffic.combine_seconds += (now - begin) * 1e-9
        if self.spans.on:
            moved = traffic.combine_bytes - bytes_before
            self.spans.add(SpanKind.COMBINE, begin, self.config.layer, tokens, moved, now)

    def _check(self, x_TH: Tensor, topk: TopKOutput) -> None:
        """Checks what a custom top-k or a hook gives; values only on CPU, without a wait."""
        config, ids, weights = self.config, topk.ids_TK, topk.weights_TK
        shape = (x_TH.shape[0], config.top_k)  # `len` of a tensor is slow
        if ids.shape != shape or weights.shape != shape or weights.dtype != torch.float32:
            raise ValueError(
                f"{self.operation('dispatch')}: ids {list(ids.shape)} and {weights.dtype} weights "
                f"{list(weights.shape)}: both must be {list(shape)}, weights float32"
            )
        if ids.numel() == 0 or ids.device.type != "cpu":
            return
        least, most = (int(bound) for bound in ids.aminmax())
        if least < -1 or most >= config.layout.num_slots:
            wrong = least if least < -1 else most
            raise ValueError(
                f"{self.operation('dispatch')}: a token names slot {wrong}: "
                f"slots are 0..{config.layout.num_slots - 1}, and -1 for none"
            )
        ordered = ids.sort(1).values
        if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any()):
            raise ValueError(f"{self.operation('dispatch')}: a token names a slot twice")

    def _call(self, point: str, value: Value) -> Value:
        for hook in tuple(self._hooks[point].values()):
            replacement = hook(self, value)
            if replacement is not None and value is not None:
                value = replacement
        return value

    @abstractmethod
    def _dispatch_a(self, x_TH: Tensor, topk: TopKOutput, step: Step) -> Any: ...

    @abstractmethod
    def _dispatch_b(self, pending: Any) -> DispatchOutput: ...

    @abstractmethod
    def _combine_a(self, results: CombineInput) -> Any: ...

    @abstractmethod
    def _combine_b(self, pending: Any) -> Tensor: ...

    def set_global_scale(self, scale: float) -> None:
        """For payloads that have one; all ranks set the same."""
        self.config = replace(self.config, global_scale=scale)

    def note_dispatch(self, rows: int) -> None:
        """Counts rows that came from other ranks."""
        self.traffic.dispatch_rows += rows
        self.traffic.dispatch_bytes += rows * self.config.payload.row_bytes(self.config.hidden_size)

    def note_combine(self, rows: int) -> None:
        self.traffic.combine_rows += rows
        self.traffic.combine_bytes += rows * self.config.hidden_size * self.config.dtype.itemsize

    def operation(self, phase: str) -> str:
        """The name in errors about missing ranks."""
        return f"{self.name} {phase}, layer {self.config.layer}"
