"""The MoE layer. T tokens · H hidden · I expert intermediate · e local slots · J = 2 * I."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.kernels.experts import PairSum
from moesaic.layers.module import MatrixSlot, Module, TensorSlot
from moesaic.moe.activations import Activation, silu_and_mul
from moesaic.moe.context import MoeContext
from moesaic.moe.expert_load import SlotLoad
from moesaic.moe.expert_store import INWARD, OUTWARD, ExpertShape, ExpertStore
from moesaic.moe.formats import CombineInput, DispatchOutput, TopKOutput
from moesaic.moe.placement import EMPTY, Placement
from moesaic.moe.quant.weights import Planes
from moesaic.moe.runner.base import ExpertWeights, MoeRunner, MoeRunnerConfig
from moesaic.moe.runner.host.layouts import kernel_fits
from moesaic.moe.step_split import StepSplit

# Maximum rows for which the next norm sums the expert pairs: one of its programs takes a whole row.
MAX_DEFERRED_ROWS = 256
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class MoeConfig:
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    bias: bool = False
    activation: Activation = silu_and_mul
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Checkpoint names of an expert's gate, up and down projections."""
    num_shared: int = 0
    """The last of the experts, which every token chooses, behind those of the router."""
    shared_name: str = ""
    """The checkpoint's module that has all of them, beside that of the other experts."""

    @property
    def num_routed(self) -> int:
        """The experts among which the router chooses."""
        return self.num_experts - self.num_shared

    @property
    def routed_top_k(self) -> int:
        return self.top_k - self.num_shared

    def with_shared(self, inner: int, name: str) -> MoeConfig:
        """With the shared experts of a module that has `inner` intermediate channels: as many as
        others have, each."""
        if inner % self.intermediate_size:
            raise ValueError(
                f"--enable-waterfill: the shared expert has {inner} intermediate channels, which "
                f"is no multiple of the {self.intermediate_size} of other experts: leave it out"
            )
        count = inner // self.intermediate_size
        return replace(
            self,
            num_experts=self.num_experts + count,
            top_k=self.top_k + count,
            num_shared=count,
            shared_name=name,
        )


