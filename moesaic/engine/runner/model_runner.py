"""Runs the model on what the scheduler chose.

T tokens of the step · B requests that sample · V vocabulary · H hidden.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moesaic.comm.supervise.control_page import RankStatus
from moesaic.config import ServerArgs
from moesaic.core.process import keep_freed_memory
from moesaic.core.rank_state import RankState
from moesaic.core.step import Step
from moesaic.engine.runner.matchers import Allowed, Matchers
from moesaic.engine.sampling.sampler import NonFiniteLogits, sample, token_logprobs
from moesaic.engine.schedule.plan import (
    FinishedStep,
    ItemResult,
    StepAgreement,
    StepHandle,
    StepPlan,
    StepResult,
)
from moesaic.engine.setup.dense_setup import dense_weights
from moesaic.engine.setup.device_memory import (
    GIB,
    DeviceRoom,
    StepBytes,
    cache_dtype,
    check_weights_fit,
    compute_device,
    cpu_cache_tokens,
    gpu_cache_tokens,
    gpu_sharers,
    smaller_weights,
    total_memory,
)
from moesaic.engine.setup.memory_plan import (
    chunk_tokens,
    context_length,
    max_running,
    shape_only_model,
    shape_only_part,
    step_limits,
)
from moesaic.engine.setup.moe_setup import kind_of, moe_context, report_buffers, weight_format
from moesaic.engine.text.grammar import Compiler
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.engine.worker.rank_context import RankContext
from moesaic.layers.context import AttentionStep
from moesaic.layers.deterministic_attention import DeterministicAttention
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.config import DTYPES, BuildContext, RawConfig, checkpoint_dtype
from moesaic.models.folder import ModelEosTokens, checked
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.models.weights import fill_randomly, load_weights, sync_input_scales
from moesaic.moe.layer import FusedMoE
from moesaic.observe.spans import SpanKind, Spans

logger = logging.getLogger(__name__)

# Logits are made for this many rows at a time: a vocabulary is wide.
LOGIT_ROWS = 128
NOT_FINITE = "the model gave numbers that are not finite for this request"
NONE_LEFT = "no token is left that its grammar, logit_bias and other parameters allow"


class ModelRunner:
    """The weights and the cache of one rank, and what it computes with them."""

    overlaps = False
    """Whether `begin` comes back before a step is computed, and plans may have FUTURE tokens."""

    def __init__(self, args: ServerArgs, ranks: RankContext | None = None) -> None:
        keep_freed_memory()
        self.ranks = ranks = ranks or RankContext()
        number = ranks.place.rank
        self.device, self.kind = compute_device(args, number), kind_of(args)
        self.sharers = gpu_sharers(args, number) if self.device.type == "cuda" else 1
        if self.kind == "cuda":
            # The same on all ranks, also on one that has a GPU to itself.
            shares = self.device.type == "cuda" and gpu_sharers(args) > 1
            self.ranks = ranks = ranks.computing_on(self.device, shares)
        folder = Path(args.model_path)
        raw = RawConfig.read(folder)
        self.max_running = max_running(args, ranks.mesh)
        self.dtype = checkpoint_dtype(raw) if args.dtype == "auto" else DTYPES[args.dtype]
        self.deterministic = args.enable_deterministic_inference
        self.context_length = context_length(args, raw)
        self.chunk_tokens = chunk_tokens(args, ranks.mesh, self.context_length)
        self.limits = step_limits(args, ranks.mesh, self.context_length)
        started = time.monotonic()
        scheme = detect_scheme(raw, folder)
        weights = weight_format(args.quantization, scheme.method, scheme.expert_format)
        whole = shape_only_model(raw, self.dtype, weights)
        self.moe = moe_context(args, self.dtype, weights, self.limits, whole, ranks)
        self.parallel = ranks.parallel(raw.integer("num_hidden_layers"), self.deterministic)
        dense = dense_weights(scheme, folder, self.moe)
        part = shape_only_part(raw, self.moe, self.parallel, dense)
        weight_bytes = part.nbytes + report_buffers(self.moe, part)
        tables = part.rope.nbytes * self.context_length  # an outline has one position
        self._check_weights_fit(folder, weight_bytes + tables)
        with self.device:
            context = BuildContext(self.context_length, self.moe, self.parallel, dense)
            self.model = build_model(raw, context)
        self.eos_ids = _eos_ids(raw)
        self.vocab_size = self.model.config.vocab_size
        if args.load_format == "dummy":
            fill_randomly(self.model, args.random_seed or 0)
        else:
            load_weights(self.model, folder, scheme)
            sync_input_scales(self.model, folder)
        self._make_cache(args, weight_bytes)
        self.samples = ranks.is_last and ranks.place.attention_rank == 0
        self.matchers = Matchers(partial(self._compiler, args), 2 * self.max_running)
        if ranks.status is not None:
            self._announce_layers(ranks.status)
        logger.info(
            "loaded %s in %.1f s: %.2f GiB of weights in %s, KV cache of %d tokens (%.2f GiB: %s), "
            "context of %d tokens, at most %d requests at once",
            folder,
            time.monotonic() - started,
            weight_bytes / GIB,
            str(self.dtype).removeprefix("torch."),
            self.num_pages * args.page_size,
            self.cache.num_bytes / GIB,
            self._why_cache(args),
            self.context_length,
            self.max_running,
        )

    @property
    def spans(self) -> Spans:
        """Where it is recorded what was done when."""
        return self.moe.comm.spans

    @property
    def moe_layers(self) -> list[FusedMoE]:
        return [module for module in self.model.modules() if isinstance(module, FusedMoE)]

    @property
    def num_experts(self) -> int:
        """Logical ones of a layer; 0 in a stage without any."""
        return next((layer.config.num_experts for layer in self.moe_layers), 0)

    def _make_cache(self, args: ServerArgs, weight_bytes: int) -> None:
        """As many pages as the rank of the replica with the least room for them has."""
        ranks, dtype = self.ranks, cache_dtype(args, self.dtype)
        ranks.least(0, "load the weights")  # what is free is known once all have loaded
        wanted, spec = self.max_running * self.context_length, self.model.cache
        self.step_bytes = StepBytes.of(self.model, self.limits, self.context_length)
        if self.device.type == "cuda":
            room = self._room()
            logger.info("memory: %s", room)
            tokens = gpu_cache_tokens(args, spec, dtype.itemsize, wanted, room, self.step_bytes)
        else:
            sharers = ranks.mesh.ranks_per_node
            tokens = cpu_cache_tokens(args, spec, dtype.itemsize, weight_bytes, wanted, sharers)
        self.num_pages = ranks.least(tokens // args.page_size, "size the KV cache")
        self.cache = PagedCache(spec, self.num_pages, args.page_size, dtype, self.device)

    def _room(self) -> DeviceRoom:
        """This rank's part of its GPU, now that it has loaded."""
        return DeviceRoom.of(self.device).part(self.sharers)

    def _check_weights_fit(self, folder: Path, weight_bytes: int) -> None:
        """On CPU memory is only taken when weights are written: without this the kernel kills the
        process."""
        if self.device.type == "cuda":
            room = DeviceRoom.of(self.device).part(self.sharers)
            self.ranks.least(0, "look at what is free")  # before any of them takes some of it
            check_weights_fit(str(folder), weight_bytes, room, smaller_weights(self.moe))
            return
        ranks = self.ranks.mesh.ranks_per_node
        if weight_bytes * ranks > total_memory():
            each = f" in {ranks} ranks" if ranks > 1 else ""
            raise ValueError(
                f"the weights of {folder} take {weight_bytes * ranks / GIB:.1f} GiB{each} and this "
                f"machine has {total_memory() / GIB:.1f} GiB: use "
                f"{smaller_weights(self.moe)}"
            )

    def _why_cache(self, args: ServerArgs) -> str:
        if args.max_total_tokens is not None:
            return "as --max-total-tokens says"
        if self.num_pages * args.page_size >= self.max_running * self.context_length:
            return "as much as all requests can use"
        return "what memory allows"

    def _compiler(self, args: ServerArgs) -> Compiler:
        """Only made when a grammar is asked for."""
        assert args.tokenizer_path is not None, "checked before a request is submitted"
        tokenizer = Tokenizer.from_folder(args.tokenizer_path)
        return Compiler(tokenizer, self.vocab_size, tokenizer.eos_ids or self.eos_ids)

    def _announce_layers(self, status: RankStatus) -> None:
        """A rank that computes shows how far it is: a long step is not a hang."""
        assert self.parallel.layers is not None
        for number, layer in zip(self.parallel.layers, self.model.model.layers, strict=True):
            begin = partial(status.enter, RankState.COMPUTING, f"layer {number}")
            layer.register_forward_pre_hook(lambda *_, begin=begin: begin())

    def step(self, plan: StepPlan) -> StepResult:
        """A whole step, on one rank."""
        return self.begin(plan).wait()

    @torch.inference_mode()
    def begin(
        self, plan: StepPlan, agreement: StepAgreement | None = None, x_TH: Tensor | None = None
    ) -> StepHandle:
        """Starts a step; steps run in the order in which they begin. `agreement`: what all ranks
        know of the step, where there are several. `x_TH`: hidden states of the pipeline stage
        before."""
        agreement = agreement or StepAgreement(0, (plan.num_tokens,), prefill=plan.prefill)
        try:
            hidden_TH = self.forward(plan, agreement, x_TH)
            if not self.ranks.is_last:
                return FinishedStep(StepResult([]), hidden_TH)
            return FinishedStep(self.results(plan, agreement, hidden_TH))
        except Exception:
            if self.ranks.status is None:  # otherwise the supervisor orders a restart
                self.moe.comm.group.lifecycle.restart()
            raise

    def abandon(self, reason: str) -> None:
        """Ends what is under way on a device, also where it waits for other ranks. A rank does so
        before it tells that it is ready to begin again."""
        logger.debug("nothing is under way: %s", reason)

    def forward(self, plan: StepPlan, turn: StepAgreement, x_TH: Tensor | None) -> Tensor:
        """This stage's layers over the plan's tokens."""
        if self.samples:
            self.matchers.begin(plan)
        self.clear(plan.clear)
        ids = [token for item in plan.items for token in item.token_ids]
        positions = [at for item in plan.items for at in range(item.first, item.stop)]
        counts = turn.counts if self.ranks.mesh.dp > 1 else ()
        hidden_TH: Tensor = self.model(
            torch.tensor(ids, dtype=torch.int64, device=self.device),
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            self.attention(spans_of(plan)),
            Step(prefill=turn.prefill, counts=counts),
            x_TH,
        )
        return hidden_TH

    def clear(self, pages: Sequence[int]) -> None:
        """Kernels of a GPU never look at what was not written."""
        if pages and self.kind == "cpu":
            self.cache.clear(pages)

    def device_holdings(self) -> dict[str, Any]:
        """What this rank has of a GPU, beside weights and KV cache."""
        return {}

    def attention(self, spans: Sequence[SequenceSpan]) -> AttentionStep:
        if self.kind == "cuda":
            make = gpu_attention().GpuAttention.from_spans
            step: AttentionStep = make(self.cache, spans, self.deterministic)
            return step
        attend = DeterministicAttention if self.deterministic else TorchAttention
        return attend(self.cache, spans)

    def results(self, plan: StepPlan, turn: StepAgreement, hidden_TH: Tensor) -> StepResult:
        """Samples and scores; on the first rank of an attention group, others only help.

        All groups go through as many pieces of rows as the one with most."""
        rows = list(plan.logit_rows())
        results = [ItemResult() for _ in plan.items]
        sampling = [n for n, item in enumerate(plan.items) if item.sample is not None]
        scoring = ScoreQueue(plan, results)
        counts = turn.logits or (len(rows),)
        for begin in range(0, max(counts), LOGIT_ROWS):
            piece = rows[begin : begin + LOGIT_ROWS]
            wanted = [min(max(0, count - begin), LOGIT_ROWS) for count in counts]
            started = self.spans.clock()
            index = torch.tensor(piece, dtype=torch.int64, device=self.device)
            logits_RV = self.model.logits(hidden_TH[index], wanted)
            self.spans.add(SpanKind.LOGITS, started, tokens=len(piece))
            if self.ranks.place.attention_rank > 0 or not piece:
                continue
            started = self.spans.clock()
            here = sampling[begin : begin + LOGIT_ROWS]
            sample_items(plan, here, logits_RV[: len(here)], results, self.matchers.wait())
            scoring.take(logits_RV[len(here) :])
            self.spans.add(SpanKind.SAMPLE, started, tokens=len(here))
        return StepResult(results)


