"""Runs the plans of the scheduler on this rank's part of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from moesaic.comm.supervise.control_page import RankStatus
from moesaic.config import ServerArgs
from moesaic.config.speculation import speculation_of
from moesaic.core.overlap import EXPLAINED, Overlap, schedules_of
from moesaic.core.process import keep_freed_memory
from moesaic.core.rank_state import RankState
from moesaic.core.step import Step
from moesaic.disagg.send_buffer import SendBuffer
from moesaic.engine.elastic.rank_weights import RankWeights
from moesaic.engine.rebalance.rebalancer import Rebalancer
from moesaic.engine.runner.attention import BACKENDS
from moesaic.engine.runner.expert_recorder import ExpertRecorder
from moesaic.engine.runner.load_log import log_gpu_memory, log_loaded
from moesaic.engine.runner.loading import rank_memory
from moesaic.engine.runner.matchers import Matchers
from moesaic.engine.runner.overlap_calibration import calibrate
from moesaic.engine.runner.peer_watchdog import PeerWatchdog
from moesaic.engine.runner.recorded_tokens import StepTokens
from moesaic.engine.runner.split_step import SplitStep, dummy_agreement
from moesaic.engine.runner.step_transfers import DRAFT, Outgoing, StepTransfers
from moesaic.engine.runner.steps import COMPILE_SECONDS, AsynchronousSteps
from moesaic.engine.runner.synchronous_steps import SynchronousSteps
from moesaic.engine.runner.warm_up import sorted_parts, warm_steps, warm_up
from moesaic.engine.runner.weight_source import WeightSource
from moesaic.engine.schedule.plan import StepAgreement, StepHandle, StepPlan
from moesaic.engine.schedule.step_budget import CHUNK_MULTIPLE
from moesaic.engine.setup.device_memory import (
    DeviceRoom,
    compute_device,
    gpu_sharers,
    release_unused,
)
from moesaic.engine.setup.graph_sizes import GraphSizes
from moesaic.engine.setup.memory_plan import RankShare, ResolvedModel, check_rank, loaded_tokens
from moesaic.engine.setup.moe_setup import kind_of, report_buffers
from moesaic.engine.setup.rank_context import RankContext
from moesaic.engine.speculate.draft_setup import load_draft, verifies_trees
from moesaic.engine.text.grammar import Compiler, is_installed
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.kernels.attention import tokens_at_once
from moesaic.layers.attention import Attention, LatentAttention
from moesaic.layers.paged_cache import PagedCache, PageTable, PageUpdate, Sequences
from moesaic.models.blocks import DecoderLayer, SparseBlock
from moesaic.models.config import BuildContext
from moesaic.models.halves import forward_halves
from moesaic.models.registry import build_model
from moesaic.models.weights import sync_input_scales
from moesaic.moe.layer import FusedMoE
from moesaic.overlap.cost import ChosenOverlap, OverlapChoice
from moesaic.overlap.policy import policy_of

logger = logging.getLogger(__name__)


class ModelRunner:
    """This rank's weights, KV cache and steps. `kind` is whose code runs (cpu or cuda), `device`
    where its tensors reside. Steps are asynchronous by default where the kind is cuda."""

    def __init__(
        self,
        args: ServerArgs,
        ranks: RankContext | None = None,
        asynchronous: bool | None = None,
    ) -> None:
        keep_freed_memory()
        ranks = ranks or RankContext()
        self.device, self.kind = compute_device(args, ranks.place.rank), kind_of(args)
        if self.kind == "cuda":
            # All ranks must decide alike, also one that has a GPU to itself.
            shares_gpu = self.device.type == "cuda" and gpu_sharers(args) > 1
            ranks = ranks.computing_on(self.device, shares_gpu)
        self.ranks = ranks
        started = time.monotonic()
        resolved = ResolvedModel.of(args, ranks)
        self.moe, self.limits, self.scheme = resolved.moe, resolved.limits, resolved.scheme
        self._note_sizes(resolved)
        self.spans = self.moe.comm.spans
        """The recorder of what was computed when."""
        self._memory = rank_memory(args, self.device, ranks)
        self.samples = ranks.is_last and ranks.place.attention_rank == 0
        self.matchers = Matchers(partial(self._compiler, args), 2 * self.max_running)
        if self.samples and _serves_grammars(args):
            self.matchers.begin_compiler()
        share = self._load_model(args, resolved)
        self.schedules = self._schedules(args)
        """Those that a step may have."""
        self.overlap_policy = policy_of(args.overlap, self.schedules)
        self._make_draft(args, resolved)
        self._check_placements()
        self.rebalancer = self._make_rebalancer(args, resolved)
        self.send_buffer = (
            SendBuffer(share.outlet_bytes, self.device) if share.outlet_bytes else None
        )
        """Where KV caches wait for other instances."""
        self.watchdog = PeerWatchdog.of(self.moe, ranks)
        # Before the KV cache takes the memory that is left.
        self.recorder = ExpertRecorder.of(args, self)
        self.draft_recorder = ExpertRecorder.of_draft(args, self)
        self.balance_recorder = ExpertRecorder.for_report(args, self)
        asynchronous = self.kind == "cuda" if asynchronous is None else asynchronous
        sizes = GraphSizes.of(args, self.limits) if asynchronous else GraphSizes()
        steps = self._warm_steps(sizes)
        if self.device.type == "cuda":
            self._warm_up_device(args, steps)
        self._make_cache(args, resolved, share)
        if ranks.status is not None:
            self._announce_layers(ranks.status)
        log_loaded(self, args, share.weight_bytes, time.monotonic() - started)
        self.steps: AsynchronousSteps | SynchronousSteps
        self._make_steps(args, sizes, steps if asynchronous else None)
        self.transfers = StepTransfers()
        """KV caches from and to other instances."""
        self.overlap_choices: list[OverlapChoice] = []
        """What --overlap auto has found at start."""
        self._choose_overlap(args)
        self.overlaps = self.steps.overlaps and not args.disable_overlap_schedule
        """Whether `begin` returns before a step is computed: plans may then have future tokens."""
        self._wait_for_helpers()

    def _note_sizes(self, resolved: ResolvedModel) -> None:
        self.context_length, self.max_running = resolved.context_length, self.limits.running
        self.eos_ids, self.vocab_size = resolved.eos_ids, resolved.raw.integer("vocab_size")
        self.num_layers, self.top_k = resolved.num_layers, resolved.top_k
        self.num_experts = resolved.num_experts
        self._cache_dtype = resolved.cache_dtype

    def _make_draft(self, args: ServerArgs, resolved: ResolvedModel) -> None:
        speculation = speculation_of(args)
        self.accept_thresholds = None if speculation is None else speculation.thresholds
        """When a step accepts a draft; None: a draft must equal the token that is sampled."""
        self.verifies_trees = verifies_trees(self, speculation)
        """Whether drafts may be trees."""
        self.draft = load_draft(self, args, resolved, speculation)
        """Makes drafts at the end of each step, if a model on the ranks does."""

    def _make_steps(
        self, args: ServerArgs, sizes: GraphSizes, steps: Sequence[tuple[int, bool]] | None
    ) -> None:
        """`steps`: those of a device that are warmed up, once graphs are captured; None: steps are
        synchronous."""
        if steps is None:
            self.steps = SynchronousSteps(self, args.watchdog_timeout)
            return
        self.steps = made = AsynchronousSteps(self, args, sizes)
        made.prepare(() if args.skip_server_warmup else steps, self.overlap_policy)
        if self.draft is not None:
            with self.watchdog.starting(COMPILE_SECONDS):
                self.draft.use_graphs(sizes)
        if self.rebalancer is not None:
            self.rebalancer.warm_up()
        self.reset_statistics()
        log_gpu_memory(self, made)

    def _schedules(self, args: ServerArgs) -> tuple[Overlap, ...]:
        blocks = (module for module in self.model.modules() if isinstance(module, SparseBlock))
        has_shared = any(block.shared_experts is not None for block in blocks)
        found = schedules_of(args.overlap, has_shared)
        if args.overlap == "sbo" and not has_shared:
            logger.info("overlap: off: the model has no shared experts to compute meanwhile")
        elif (why := EXPLAINED.get(args.overlap or "")) is not None:
            logger.info("overlap: %s: %s", args.overlap, why)
        return found

    def _choose_overlap(self, args: ServerArgs) -> None:
        """With --overlap auto. Only graphs of schedules that were chosen are captured for good."""
        if args.overlap != "auto" or Overlap.TBO not in self.schedules:
            return
        self.overlap_choices = calibrate(self, args)
        if any(choice.chosen for choice in self.overlap_choices):
            self.overlap_policy = ChosenOverlap(self.overlap_choices)
        if isinstance(self.steps, AsynchronousSteps):
            self.steps.capture(self.overlap_policy)

    def _wait_for_helpers(self) -> None:
        """The compiler of grammars and the planner's process start meanwhile; later they would hold
        up a step."""
        self.matchers.wait_for_compiler()
        if self.rebalancer is not None:
            self.rebalancer.wait_for_planner()

    def _load_model(self, args: ServerArgs, resolved: ResolvedModel) -> RankShare:
        """Returns what was planned for this rank."""
        self.parallel = resolved.parallel(self.ranks)
        part = resolved.shape_only_part(self.parallel)
        report_buffers(self.moe, part)
        share = resolved.share(args, self.ranks, part)
        check_rank(args, resolved, share, self._memory.room(share.collective_bytes))
        with self.device:
            context = BuildContext(self.context_length, self.moe, self.parallel, resolved.dense)
            self.model = build_model(resolved.raw, context)
        source = WeightSource(args, resolved.scheme)
        self.weights = RankWeights(self.model, source, self.ranks.memory, resolved.raw)
        if not source.is_random:
            sync_input_scales(self.model, source.folder)
        return share

    def _check_placements(self) -> None:
        """ValueError unless all ranks of the stage have read the same first placements."""
        slots = [layer.placement.slots for layer in self.moe_layers]
        own = crc32(repr(slots).encode()).to_bytes(4, "little")
        found = self.ranks.stage_peers.all_gather_bytes(own, "compare placements")
        other = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if other:
            raise ValueError(
                f"--init-expert-location: ranks {other} of the stage have read other placements "
                "than rank 0: give all nodes the same file"
            )

    def _make_rebalancer(self, args: ServerArgs, resolved: ResolvedModel) -> Rebalancer | None:
        """Before the KV cache is sized, as it takes memory."""
        layers = self.moving_layers
        if not (args.enable_eplb and layers):
            return None
        # A shared expert among the routed ones belongs to no group.
        groups = 1 if layers[0].config.num_shared else resolved.raw.integer("n_group", 1)
        made = Rebalancer(args, layers, self.ranks, self.device, groups)
        made.start_planner()
        return made

    def _warm_steps(self, sizes: GraphSizes) -> list[tuple[int, bool]]:
        mesh, same = self.ranks.mesh, self.moe.replicated
        top_k = next((layer.config.top_k for layer in self.moe_layers), 1)
        exchange, sharers = mesh.tp > 1 and not same, 1 if same else mesh.attention_tp
        return warm_steps(
            self.limits,
            (*sizes.plain, *sizes.verify),
            exchange,
            sorted_parts(mesh.tp, top_k),
            sharers,
        )

    def _warm_up_device(self, args: ServerArgs, steps: Sequence[tuple[int, bool]]) -> None:
        """Compiles kernels before the KV cache is sized, as they and libraries take memory."""
        if not args.skip_server_warmup:
            # NCCL's kernels wait for other ranks all the same, so all ranks begin together.
            self.ranks.least(0, "load the weights")
            with self.watchdog.compiling_only():
                self.warm_up(args, steps)
        release_unused()  # before a rank on the same GPU measures free memory

    def warm_up(self, args: ServerArgs, steps: Sequence[tuple[int, bool]]) -> None:
        """Runs steps on a KV cache of one page, which all tokens use."""
        longest = max(self.context_length, self.limits.tokens)
        self.use_cache(self._new_cache(args, 1), self._new_table(args, 1, longest))
        self.page_table.write([PageUpdate(0, 0, [1] * self.page_table.max_pages)])
        for part in (self.cache.keys, self.cache.values):
            part.view(torch.uint8).zero_()
        warm_up(self, steps)
        self.reset_statistics()

    def use_cache(self, cache: PagedCache, table: PageTable) -> None:
        self.cache, self.page_table = cache, table
        given = (cache, table, self.moe.deterministic)
        self.attention = BACKENDS[self.kind](*given, trees=self.verifies_trees)
        if self.draft is not None:
            self.draft.use_cache(cache, table)

    def move(self, slots: Sequence[tuple[int, int]]) -> None:
        """Moves entries of the cache, and of a draft model's: from which slot to which."""
        self.cache.move(slots)
        if self.draft is not None:
            self.draft.cache.move(slots)

    def clear(self, pages: Sequence[int]) -> None:
        """Of pages that have a new owner."""
        self.attention.clear(pages)
        if self.draft is not None:
            self.draft.clear(pages)

    def _new_table(self, args: ServerArgs, rows: int, tokens: int) -> PageTable:
        return PageTable(rows, -(-tokens // args.page_size), self.device)

    def _new_cache(self, args: ServerArgs, pages: int) -> PagedCache:
        sizes = (pages, args.page_size, self._cache_dtype)
        return PagedCache(self.model.cache, *sizes, self.device)

    def _make_cache(self, args: ServerArgs, resolved: ResolvedModel, share: RankShare) -> None:
        """Takes as many pages as every rank of the replica has room for beside the page table."""
        table = self._new_table(args, self.max_running, self.context_length)
        self.ranks.least(0, "load the weights")  # free memory is known once all have loaded
        self.step_bytes, windows = share.step, self.watchdog.nbytes
        if self.rebalancer is not None:
            windows += self.rebalancer.window_bytes
        windows += share.outlet_bytes
        room = self._memory.left(windows)
        if isinstance(room, DeviceRoom):
            logger.info("memory: %s", room)
        tokens = loaded_tokens(args, resolved, share, room)
        self.num_pages = self.ranks.least(tokens // args.page_size, "size the KV cache")
        self.use_cache(self._new_cache(args, self.num_pages), table)

    @property
    def sent_caches(self) -> list[PagedCache]:
        """Those that instances send each other: also a draft model's if it is computed from hidden
        states, which are gone behind their step. What it computes from tokens is not sent."""
        caches = [self.cache]
        if self.draft is not None and self.draft.model.reads_target:
            caches.append(self.draft.cache)
        return caches

    def send_drafts(self, outgoing: Outgoing) -> None:
        """Sends a draft model's part of what a step has computed, once it is stored."""
        for cache in self.sent_caches[DRAFT:]:
            self.transfers.send(outgoing, cache, DRAFT)

    def _compiler(self, args: ServerArgs) -> Compiler:
        assert args.tokenizer_path is not None, "checked before a request is submitted"
        tokenizer = Tokenizer.from_folder(args.tokenizer_path)
        return Compiler(
            tokenizer,
            self.vocab_size,
            tokenizer.eos_ids or self.eos_ids,
            args.constrained_json_allow_additional_properties,
        )

    def _announce_layers(self, status: RankStatus) -> None:
        """Shows the supervisor which layer is computed: a long step is not a hang."""
        assert self.parallel.layers is not None
        for number, layer in zip(self.parallel.layers, self.model.model.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            layer.announce = partial(status.enter, RankState.COMPUTING, f"layer {number}")

    @property
    def moe_layers(self) -> list[FusedMoE]:
        return [module for module in self.model.modules() if isinstance(module, FusedMoE)]

    @property
    def draft_layers(self) -> list[FusedMoE]:
        """Those of the model that makes drafts, if it is one on this rank."""
        return [] if self.draft is None else list(self.draft.model.experts)

    @property
    def first_draft_layer(self) -> int:
        """The number of the draft model's first layer: one that reads the target's hidden states
        is behind its last layer, and others begin anew."""
        return self.num_layers if self.draft is not None and self.draft.model.reads_target else 0

    @property
    def moving_layers(self) -> list[FusedMoE]:
        """Those whose experts --enable-eplb moves: also of a draft model, unless ranks are
        elastic."""
        return self.moe_layers + [
            layer for layer in self.draft_layers if layer.context.max_replicas
        ]

    def record_pass(
        self, plan: StepPlan, agreement: StepAgreement, tokens: StepTokens | None
    ) -> None:
        """Keeps the experts of the step that has just been launched, if anything records them.
        `tokens`: its rows, if `records_tokens`."""
        if self.recorder is not None:
            self.recorder.record(plan, agreement, tokens)
        if self.balance_recorder is not None:
            self.balance_recorder.record(plan, agreement)
        if not agreement.draft_steps:
            self.record_drafts(plan, agreement)

    def record_drafts(self, plan: StepPlan, agreement: StepAgreement) -> None:
        """The same of the draft passes behind a step, once they are launched, too. Before the next
        step experts may move, with which their counts begin anew."""
        if self.draft_recorder is not None:
            self.draft_recorder.record(plan, agreement)

    @property
    def records_tokens(self) -> bool:
        """Whether the next step's slots are recorded for each of its tokens."""
        return self.recorder is not None and self.recorder.needs_tokens

    def keeps_slots(self, agreement: StepAgreement) -> bool:
        """The same of this step. Ranks begin to record one after the other: where the leader of a
        group does not yet, a step may be in halves, which keep none. Dumps leave it out."""
        return self.records_tokens and agreement.overlap != Overlap.TBO

    @property
    def prefill_wave(self) -> int:
        """Prompt tokens that the device attends with at once, in whole chunks."""
        heads = (
            m.num_heads for m in self.model.modules() if isinstance(m, Attention | LatentAttention)
        )
        tokens = tokens_at_once(next(heads), self.device)
        return max(CHUNK_MULTIPLE, tokens - tokens % CHUNK_MULTIPLE)

    @property
    def waited_ns(self) -> int:
        """How long the last `begin` waited for the device."""
        return self.steps.waited_ns

    @torch.inference_mode()
    def begin(
        self, plan: StepPlan, agreement: StepAgreement | None = None, x_TH: Tensor | None = None
    ) -> StepHandle:
        """Starts a step; steps run in the order in which they begin. `agreement`: what all ranks
        know of it, if there are several. `x_TH`: hidden states of the previous stage."""
        agreement = agreement or StepAgreement.alone(plan)
        try:
            self.page_table.write(plan.page_updates())
            return self.steps.begin(plan, agreement, x_TH)
        except Exception as error:
            self.recover(error)
            raise

    def recover(self, error: Exception) -> None:
        """Drops all in-flight steps after one has failed."""
        if isinstance(error, TimeoutError):
            self.steps.stuck = str(error)
        self.abandon(f"a step failed: {error}")
        if self.ranks.status is None:  # else the supervisor orders a restart
            self.moe.comm.group.lifecycle.restart()
        self.watchdog.raise_cause(error)

    def abandon(self, reason: str) -> None:
        """Ends in-flight steps on a device, also waits for other ranks, before a restart."""
        # First, as the device may wait for another rank.
        self.watchdog.lifecycle.abort(reason)
        self.steps.drop()
        if self.draft is not None and not self.watchdog.lifecycle.keeps_graphs:
            self.draft.drop()
        for recorder in (self.recorder, self.draft_recorder, self.balance_recorder):
            if recorder is not None:
                recorder.restart()

    def group_counts(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens of each attention group, if there are several."""
        return counts if self.ranks.mesh.dp > 1 else ()

    def hidden_buffer(self, rows: int, size: int | None = None) -> Tensor:
        """`size`: of a row, unset: the hidden size."""
        shape = (rows, size or self.model.config.hidden_size)
        return torch.zeros(shape, dtype=self.model.config.dtype, device=self.device)

    def dummy_logits(
        self, sequences: Sequences, prefill: bool, overlap: Overlap = Overlap.OFF
    ) -> Tensor:
        """Runs a step of arbitrary tokens; no rows before the last stage."""
        tokens = int(sequences.lengths_B.sum())
        number_T, groups = torch.arange(tokens, device=self.device), self.ranks.mesh.dp
        agreement = dummy_agreement(tokens, groups, prefill, overlap)
        step = Step(prefill, counts=self.group_counts(agreement.counts), rows=tokens)
        ids_T, positions_T = number_T % self.vocab_size, number_T % self.context_length
        x_TH = None if self.ranks.is_first else self.hidden_buffer(tokens)
        if (split := SplitStep.of(self, agreement, step)) is not None:
            halves = split.launched(self, sequences, None)
            hidden_TH = forward_halves(self.model, ids_T, positions_T, halves, x_TH)
        else:
            attention = self.attention.attend(sequences)
            hidden_TH = self.model(ids_T, positions_T, attention, step, x_TH)
        if not self.ranks.is_last:
            return hidden_TH[:0]
        if self.draft is not None:
            self.draft.warm_up(hidden_TH, sequences, step)
        return self.model.logits(hidden_TH[: self.limits.decode_tokens])

    @property
    def placement_version(self) -> int:
        """How often the placement of a layer has changed; ranks of a stage agree."""
        return sum(layer.load.placement_version for layer in self.moving_layers)

    def reset_statistics(self) -> None:
        """Steps of the warm-up do not count."""
        for layer in self.moe_layers + self.draft_layers:
            layer.load.clear()
        for traffic in self.moe.comm.traffic.values():
            traffic.clear()


def _serves_grammars(args: ServerArgs) -> bool:
    has_tokenizer = args.tokenizer_path is not None
    return has_tokenizer and args.grammar_backend != "none" and is_installed()