class FusedMoE(Module):
    """The routed experts of one layer, or this rank's share of them."""

    def __init__(
        self,
        config: MoeConfig,
        context: MoeContext,
        layer: int = 0,
        placement: Placement | None = None,
    ) -> None:
        super().__init__()
        self.config, self.context = config, context
        sizes = config.num_experts, layer, config.num_shared
        self.placement = placement or context.placement(*sizes)
        self.layout = context.layout(len(self.placement.slots))
        first_shared = config.num_routed if config.num_shared else None
        self.slot_map = context.slot_map(self.placement, self.layout, first_shared)
        self.step_split = context.step_split(self.placement, self.layout, layer)
        self.inner = config.intermediate_size // self.layout.moe_tp_size
        self.store = ExpertStore(context.weight_format, self._expert_shape())
        self.b13, self.b2 = self.store.weights.b13_eJ, self.store.weights.b2_eH
        dispatch = context.dispatch_config(self.layout, config.top_k, config.hidden_size, layer)
        self.dispatcher = context.make_dispatcher(dispatch)
        resolved = context.resolved
        counters = None if resolved.device == "cpu" else context.counters
        movable = config.num_experts if context.max_replicas else 0
        self.load = SlotLoad(layer, self.layout, context.comm.spans, counters, movable)
        runner_config = self._runner_config()
        self.runner = MoeRunner(resolved.a2a, resolved.runner, runner_config, resolved.device)

    def forward(
        self, x_TH: Tensor, topk: TopKOutput, step: Step = PREFILL, defer_reduce: bool = False
    ) -> Tensor | PairSum:
        """With `defer_reduce` the next norm may sum the results of a row: a `PairSum`."""
        rows = self.dispatcher.dispatch(x_TH, topk, step)
        results = self.run(rows, defer_reduce and self.defers_reduce(len(x_TH)))
        return self.dispatcher.combine(results)

    def run(self, rows: DispatchOutput, defers_reduce: bool = False) -> CombineInput:
        begin = time.monotonic_ns()
        weights, workspace = self.weights, self.context.workspace
        results = self.runner.run(rows, weights, workspace, self.load.on_device, defers_reduce)
        self.load.record(rows, results, begin)
        return results

    def split_of(self, step: Step) -> StepSplit | None:
        """What turns experts into slots in place of `slot_map`: in steps with prompts. Decode steps
        read weights most of the time, and even ranks would not repay the exchange."""
        return self.step_split if step.prefill else None

    def defers_reduce(self, rows: int) -> bool:
        return rows <= MAX_DEFERRED_ROWS and self.dispatcher.defers_reduce

    @property
    def weights(self) -> ExpertWeights:
        return self.store.weights

    def update_placement(self, placement: Placement) -> None:
        """Routes by another placement from now on, and counts rows in a new window. Moving the
        experts' tensors (`store`) is the caller's part; captured graphs see the new placement."""
        self.slot_map.update(placement)
        if self.step_split is not None:
            self.step_split.update(placement)
        self.load.start_window(self.local_experts)
        self.placement = placement

    def note_experts(self) -> None:
        """Call it when slots have been written and the placement names their experts: in memory
        that outlives the rank, what they hold is noted. Costs a pass over the slots' bytes."""
        records = self.store.records
        for slot, expert in enumerate(self.local_experts):
            if records is not None and records.expert(slot) == EMPTY != expert:
                self.store.note(slot, expert)

    def _expert_shape(self) -> ExpertShape:
        """The first rank that shares an expert adds the bias of the down projection."""
        bias, first = self.config.bias, self.layout.moe_tp_rank == 0
        return ExpertShape(
            slots=self.layout.slots_per_rank,
            hidden=self.config.hidden_size,
            inner=self.inner,
            dtype=self.context.dtype,
            inward_bias=bias,
            outward_bias=bias and first,
        )

    def _runner_config(self) -> MoeRunnerConfig:
        config = MoeRunnerConfig(
            num_experts=self.layout.slots_per_rank,
            hidden_size=self.config.hidden_size,
            intermediate_size=self.inner,
            top_k=self.config.top_k,
            dtype=self.context.dtype,
            activation=self.config.activation,
            deterministic=self.context.deterministic,
        )
        fits = self.context.resolved.device == "cpu"
        fits = fits and kernel_fits(config, self.context.weight_format.quantised)
        return replace(config, kernel=fits)

    @property
    def local_experts(self) -> tuple[int, ...]:
        """The logical expert of each local slot."""
        first = self.layout.first_slot
        return self.placement.slots[first : first + self.layout.slots_per_rank]

    @property
    def counted_experts(self) -> tuple[int, ...]:
        """The logical expert of each number in `load.tokens`."""
        movable = self.config.num_experts if self.context.max_replicas else 0
        return *self.local_experts, *range(movable)

    @property
    def share(self) -> slice:
        """This rank's part of the intermediate dimension."""
        start = self.layout.moe_tp_rank * self.inner
        return slice(start, start + self.inner)

    def slots(self, prefix: str) -> Iterator[TensorSlot | MatrixSlot]:
        gate, up, down = self.config.names
        inward, outward = self._all_parts()
        for local, expert in enumerate(self.local_experts):
            if expert >= self.config.num_routed:
                yield from self._shared_slots(prefix, local, expert - self.config.num_routed)
                continue
            stem = f"{prefix}{expert}."
            yield self._inward(f"{stem}{gate}.weight", local, inward[2 * local])
            yield self._inward(f"{stem}{up}.weight", local, inward[2 * local + 1])
            yield self._outward(f"{stem}{down}.weight", local, outward[local])

    def _shared_slots(self, prefix: str, local: int, number: int) -> Iterator[MatrixSlot]:
        """The checkpoint has all shared experts in the matrices of one module, side by side."""
        config, (inward, outward) = self.config, self._all_parts()
        inner, hidden = config.intermediate_size, config.hidden_size
        part = slice(number * inner + self.share.start, number * inner + self.share.stop)
        stem = prefix.removesuffix("experts.") + config.shared_name
        for name, planes in zip(config.names, inward[2 * local : 2 * local + 2], strict=False):
            slot = self._inward(f"{stem}.{name}.weight", local, planes)
            yield replace(slot, shape=(config.num_shared * inner, hidden), rows=part)
        slot = self._outward(f"{stem}.{config.names[-1]}.weight", local, outward[local])
        yield replace(slot, shape=(hidden, config.num_shared * inner), cols=part)

    def _all_parts(self) -> tuple[list[Planes], list[Planes]]:
        return self.weights.w13_eJH.all_parts(), self.weights.w2_eHI.all_parts()

    def sync_input_scales(self) -> None:
        """After loading: activations get the largest global scale of all experts of the layer."""
        if not self.store.has_input_scales:
            return
        own = struct.pack("2d", *self.store.largest_input_scales)
        gathered = self.context.comm.group.all_gather_bytes(own, "settle input scales")
        by_rank = (struct.unpack("2d", packed) for packed in gathered)
        inward, outward = (max(scales) or 1.0 for scales in zip(*by_rank, strict=True))
        self.store.set_input_scales(inward, outward)
        if self.dispatcher.config.payload.has_global_scale:
            self.dispatcher.set_global_scale(inward)

    @property
    def is_uncalibrated(self) -> bool:
        """Whether activations have a global scale that was never measured."""
        return self.store.has_input_scales and self.weights.input_scale == 1.0

    def _inward(
        self,
        name: str,
        local: int,
        into: Planes,
        index: int | None = None,
        every: int | None = None,
    ) -> MatrixSlot:
        format = self.weights.w13_eJH.format
        shape = (self.config.intermediate_size, self.config.hidden_size)
        note = partial(self.store.note_input_scale, slot=local, product=INWARD)
        return MatrixSlot(name, into, format, shape, self.share, ALL, index, every, note)

    def _outward(self, name: str, local: int, into: Planes, index: int | None = None) -> MatrixSlot:
        format = self.weights.w2_eHI.format
        shape = (self.config.hidden_size, self.config.intermediate_size)
        note = partial(self.store.note_input_scale, slot=local, product=OUTWARD)
        return MatrixSlot(name, into, format, shape, ALL, self.share, index, set_input_scale=note)


