"""Runs the model on what the scheduler chose.

T tokens of the step · B requests that sample · V vocabulary · H hidden.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moesaic.config import ServerArgs
from moesaic.core.process import keep_freed_memory
from moesaic.core.request import Request, TopLogprobs
from moesaic.core.step import DECODE, PREFILL
from moesaic.engine.memory import GIB, cache_tokens, total_memory
from moesaic.engine.moe_setup import (
    StepLimits,
    moe_context,
    report_buffers,
    weight_format,
)
from moesaic.engine.sampler import NonFiniteLogits, SampleRow, sample, token_logprobs
from moesaic.engine.scheduler import Scheduled
from moesaic.layers.torch_attention import PagedCache, Span, TorchAttention
from moesaic.models.blocks import CausalLM
from moesaic.models.config import DTYPES, BuildContext, RawConfig, checkpoint_dtype
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.models.weights import fill_randomly, load_weights, settle_input_scales
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.weights import WeightFormat

logger = logging.getLogger(__name__)

DEFAULT_MAX_RUNNING = 64
# Logits for prompt logprobs are made for this many rows at a time: a vocabulary is wide.
LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True)
class Token:
    """What a step gave one request."""

    token_id: int
    logprob: float | None
    top_logprobs: TopLogprobs | None


@dataclass(slots=True)
class StepOutput:
    tokens: dict[Request, Token] = field(default_factory=dict)
    broken: set[Request] = field(default_factory=set)
    """Requests whose numbers were not finite."""


class ModelRunner:
    def __init__(self, args: ServerArgs) -> None:
        keep_freed_memory()
        folder = Path(args.model_path)
        raw = RawConfig.read(folder)
        self.max_running = args.max_running_requests or DEFAULT_MAX_RUNNING
        self.dtype = checkpoint_dtype(raw) if args.dtype == "auto" else DTYPES[args.dtype]
        self.context_length = _context_length(args, raw)
        started = time.monotonic()
        scheme = detect_scheme(raw, folder)
        weights = weight_format(args.quantization, scheme.method, scheme.expert_format)
        chunk = args.chunked_prefill_size if args.chunked_prefill_size > 0 else self.context_length
        limits = StepLimits(chunk + self.max_running, self.max_running)
        outline = _outline(raw, self.dtype, weights)
        self.moe = moe_context(args, self.dtype, weights, limits, outline)
        weight_bytes = outline.nbytes + report_buffers(self.moe, outline)
        _check_weights_fit(folder, weight_bytes)
        self.model = build_model(raw, BuildContext(self.context_length, self.moe))
        self.eos_ids = _eos_ids(raw)
        self.vocab_size = self.model.config.vocab_size
        if args.load_format == "dummy":
            fill_randomly(self.model, args.random_seed or 0)
        else:
            load_weights(self.model, folder, scheme)
            settle_input_scales(self.model, folder)
        wanted = self.max_running * self.context_length
        tokens = cache_tokens(args, self.model.cache, self.dtype.itemsize, weight_bytes, wanted)
        self.num_pages = tokens // args.page_size
        self.cache = PagedCache(self.model.cache, self.num_pages, args.page_size, self.dtype)
        logger.info(
            "loaded %s in %.1f s: %.2f GiB of weights in %s, KV cache of %d tokens (%.2f GiB), "
            "context of %d tokens",
            folder,
            time.monotonic() - started,
            weight_bytes / GIB,
            str(self.dtype).removeprefix("torch."),
            tokens,
            self.cache.num_bytes / GIB,
            self.context_length,
        )

    @torch.inference_mode()
    def step(self, work: Sequence[Scheduled]) -> StepOutput:
        try:
            hidden_TH, starts = self._forward(work)
        except Exception:
            self.moe.restart()
            raise
        output = StepOutput()
        for item, start in zip(work, starts, strict=True):
            if item.request.wants_input_logprobs and not self._score(item, hidden_TH, start):
                output.broken.add(item.request)
        rows = [
            (item.request, start + item.length - 1)
            for item, start in zip(work, starts, strict=True)
            if item.samples and item.request.remaining_tokens > 0
        ]
        if rows:
            last_BH = hidden_TH[torch.tensor([row for _, row in rows])]
            self._sample([request for request, _ in rows], self.model.logits(last_BH), output)
        return output

    def _forward(self, work: Sequence[Scheduled]) -> tuple[Tensor, list[int]]:
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        for item in work:
            first, stop = item.request.num_computed, item.stop
            spans.append(Span(len(ids), item.length, stop, item.request.pages))
            ids += item.request.token_ids[first:stop]
            positions += range(first, stop)
        attention = TorchAttention(self.cache, spans)
        prefill = any(not item.request.is_decoding for item in work)
        hidden_TH = self.model(
            torch.tensor(ids), torch.tensor(positions), attention, PREFILL if prefill else DECODE
        )
        return hidden_TH, [span.start for span in spans]

    def _score(self, item: Scheduled, hidden_TH: Tensor, start: int) -> bool:
        """Logprobs of the prompt tokens that follow this chunk's; False if they are not finite."""
        request, first = item.request, item.request.num_computed
        stop = min(item.stop, request.prompt_len - 1)
        for begin in range(request.next_input_logprob, stop, LOGPROB_ROWS):
            end = min(begin + LOGPROB_ROWS, stop)
            logits_TV = self.model.logits(hidden_TH[start + begin - first : start + end - first])
            targets = request.prompt_ids[begin + 1 : end + 1]
            logprobs, top = token_logprobs(logits_TV, targets, request.top_logprobs_num)
            if not all(map(math.isfinite, logprobs)):
                return False
            request.input_logprobs += logprobs
            request.input_top_logprobs += top
        return True

    def _sample(self, requests: list[Request], logits_BV: Tensor, output: StepOutput) -> None:
        rows = [_sample_row(request) for request in requests]
        try:
            sampled = sample(logits_BV, rows)
        except NonFiniteLogits as error:
            output.broken.update(requests[row] for row in error.rows)
            good = [row for row in range(len(rows)) if row not in error.rows]
            if good:
                self._sample([requests[row] for row in good], logits_BV[good], output)
            return
        tokens = map(Token, sampled.token_ids, sampled.logprobs, sampled.top_logprobs)
        output.tokens.update(zip(requests, tokens, strict=True))


