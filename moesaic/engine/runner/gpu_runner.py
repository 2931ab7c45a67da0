"""Steps on a device that works while the host plans the next one.

`begin` hands a step to the device and comes back; `wait` gives its results. Tokens that a step
samples stay on the device in `last`, by the seat of their request, so that the next step can begin
with tokens which the host does not know yet.

Ranks that exchange rows on the device all begin every step, also those without tokens, and all the
same way: kernel by kernel if any of them prefills, else by the graph that holds the largest of
their batches. What all of them must know comes with the step's Turn; kernels that wait for other
ranks tell through their windows when one does not come (engine/runner/peer_watchdog.py).

T tokens of the step · B rows of a decode step · R rows that sample · V vocabulary · H hidden ·
S seats.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moesaic.config import ServerArgs
from moesaic.core.step import Step
from moesaic.engine.runner.future_tokens import FutureToken, FutureTokens, SamplingPath
from moesaic.engine.runner.graphs import GraphCache, graph_sizes
from moesaic.engine.runner.matchers import Allowed
from moesaic.engine.runner.model_runner import (
    LOGIT_ROWS,
    NOT_FINITE,
    ModelRunner,
    ScoreQueue,
    gpu_attention,
    sample_items,
    spans_of,
)
from moesaic.engine.runner.peer_watchdog import PeerWatchdog
from moesaic.engine.runner.pinned import Mark, PinnedRing
from moesaic.engine.runner.warm_up import forget_steps, sorted_parts, warm_steps, warm_up
from moesaic.engine.sampling.row_samplers import samplers
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.schedule.plan import ItemResult, PlanItem, StepAgreement, StepPlan, StepResult
from moesaic.engine.setup.device_memory import GIB, DeviceRoom, describe_gpu, release_unused
from moesaic.engine.worker.rank_context import RankContext
from moesaic.layers.padded_attention import PaddedAttention
from moesaic.layers.paged_cache import SequenceSpan

logger = logging.getLogger(__name__)

# Rows of what is packed for a decode step: token ids (below 0: that of the seat), positions, seats,
# how many rows are somebody's, and how many of those that this rank takes to the experts are.
IDS, POSITIONS, SEAT, COUNT, OWN, PACKED = range(6)
DRAW, HOST = SamplingPath.DRAW, SamplingPath.HOST
# Seconds that kernels wait for ranks which may still compile theirs. Of one that dies meanwhile the
# supervisor tells them; it also ends a start that takes too long.
COMPILING = 600.0


def make_runner(args: ServerArgs, ranks: RankContext | None = None) -> ModelRunner:
    return (GpuRunner if args.device == "cuda" else ModelRunner)(args, ranks)


class DecodeBatch:
    """What decode steps read, in buffers that stay where they are."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.packed = torch.zeros(PACKED, size, dtype=torch.int64, device=device)
        # The lower halves of the numbers, which are all of them.
        self.count_1 = self.packed[COUNT].view(torch.int32)[:1]
        self.own_1 = self.packed[OWN].view(torch.int32)[:1]


@dataclass(slots=True)
class DeviceStep:
    """A step under way: `rows` are the items that sample, whose tokens and whether they have none
    come into `found`, [2, R] on the host, when `mark` is reached. Some are left to the host:
    `late` of them, with a copy of their `logits`. `finish` takes care of these and of scores."""

    runner: GpuRunner
    plan: StepPlan
    number: int
    rows: list[int]
    found: Tensor
    mark: Mark
    late: list[int] = field(default_factory=list)
    logits_LV: Tensor | None = None
    seats_L: list[int] = field(default_factory=list)
    hidden_TH: Tensor | None = None
    allowed: Callable[[], dict[int, Allowed]] = dict
    _result: StepResult | None = None

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self.runner.finish(self)
        return self._result


