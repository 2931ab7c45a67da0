"""Steps that the device computes while the host plans the next one.

`begin` launches a step and returns; `wait` gives its results. Sampled tokens stay on the device
(FutureTokens), so the next step can begin with tokens that the host does not know yet.

Ranks that exchange rows on the device all begin every step, also those without tokens, and all
alike: with the graph that holds the largest of their batches, as the StepAgreement says, or with as
many rows. Kernels that wait for other ranks report a missing one through their
windows (engine/runner/peer_watchdog.py).

T tokens of the step · R rows that sample · L rows that the host samples · V vocabulary · H hidden.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moesaic.config import ServerArgs
from moesaic.core.overlap import Overlap
from moesaic.core.step import Step
from moesaic.engine.runner.batches import PACKED, EagerBatch, EagerOutput, GraphBatch, IdleBatch
from moesaic.engine.runner.device_penalties import DevicePenalties
from moesaic.engine.runner.future_tokens import DRAWN, FutureTokens, SamplingPath, TokenSlots
from moesaic.engine.runner.graphs import CapturedGraphs, GraphKey
from moesaic.engine.runner.matchers import GrammarMask, MaskKey
from moesaic.engine.runner.mixed_batch import MixedBatch
from moesaic.engine.runner.pinned import DeviceEvent, PinnedRing
from moesaic.engine.runner.recorded_tokens import StepTokens
from moesaic.engine.runner.routed_experts import RoutedExperts, RoutedSlots
from moesaic.engine.runner.row_results import (
    LOGIT_ROWS,
    SampledRow,
    ScoreQueue,
    accept_drafts,
    item_results,
    offered_drafts,
    sample_rows,
    sampled_rows,
)
from moesaic.engine.runner.split_step import SplitStep, idle_agreements
from moesaic.engine.runner.step_transfers import Outgoing
from moesaic.engine.schedule.plan import (
    NOT_FINITE,
    Ints,
    ItemResult,
    PlanItem,
    StepAgreement,
    StepPlan,
    StepResult,
)
from moesaic.engine.setup.device_memory import describe_gpu
from moesaic.engine.setup.graph_sizes import GraphSizes, mixed_graph_sizes
from moesaic.kernels.sampling import OfferedDrafts, greedy_rows
from moesaic.overlap.policy import OverlapPolicy

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

HOST = SamplingPath.HOST
# For ranks that may still compile their kernels; the supervisor ends the wait for one that died.
COMPILE_SECONDS = 600.0


@dataclass(slots=True)
class BatchOutput:
    """`logits_RV` and `found_2R`, greedy tokens and whether they are invalid, are of sampled rows;
    `scored`: the output of a step that scores prompt tokens; `rows_TH`: hidden states of all."""

    logits_RV: Tensor
    found_2R: Tensor
    hidden_TH: Tensor | None = None
    scored: EagerOutput | None = None
    routed: RoutedSlots | None = None
    tokens: StepTokens | None = None
    rows_TH: Tensor | None = None


@dataclass(slots=True)
class DeviceStep:
    """An in-flight step; after `event`, `found` [2, R] has the tokens of all sampled rows, and
    failures. `rows`: those of the plan's items, which follow its decodes. `draft`: adds drafts.
    `store`: puts into a draft model's cache what is known with the results."""

    steps: AsynchronousSteps
    plan: StepPlan
    number: int
    rows: list[SampledRow]
    found: Tensor
    event: DeviceEvent
    hidden_TH: Tensor | None = None
    scored: EagerOutput | None = None
    routed: RoutedSlots | None = None
    host_sampled: list[int] = field(default_factory=list)
    """Rows that the host samples from `logits_LV`, into `slots_L`."""
    logits_LV: Tensor | None = None
    slots_L: list[int] = field(default_factory=list)
    masks: Callable[[], dict[MaskKey, GrammarMask]] = dict
    draft: Callable[[Sequence[ItemResult]], None] | None = None
    store: Callable[[StepResult], None] | None = None
    outgoing: Outgoing = field(default_factory=list)
    """What other instances get of it."""
    _result: StepResult | None = None

    @property
    def is_done(self) -> bool:
        return self.event.has_passed

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self.steps.finish(self)
        return self._result

    def host_row(self, n: int) -> SampledRow:
        """The item and the sampling of row `n`, which the host samples."""
        return self.rows[n - len(self.plan.decodes)]

    def host_item(self, n: int) -> PlanItem:
        return self.plan.items[self.host_row(n).item]