def gpu_attention() -> Any:
    """Needs Triton, which is only imported where there is a GPU."""
    return import_module("moesaic.layers.gpu_attention")


def spans_of(plan: StepPlan) -> list[SequenceSpan]:
    return [
        SequenceSpan(start, len(item.token_ids), item.stop, item.pages)
        for item, start in zip(plan.items, plan.starts(), strict=True)
    ]


class ScoreQueue:
    """Hands rows of logits to the prompt tokens that wait for them, in the plan's order."""

    def __init__(self, plan: StepPlan, results: list[ItemResult]) -> None:
        self._waiting = deque(
            (result, target, item.score.top)
            for item, result in zip(plan.items, results, strict=True)
            if item.score is not None
            for target in item.score.targets
        )

    def take(self, logits_RV: Tensor) -> None:
        rows = [self._waiting.popleft() for _ in range(len(logits_RV))]
        for start, stop in _runs([(id(result), top) for result, _, top in rows]):
            result, _, top = rows[start]
            targets = [target for _, target, _ in rows[start:stop]]
            logprobs, tops = token_logprobs(logits_RV[start:stop], targets, top)
            if not all(map(math.isfinite, logprobs)):
                result.broken = NOT_FINITE
            result.input_logprobs += logprobs
            result.input_top_logprobs += tops