class StackedMoE(FusedMoE):
    """Experts stored as stacked tensors with gate and up interleaved (gpt-oss)."""

    def slots(self, prefix: str) -> Iterator[TensorSlot | MatrixSlot]:
        inward, outward = self._all_parts()
        for local, expert in enumerate(self.local_experts):
            gate, up = inward[2 * local : 2 * local + 2]
            yield self._inward(f"{prefix}gate_up_proj", local, gate, expert, every=0)
            yield self._inward(f"{prefix}gate_up_proj", local, up, expert, every=1)
            yield self._outward(f"{prefix}down_proj", local, outward[local], expert)
            yield from self._biases(prefix, local, expert)

    def _biases(self, prefix: str, local: int, expert: int) -> Iterator[TensorSlot]:
        count, hidden = self.config.num_experts, self.config.hidden_size
        inner = self.config.intermediate_size
        assert self.b13 is not None
        arrange: Callable[[Tensor], Tensor] = partial(_halves, share=self.share)
        name = f"{prefix}gate_up_proj_bias"
        yield TensorSlot(name, self.b13[local], (count, 2 * inner), expert, arrange)
        if self.b2 is not None:
            yield TensorSlot(f"{prefix}down_proj_bias", self.b2[local], (count, hidden), expert)


def _halves(gate_up_J: Tensor, share: slice) -> Tensor:
    """[2I] with gate and up alternating -> this rank's part of each, gate first."""
    return torch.cat((gate_up_J[0::2][share], gate_up_J[1::2][share]))