CapturedStep = tuple[CapturedGraphs[Any], Any]


def mixed_schedules(args: ServerArgs, runner: ModelRunner) -> tuple[Overlap, ...]:
    """The schedules of steps with prompts that have graphs. With --overlap tbo only those with
    drafts are whole, and those that keep more than a graph does."""
    splits_all = args.overlap == "tbo" and not runner.limits.drafts
    return (Overlap.TBO,) if splits_all and Overlap.TBO in runner.schedules else runner.schedules


class AsynchronousSteps:
    @torch.inference_mode()
    def __init__(self, runner: ModelRunner, args: ServerArgs, sizes: GraphSizes) -> None:
        self._runner, mesh = runner, runner.ranks.mesh
        # Only the rank that samples knows future tokens.
        self.overlaps = mesh.attention_tp == mesh.pp == 1
        self._has_peers = mesh.tp > 1
        self._timeout, self._number = args.watchdog_timeout, 0
        if self._has_peers:  # a kernel that waits for a peer times out first, and names it
            self._timeout += runner.ranks.timeout
        self.waited_ns = 0
        """How long `begin` waited for the device."""
        self.stuck = ""
        """Why the GPU will never finish its work: waiting for it would hang."""
        self._host_sampled: dict[int, DeviceStep] = {}
        """Requests whose newest token the host has yet to sample, and its step."""
        device, most = runner.device, max((*sizes.plain, *sizes.verify), default=1)
        self._future_tokens = FutureTokens(runner.max_running, device)
        self._uploads = PinnedRing(device, PACKED * most, self._timeout)
        self._downloads = PinnedRing(device, 2 * runner.max_running, self._timeout)
        self._penalties: DevicePenalties | None = None
        if runner.samples:
            sizes_SV = (runner.max_running, runner.vocab_size)
            self._penalties = DevicePenalties(*sizes_SV, self._uploads)
        shared = (runner, self._uploads, self._future_tokens)
        self._routed_experts = RoutedExperts(runner, self._uploads)
        self._idle = IdleBatch(runner) if self._has_peers else None
        self._eager = EagerBatch(*shared, self._idle)
        mixed_sizes = mixed_graph_sizes(args, runner.limits.tokens) if sizes.plain else ()
        self.mixed_batch = MixedBatch(*shared, mixed_sizes, mixed_schedules(args, runner))
        self.graph_batch = GraphBatch(*shared, sizes)
        self.graphs = self.graph_batch.graphs
        self._pool: Any = None
        """Memory of all graphs."""

    @torch.inference_mode()
    def prepare(self, idle_steps: Sequence[tuple[int, bool]], policy: OverlapPolicy) -> None:
        """Captures graphs, and runs steps without tokens of this rank, so that no peer waits for
        kernels to compile. `idle_steps`: most tokens of a rank, and whether any prefills."""
        self.capture(policy)
        with self._runner.watchdog.starting(COMPILE_SECONDS):
            for agreement in idle_agreements(self._runner, idle_steps):
                step = self._step(agreement)
                self._run_idle(step, SplitStep.of(self._runner, agreement, step))
            self._runner.watchdog.lifecycle.check()

    @torch.inference_mode()
    def capture(self, policy: OverlapPolicy) -> None:
        """Captures the graphs of steps that the policy may choose, and that have none yet. A rank
        that returns, for which requests may wait, captures those of steps with prompts later."""
        if self._runner.device.type != "cuda":
            return
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with self._runner.watchdog.starting(COMPILE_SECONDS):
            if self._runner.ranks.returns:
                self.mixed_batch.graphs.postpone(policy)
            else:
                self.mixed_batch.graphs.capture_chosen(self._pool, policy)
            self.graphs.capture_chosen(self._pool, policy)

    def graph_of(self, plan: StepPlan, agreement: StepAgreement) -> CapturedStep | None:
        """The graphs and the key of a step; None if it runs kernel by kernel."""
        if (key := self._graph_key(plan, agreement)) is not None:
            return self.graphs, key
        bucket, mixed = self._mixed_bucket(agreement), self.mixed_batch
        if bucket is None or not mixed.can_run(plan):
            return None
        split = SplitStep.of(self._runner, agreement, self._step(agreement))
        return mixed.graphs, mixed.key(plan, bucket, split, agreement.overlap)

    def begin(self, plan: StepPlan, agreement: StepAgreement, x_TH: Tensor | None) -> DeviceStep:
        runner = self._runner
        if self.stuck:
            raise RuntimeError(f"the GPU is unusable in this process: {self.stuck}")
        if runner.device.type == "cuda":
            torch.cuda.set_device(runner.device)  # the current device is per thread
        self._number += 1
        runner.move(plan.moves)
        runner.clear(plan.clear)
        for number in plan.ended:
            self._host_sampled.pop(number, None)
        self._sample_missing_tokens(plan.items)
        runner.transfers.receive(plan, runner.sent_caches, runner.page_table)
        slots = self._future_tokens.slots_for(plan)
        if self._penalties is not None:
            self._penalties.free(plan.ended)
            self._penalties.count(plan, slots, self._future_tokens)
        needs_host = runner.samples and bool((slots.paths == HOST).any())
        if needs_host or plan.ended:
            runner.matchers.begin(plan)
        offers = runner.accept_thresholds is not None
        rows = sampled_rows(plan, offers) if runner.samples else []
        if x_TH is not None:  # it comes from the host
            x_TH = x_TH.to(runner.device)
        output = self._compute(plan, agreement, x_TH, slots)
        runner.record_pass(plan, agreement, output.tokens)
        step = self._sample(plan, rows, slots, output)
        if runner.draft and output.rows_TH is not None and agreement.draft_steps:
            found_2R = None if step.host_sampled else output.found_2R
            step.draft = runner.draft.begin(plan, agreement, output.rows_TH, found_2R)
        elif runner.draft and output.rows_TH is not None:
            given = (plan, output.rows_TH, output.found_2R, step.host_sampled)
            step.store = runner.draft.begin_store(*given)
        if needs_host:
            step.masks = runner.matchers.pending()
        step.event.record()
        step.outgoing = runner.transfers.outgoing(plan, runner.cache, runner.page_table)
        runner.transfers.send(step.outgoing, runner.cache)
        for item in map(step.host_item, step.host_sampled):
            self._host_sampled[item.request_no] = step
        return step

    def _sample_missing_tokens(self, items: Sequence[PlanItem]) -> None:
        """Samples the tokens that items begin with and that the host has yet to sample."""
        begin = time.monotonic_ns()
        for item in items if self._host_sampled else ():
            if item.token_ids[0] < 0 and item.request_no in self._host_sampled:
                self._host_sampled[item.request_no].wait()
        self.waited_ns = time.monotonic_ns() - begin

    def _compute(
        self,
        plan: StepPlan,
        agreement: StepAgreement,
        x_TH: Tensor | None,
        slots: TokenSlots,
    ) -> BatchOutput:
        step = self._step(agreement)
        split = SplitStep.of(self._runner, agreement, step)
        records_tokens = self._runner.keeps_slots(agreement)
        if (key := self._graph_key(plan, agreement)) is not None:
            hidden_TH = self.graph_batch.run(plan, key, x_TH, slots, split)
            rows = plan.num_tokens if self._runner.samples else 0
            output = self._output(hidden_TH, rows)
            if records_tokens:
                output.tokens = self.graph_batch.tokens(key, plan.num_tokens)
            if plan.is_routed:
                routed = self.graph_batch.routed[key]
                output.routed = self._routed_experts.read(plan, routed, key.rows)
            return output
        bucket = self._mixed_bucket(agreement)
        # A mixed graph does not keep slots.
        if bucket is not None and not records_tokens and self.mixed_batch.can_run(plan):
            given = (plan, bucket, x_TH, slots, split, agreement.overlap)
            return self._eager_output(plan, self.mixed_batch.run(*given))
        if not plan.has_work:
            return self._run_idle(step, split)
        if plan.is_routed or records_tokens:
            step = replace(step, routed=[])
        eager = self._eager.run(plan, step, x_TH, slots, split)
        output = self._eager_output(plan, eager)
        output.tokens = eager.tokens
        if step.routed is not None and plan.is_routed:
            output.routed = self._routed_experts.read(plan, step.routed, plan.num_tokens)
        return output

    def _graph_key(self, plan: StepPlan, agreement: StepAgreement) -> GraphKey | None:
        """The graph of a decode step, None for an eager step; all ranks choose alike."""
        if agreement.prefill:
            return None
        return self.graphs.bucket(agreement.most_rows, plan.verifies, agreement.overlap)

    def _mixed_bucket(self, agreement: StepAgreement) -> int | None:
        """Tokens of the graph of a step with prompts, if there is one: the same on all ranks."""
        graphs, rows = self.mixed_batch.graphs, agreement.most_rows
        return graphs.bucket(rows, agreement.overlap) if agreement.prefill else None

    def _step(self, agreement: StepAgreement) -> Step:
        counts = self._runner.group_counts(agreement.counts)
        rows = self._mixed_bucket(agreement) or agreement.most_rows
        prefill, overlap = agreement.prefill, agreement.overlap
        return Step(prefill=prefill, counts=counts, rows=rows, overlap=overlap)

    def _run_idle(self, step: Step, split: SplitStep | None = None) -> BatchOutput:
        assert self._idle is not None, "a rank without peers has tokens in every step"
        return self._output(self._idle.run(step, split))

    def _eager_output(self, plan: StepPlan, eager: EagerOutput) -> BatchOutput:
        """Logits and greedy tokens of the sampled rows."""
        if not self._runner.ranks.is_last:
            return self._output(eager.hidden_TH)
        output, count = self._output(), plan.num_sampled
        output.rows_TH = eager.hidden_TH
        if count:
            output.logits_RV = self._runner.model.logits(eager.hidden_TH[eager.rows_R[:count]])
        if count and self._runner.samples:
            output.found_2R = greedy_rows(output.logits_RV)
            self._future_tokens.store(eager.slots_R, output.found_2R[0])
        if any(item.score is not None for item in plan.items):
            output.scored = replace(eager, rows_R=eager.rows_R[count:])
        return output

    def _output(self, hidden_TH: Tensor | None = None, rows: int = 0) -> BatchOutput:
        """The output of a graph's first rows; `hidden_TH`: for the next pipeline stage."""
        batch = self.graph_batch
        handed_TH = None if self._runner.ranks.is_last else hidden_TH
        found = batch.logits_BV[:rows], batch.found_2B[:, :rows], handed_TH
        return BatchOutput(*found, rows_TH=hidden_TH)

    def _sample(
        self,
        plan: StepPlan,
        rows: list[SampledRow],
        slots: TokenSlots,
        output: BatchOutput,
    ) -> DeviceStep:
        """Draws tokens for random rows, leaves others to the host, and starts the download."""
        count = plan.num_sampled if self._runner.samples else 0
        if count < output.found_2R.shape[1]:
            (rows_R,) = self._uploads.upload(plan.logit_rows())
            output.logits_RV = output.logits_RV[rows_R]
            output.found_2R = output.found_2R[:, rows_R]
        sequences_R = np.repeat(np.arange(plan.num_sequences), plan.sampled)[:count]
        drawn, on_host = slots.choose(DRAWN, sequences_R), slots.choose((HOST,), sequences_R)
        if len(drawn):
            output.found_2R = self._draw(plan, rows, drawn, sequences_R[drawn], slots, output)
        host, event = self._downloads.next_buffer(2 * count)
        found = host.view(2, count).copy_(output.found_2R, non_blocking=True)
        step = DeviceStep(self, plan, self._number, rows, found, event)
        step.hidden_TH, step.scored, step.routed = output.hidden_TH, output.scored, output.routed
        if len(on_host):
            (rows_L,) = self._uploads.upload(on_host)
            # A copy: the next step overwrites the static buffers of a graph.
            step.logits_LV, step.host_sampled = output.logits_RV[rows_L], on_host.tolist()
            step.slots_L = slots.numbers[sequences_R[on_host]].tolist()
        return step

    def _draw(
        self,
        plan: StepPlan,
        rows: list[SampledRow],
        drawn: Ints,
        sequences: Ints,
        slots: TokenSlots,
        output: BatchOutput,
    ) -> Tensor:
        """The tokens of all rows, those of `drawn` replaced; `sequences`: those of `drawn`."""
        rows_D, slots_D = self._uploads.upload(drawn, slots.numbers[sequences])
        logits_RV = output.logits_RV
        some_RV = logits_RV if len(drawn) == len(logits_RV) else logits_RV[rows_D]
        begin = len(plan.decodes)
        behind = int(np.searchsorted(drawn, begin))
        asked = [rows[n - begin] for n in drawn[behind:].tolist()]
        if self._penalties is not None and asked:
            # In place: every step computes logits anew.
            self._penalties.adjust(some_RV, plan, asked, behind)
        positions = plan.sampled_positions()[drawn]
        offered = self._offered(asked, behind)
        drawn_2R = self._future_tokens.draws.draw(some_RV, plan.rows[sequences], positions, offered)
        self._future_tokens.store(slots_D, drawn_2R[0])
        return output.found_2R.index_copy(1, rows_D, drawn_2R)

    def _offered(self, rows: list[SampledRow], before: int) -> OfferedDrafts | None:
        """The drafts that rows may take; `before`: rows without any."""
        thresholds = self._runner.accept_thresholds
        found = offered_drafts(rows, thresholds, self._runner.device)
        if found is None or not before:
            return found
        none_RD = found.tokens_RD.new_full((before, found.tokens_RD.shape[1]), -1)
        return replace(found, tokens_RD=torch.cat((none_RD, found.tokens_RD)))

    @torch.inference_mode()
    def finish(self, step: DeviceStep) -> StepResult:
        try:
            return self._finish(step)
        except Exception as error:
            self._runner.recover(error)
            raise

    def _finish(self, step: DeviceStep) -> StepResult:
        plan = step.plan
        step.event.wait(self._timeout, f"step {step.number} of {plan.num_tokens} tokens")
        self._runner.watchdog.lifecycle.check()
        routed = b"" if step.routed is None else step.routed.experts()
        if not self._runner.ranks.is_last:
            return StepResult([], routed)
        (tokens, broken), begin = step.found.numpy(), len(plan.decodes)
        found = [ItemResult(token_ids=[token]) for token in tokens[begin:].tolist()]
        for n in np.flatnonzero(broken[begin:]).tolist():
            found[n] = ItemResult(broken=NOT_FINITE)
        if step.logits_LV is not None:
            self._sample_on_host(step, step.logits_LV, found)
        results = item_results(plan, found)
        accept_drafts(plan, found)
        if step.scored is not None:
            self._score(plan, step.scored, results)
        if step.draft is not None:
            step.draft(results)
        decoded = tokens[:begin].tolist(), np.flatnonzero(broken[:begin]).tolist()
        result = StepResult(results, routed, *decoded)
        if step.store is not None:
            step.store(result)
        self._runner.send_drafts(step.outgoing)
        return result

    def _sample_on_host(self, step: DeviceStep, logits_LV: Tensor, found: list[ItemResult]) -> None:
        """`found`: the results of the rows of items."""
        rows = [step.host_row(n) for n in step.host_sampled]
        sampled = [ItemResult() for _ in rows]
        thresholds = self._runner.accept_thresholds
        sample_rows(rows, logits_LV, sampled, step.masks(), thresholds)
        tokens: dict[int, int] = {}
        for n, slot, result in zip(step.host_sampled, step.slots_L, sampled, strict=True):
            found[n - len(step.plan.decodes)] = result
            key = step.host_item(n).request_no
            if self._host_sampled.get(key) is step:
                del self._host_sampled[key]
                # The row of a retracted request may be another's by now.
                if result.token_ids and self._future_tokens.owner(slot) == key:
                    tokens[slot] = result.token_ids[0]
        if tokens:
            slots, values = self._uploads.upload(list(tokens), list(tokens.values()))
            self._future_tokens.store(slots, values)

    def _score(self, plan: StepPlan, scored: EagerOutput, results: list[ItemResult]) -> None:
        queue = ScoreQueue(plan, results)
        for rows_R in scored.rows_R.split(LOGIT_ROWS):
            queue.score_next(self._runner.model.logits(scored.hidden_TH[rows_R]))

    def drop(self) -> None:
        """Drops all in-flight steps; their results are ignored."""
        self._future_tokens.clear()
        self._host_sampled.clear()
        if self._penalties is not None:
            self._penalties.clear()
        if self._runner.device.type == "cuda" and not self.stuck:
            try:
                torch.cuda.synchronize(self._runner.device)
                if not self._runner.watchdog.lifecycle.keeps_graphs:
                    logger.warning("CUDA graphs are captured again when steps need them")
                    self.graphs.drop()
                    self.mixed_batch.graphs.drop()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                self.stuck = str(error)
                logger.error("the GPU is unusable in this process: %s", error)

    @property
    def graph_bytes(self) -> int:
        return self.graphs.nbytes + self.mixed_batch.graphs.nbytes

    def device_info(self) -> dict[str, Any]:
        """What this rank has on a GPU, beside weights and KV cache."""
        device = self._runner.device
        return {
            "device": describe_gpu(device.index) if device.type == "cuda" else {},
            "graph_sizes": list(self.graphs.sizes),
            "mixed_graph_tokens": list(self.mixed_batch.graphs.tokens),
            "graph_bytes": self.graph_bytes,
            "step_bytes": self._runner.step_bytes.total,
        }