def _runs(keys: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of equal keys."""
    start = 0
    for stop in range(1, len(keys) + 1):
        if stop == len(keys) or keys[stop] != keys[start]:
            yield start, stop
            start = stop


def sample_items(
    plan: StepPlan,
    items: Sequence[int],
    logits_RV: Tensor,
    results: list[ItemResult],
    allowed: Mapping[int, Allowed],
) -> None:
    """`allowed`: of items with a grammar."""
    for item in items:
        if (found := allowed.get(item)) is not None:
            results[item].broken, results[item].ended = found.broken, found.ended
    _draw(plan, items, logits_RV, results, {n: found.mask for n, found in allowed.items()})


def _draw(
    plan: StepPlan,
    items: Sequence[int],
    logits_RV: Tensor,
    results: list[ItemResult],
    masks: Mapping[int, Tensor | None],
) -> None:
    open_rows = [
        row for row, item in enumerate(items) if not (results[item].broken or results[item].ended)
    ]
    if len(open_rows) < len(items):
        items, logits_RV = [items[row] for row in open_rows], logits_RV[open_rows]
    if not items:
        return
    asked = [plan.items[item].sample for item in items]
    rows = [one for one in asked if one is not None]
    try:
        sampled = sample(logits_RV, rows, [masks.get(item) for item in items] if masks else ())
    except NonFiniteLogits as error:
        for row in error.rows:
            masked = items[row] in masks and _is_finite(logits_RV[row])
            results[items[row]].broken = NONE_LEFT if masked else NOT_FINITE
        _draw(plan, items, logits_RV, results, masks)
        return
    for row, item in enumerate(items):
        result, logprob = results[item], sampled.logprobs[row]
        result.token_ids = [sampled.token_ids[row]]
        if logprob is not None:
            result.logprobs, result.top_logprobs = [logprob], [sampled.top_logprobs[row] or []]


def _is_finite(logits_V: Tensor) -> bool:
    return math.isfinite(logits_V.max().item())


def _eos_ids(raw: RawConfig) -> frozenset[int]:
    """For engines without a tokenizer, which knows better."""
    return checked(raw.data, ModelEosTokens, raw.source).all_ids