def _sample_row(request: Request) -> SampleRow:
    params = request.params
    looks_back = params.penalised or params.min_new_tokens > 0
    return SampleRow(
        params=params,
        seed=request.seed,
        position=len(request.token_ids),
        prompt_ids=request.prompt_ids,
        output_ids=request.output_ids if looks_back else (),
        eos_ids=request.eos_ids,
        return_logprob=request.return_logprob,
        top_logprobs_num=request.top_logprobs_num,
    )


def _outline(raw: RawConfig, dtype: torch.dtype, weights: WeightFormat | None) -> CausalLM:
    """The model without memory and on one rank, to count on."""
    with torch.device("meta"):
        moe = MoeContext.single(dtype, weights)
        return build_model(raw, BuildContext(positions=1, moe=moe))


def _check_weights_fit(folder: Path, weight_bytes: int) -> None:
    """Memory is only taken when weights are written: without this the kernel kills the process."""
    if weight_bytes > total_memory():
        raise ValueError(
            f"the weights of {folder} take {weight_bytes / GIB:.1f} GiB and this machine has "
            f"{total_memory() / GIB:.1f} GiB: use a smaller model or --dtype bfloat16"
        )


def _context_length(args: ServerArgs, raw: RawConfig) -> int:
    limit = raw.integer("max_position_embeddings")
    if args.context_length is None:
        return limit
    if args.context_length > limit:
        raise ValueError(
            f"--context-length {args.context_length} is longer than the model's "
            f"max_position_embeddings {limit}: give at most that"
        )
    return args.context_length


def _eos_ids(raw: RawConfig) -> frozenset[int]:
    """For engines without a tokenizer, which knows better."""
    given = raw.data.get("eos_token_id")
    ids = given if isinstance(given, list) else [given]
    return frozenset(token for token in ids if isinstance(token, int))