class GpuRunner(ModelRunner):
    def __init__(self, args: ServerArgs, ranks: RankContext | None = None) -> None:
        super().__init__(args, ranks)
        mesh = self.ranks.mesh
        # A follower knows the tokens that its leader tells it, and no others.
        self.overlaps = mesh.attention_tp == 1
        self._has_peers = mesh.tp > 1
        self._prepare(args)

    def _make_cache(self, args: ServerArgs, weight_bytes: int) -> None:
        self._windows = PeerWatchdog.of(self.moe, self.ranks)
        self._sizes = graph_sizes(args, self.max_running)
        self._warm = self._warm_steps()
        if self.device.type == "cuda":
            if not args.skip_server_warmup:
                # Collectives of NCCL wait even so: those of a rank that came first, not for ever.
                self.ranks.least(0, "load the weights")
                with self._windows.apart():
                    warm_up(self, args, self._warm, *samplers(self.kind, self.device))
            release_unused()  # before a rank on the same GPU looks at what is free
        super()._make_cache(args, weight_bytes)

    def _room(self) -> DeviceRoom:
        return super()._room().holding(self._windows.nbytes)

    @torch.inference_mode()
    def _prepare(self, args: ServerArgs) -> None:
        device, sizes = self.device, self._sizes
        self._timeout, self._number = args.watchdog_timeout, 0
        if self._has_peers:  # a kernel that waits for one gives up before, and knows for whom
            self._timeout += self.ranks.timeout
        self._stuck = ""
        """Why the GPU will never be done: who waited for it would not come back."""
        self._seats = FutureTokens(2 * self.max_running)
        self._late: dict[int, DeviceStep] = {}
        """Requests whose newest token the host is yet to sample, and the step of it."""
        seats = self._seats.nobody.number + 1
        self._last_S = torch.zeros(seats, dtype=torch.int64, device=device)
        most = max(sizes, default=1)
        self._rows = DecodeBatch(most, device)
        self._found_2B = torch.zeros(2, most, dtype=torch.int64, device=device)
        shape = (most if sizes else 0, self.vocab_size)
        self._logits_BV = torch.zeros(shape, dtype=torch.float32, device=device)
        self._up = PinnedRing(device, PACKED * most, self._timeout)
        self._down = PinnedRing(device, 2 * self.max_running, self._timeout)
        self._attention = self._decode_attention(args, {1, *sizes} if self._has_peers else sizes)
        self._greedy, self._draw_rows = samplers(self.kind, device)
        self.graphs = GraphCache(sizes, self._decode, device)
        with self._windows.patient(COMPILING):
            if device.type == "cuda":
                self.graphs.capture()
            if self.ranks.mesh.dp > 1 and not args.skip_server_warmup:
                self._warm_idle()
            self._windows.check()
        forget_steps(self)
        if device.type == "cuda":
            self._report()

    def _warm_steps(self) -> list[tuple[int, bool]]:
        mesh, same = self.ranks.mesh, self.moe.replicated
        top_k = next((layer.config.top_k for layer in self.moe_layers), 1)
        exchange, sharers = mesh.tp > 1 and not same, 1 if same else mesh.attention_tp
        parts = sorted_parts(mesh.tp, top_k)
        return warm_steps(self.limits, self._sizes, exchange, parts, sharers)

    def _warm_idle(self) -> None:
        """Compiles what a rank runs that has no tokens: the others would wait for it."""
        for rows, prefill in self._warm:
            self._idle(
                StepPlan([], []), StepAgreement(0, (rows,) * self.ranks.mesh.dp, prefill=prefill)
            )

    def _decode_attention(self, args: ServerArgs, sizes: Collection[int]) -> dict[int, Any]:
        """For each bucket what `fill` tells where its rows attend, and does so."""
        if self.kind == "cpu":
            return {size: PaddedAttention(self.cache) for size in sizes}
        pages = -(-self.context_length // args.page_size)
        make = gpu_attention().DecodeBuffers
        return {size: make(self.cache, size, pages, self.deterministic) for size in sizes}

    def _report(self) -> None:
        free = torch.cuda.mem_get_info(self.device)[0]
        logger.info(
            "memory of the GPU: weights %.2f GiB, KV cache %.2f GiB, graphs %.2f GiB, %.2f GiB "
            "free, of which the largest step takes about %.2f GiB",
            self.model.nbytes / GIB,
            self.cache.num_bytes / GIB,
            self.graphs.nbytes / GIB,
            free / GIB,
            self.step_bytes.total / GIB,
        )

    def begin(
        self, plan: StepPlan, agreement: StepAgreement | None = None, x_TH: Tensor | None = None
    ) -> DeviceStep:
        try:
            return self._begin(
                plan, agreement or StepAgreement(0, (plan.num_tokens,), prefill=plan.prefill)
            )
        except Exception as error:
            self._abandon(error)
            self._windows.explain(error)
            raise

    def finish(self, step: DeviceStep) -> StepResult:
        try:
            return self._finish(step)
        except Exception as error:
            self._abandon(error)
            self._windows.explain(error)
            raise

    def abandon(self, reason: str) -> None:
        # Before anything that waits for the device: that may be waiting for another rank.
        self._windows.abort(reason)
        self._forget()

    def _abandon(self, error: Exception) -> None:
        """After a step that failed: none that is under way counts."""
        if isinstance(error, TimeoutError):
            self._stuck = str(error)
        self.abandon(f"a step failed: {error}")
        if self.ranks.status is None:  # otherwise the supervisor calls for a restart
            self.moe.comm.group.lifecycle.restart()

    def _forget(self) -> None:
        self._seats.clear()
        self._late.clear()
        if self.device.type == "cuda" and not self._stuck:
            try:
                torch.cuda.synchronize(self.device)
                if not self._windows.lifecycle.keeps_graphs:
                    self.graphs.drop()
                torch.cuda.empty_cache()
            except RuntimeError as error:
                logger.error("the GPU is lost to this process: %s", error)

    @torch.inference_mode()
    def _begin(self, plan: StepPlan, turn: StepAgreement) -> DeviceStep:
        if self._stuck:
            raise RuntimeError(f"the GPU is lost to this process: {self._stuck}")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        self._number += 1
        self.clear(plan.clear)
        self._seats.free(plan.ended)
        for key in plan.ended:
            self._late.pop(key, None)
        self._settle(plan.items)
        seats = [self._seats.take(item) for item in plan.items]
        hosted = self.samples and any(seat.way is HOST for seat in seats)
        if hosted or plan.ended:
            self.matchers.begin(plan)
        bucket = self._bucket(plan, turn)
        if bucket is not None:
            step = self._replay(plan, seats, bucket)
        else:
            step = self._mixed(plan, seats, turn) if plan.items else self._idle(plan, turn)
        if hosted:
            step.allowed = self.matchers.take()
        step.mark.record()
        for n in step.late:
            self._late[plan.items[step.rows[n]].request_no] = step
        return step

    def _settle(self, items: Sequence[PlanItem]) -> None:
        """What an item begins with and the host has yet to sample is sampled now."""
        for item in items if self._late else ():
            if item.token_ids[0] < 0 and item.request_no in self._late:
                self._late[item.request_no].wait()

    def _bucket(self, plan: StepPlan, turn: StepAgreement) -> int | None:
        """Of a decode step; None: it goes kernel by kernel. With other ranks it follows from what
        all know, so that all replay the same graph."""
        if self._has_peers:
            return None if turn.prefill else self.graphs.bucket(max(turn.counts))
        single = all(len(item.token_ids) == 1 and item.score is None for item in plan.items)
        return self.graphs.bucket(len(plan.items)) if single else None

    def _replay(self, plan: StepPlan, seats: list[FutureToken], bucket: int) -> DeviceStep:
        """A decode step: one token of every item."""
        rows, count = self._rows, len(seats)
        assert plan.num_tokens == count, "only single tokens are decoded"
        host, mark = self._up.take(PACKED * rows.size)
        table = host.view(PACKED, rows.size).numpy()
        table[IDS, :count] = [item.token_ids[0] for item in plan.items]
        table[POSITIONS, :count] = [item.first for item in plan.items]
        table[SEAT, :count] = [seat.number for seat in seats]
        table[IDS : SEAT + 1, count:bucket] = [[0], [0], [self._seats.nobody.number]]
        table[COUNT, 0], table[OWN, 0] = count, self.parallel.own_tokens(count, bucket)
        rows.packed.copy_(host.view(PACKED, rows.size), non_blocking=True)
        mark.record()
        spans = [
            SequenceSpan(n, 1, item.first + 1, item.pages) for n, item in enumerate(plan.items)
        ]
        self._attention[bucket].fill(spans)
        self.graphs.run(bucket)
        sampling = self._sampling(plan)
        logits_BV, found_2B = self._logits_BV[:count], self._found_2B[:, :count]
        if len(sampling) < count:
            index = self._index(sampling)
            logits_BV, found_2B = logits_BV[index], found_2B[:, index]
        return self._sampled(plan, sampling, seats, logits_BV, found_2B)

    def _decode(self, size: int) -> None:
        """What a graph holds, from static buffers to static buffers. All rows are sampled greedily:
        that is cheaper than to know which want to be."""
        packed = self._rows.packed[:, :size]
        hidden_BH = self.model(
            self._tokens(packed[IDS], packed[SEAT]),
            packed[POSITIONS],
            self._attention[size].attention,
            Step(
                prefill=False,
                rows=size,
                num_tokens_1=self._rows.count_1,
                own_tokens_1=self._rows.own_1,
            ),
        )
        logits_BV = self.model.logits(hidden_BH)
        if not self.samples:
            return
        self._logits_BV[:size].copy_(logits_BV)
        found_2B = self._greedy(logits_BV)
        self._found_2B[:, :size].copy_(found_2B)
        self._last_S.index_copy_(0, packed[SEAT], found_2B[0])

    def _idle(self, plan: StepPlan, turn: StepAgreement) -> DeviceStep:
        """A step in which only other ranks have tokens: its one row is padding, as kernels cannot
        be launched for none."""
        buffers = self._attention[1]
        buffers.fill([])
        nothing_1 = torch.zeros(1, dtype=torch.int64, device=self.device)
        none_1 = nothing_1.int()
        step = replace(self._step(turn), num_tokens_1=none_1, own_tokens_1=none_1)
        self.model(nothing_1, nothing_1, buffers.attention, step)
        return self._sampled(plan, [], [], self._logits_BV[:0], self._found_2B[:, :0])

    def _step(self, turn: StepAgreement) -> Step:
        counts = turn.counts if self.ranks.mesh.dp > 1 else ()
        return Step(prefill=turn.prefill, counts=counts, rows=max(turn.counts))

    def _sampling(self, plan: StepPlan) -> list[int]:
        """The items that get a token here."""
        items = plan.items if self.samples else []
        return [n for n, item in enumerate(items) if item.sample is not None]

    def _mixed(self, plan: StepPlan, seats: list[FutureToken], turn: StepAgreement) -> DeviceStep:
        """Any other step, kernel by kernel."""
        items, spans = plan.items, spans_of(plan)
        wanted = [n for n, item in enumerate(items) if item.sample is not None]
        lengths, total = [span.length for span in spans], plan.num_tokens
        behind = [span.start - item.first for span, item in zip(spans, items, strict=True)]
        ids_T, positions_T, seats_T, last_R, target_R = self._upload(
            np.fromiter(chain.from_iterable(item.token_ids for item in items), np.int64, total),
            np.arange(total) - np.repeat(behind, lengths),
            np.repeat([seat.number for seat in seats], lengths),
            [spans[n].start + spans[n].length - 1 for n in wanted],
            [seats[n].number for n in wanted],
        )
        tokens_T = self._tokens(ids_T, seats_T)
        hidden_TH = self.model(tokens_T, positions_T, self.attention(spans), self._step(turn))
        logits_RV, found_2R = self._logits_BV[:0], self._found_2B[:, :0]
        if wanted:
            logits_RV = self.model.logits(hidden_TH[last_R])
        if wanted and self.samples:
            found_2R = self._greedy(logits_RV)
            self._last_S.index_copy_(0, target_R, found_2R[0])
        return self._sampled(plan, self._sampling(plan), seats, logits_RV, found_2R, hidden_TH)

    def _tokens(self, ids_T: Tensor, seats_T: Tensor) -> Tensor:
        return torch.where(ids_T < 0, self._last_S[seats_T], ids_T)

    def _sampled(
        self,
        plan: StepPlan,
        sampling: list[int],
        seats: list[FutureToken],
        logits_RV: Tensor,
        found_2R: Tensor,
        hidden_TH: Tensor | None = None,
    ) -> DeviceStep:
        """Draws for the rows that are not greedy, leaves others to the host, and sends for what was
        found. `found_2R`: greedy tokens."""
        late = [n for n, item in enumerate(sampling) if seats[item].way is HOST]
        drawn = [n for n, item in enumerate(sampling) if seats[item].way is DRAW]
        if drawn:
            rows = [plan.items[sampling[n]].sample for n in drawn]
            numbers = [seats[sampling[n]].number for n in drawn]
            asked = [row for row in rows if row is not None]
            found_2R = self._draw(drawn, asked, numbers, logits_RV, found_2R)
        host, mark = self._down.take(2 * len(sampling))
        found = host.view(2, len(sampling)).copy_(found_2R, non_blocking=True)
        scores = any(item.score is not None for item in plan.items)
        return DeviceStep(
            runner=self,
            plan=plan,
            number=self._number,
            rows=sampling,
            found=found,
            mark=mark,
            late=late,
            # The next step overwrites what a graph gave.
            logits_LV=logits_RV[self._index(late)] if late else None,
            seats_L=[seats[sampling[n]].number for n in late],
            hidden_TH=hidden_TH if scores else None,
        )

    def _draw(
        self,
        drawn: list[int],
        asked: list[SampleRow],
        numbers: list[int],
        logits_RV: Tensor,
        found_2R: Tensor,
    ) -> Tensor:
        """`drawn`: the rows that draw, what they ask for, and the numbers of their seats."""
        rows, seats = self._upload(drawn, numbers)
        some_RV = logits_RV if len(drawn) == len(logits_RV) else logits_RV[rows]
        drawn_2R = self._draw_rows(some_RV, asked)
        self._last_S.index_copy_(0, seats, drawn_2R[0])
        return found_2R.index_copy(1, rows, drawn_2R)

    @torch.inference_mode()
    def _finish(self, step: DeviceStep) -> StepResult:
        plan = step.plan
        what = f"step {step.number} of {plan.num_tokens} tokens"
        step.mark.wait(self._timeout, what)
        self._windows.check()
        results = [ItemResult() for _ in plan.items]
        tokens, broken = step.found.tolist()
        for item, token in zip(step.rows, tokens, strict=True):
            results[item].token_ids = [token]
        if any(broken):
            for item, bad in zip(step.rows, broken, strict=True):
                if bad:
                    results[item] = ItemResult(broken=NOT_FINITE)
        for n in step.late:
            results[step.rows[n]] = ItemResult()
        if step.logits_LV is not None:
            self._sample_late(step, step.logits_LV, results)
        if step.hidden_TH is not None:
            self._score(plan, step.hidden_TH, results)
        return StepResult(results)

    def _sample_late(self, step: DeviceStep, logits_LV: Tensor, results: list[ItemResult]) -> None:
        items = [step.rows[n] for n in step.late]
        sample_items(step.plan, items, logits_LV, results, step.allowed())
        known: dict[int, int] = {}
        for item, seat in zip(items, step.seats_L, strict=True):
            key, found = step.plan.items[item].request_no, results[item].token_ids
            if self._late.get(key) is step:  # else the seat may be another's
                del self._late[key]
                if found:
                    known[seat] = found[-1]
        if known:
            seats, tokens = self._upload(list(known), list(known.values()))
            self._last_S.index_copy_(0, seats, tokens)

    def _score(self, plan: StepPlan, hidden_TH: Tensor, results: list[ItemResult]) -> None:
        """Logprobs of prompt tokens: many rows, in pieces."""
        queue = ScoreQueue(plan, results)
        sampling = sum(1 for item in plan.items if item.sample is not None)
        rows = list(plan.logit_rows())[sampling:]
        for begin in range(0, len(rows), LOGIT_ROWS):
            index = self._index(rows[begin : begin + LOGIT_ROWS])
            queue.take(self.model.logits(hidden_TH[index]))

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return self._upload(numbers)[0]

    def _upload(self, *columns: Sequence[int] | npt.NDArray[np.int64]) -> list[Tensor]:
        """In one copy."""
        sizes = [len(column) for column in columns]
        host, mark = self._up.take(sum(sizes))
        table, start = host.numpy(), 0
        for column, size in zip(columns, sizes, strict=True):
            table[start : start + size] = column
            start += size
        # A copy of its own also on CPU: the buffer is used again.
        packed = torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)
        mark.record()
        return list(packed.split(sizes))

    def device_holdings(self) -> dict[str, Any]:
        return {
            "device": describe_gpu(self.device.index) if self.device.type == "cuda" else {},
            "graph_sizes": list(self.graphs.sizes),
            "graph_bytes": self.graphs.nbytes,
            "step_bytes": self.step_bytes.total,
        }
