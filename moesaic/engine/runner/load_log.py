"""What a rank logs once it has loaded."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from moesaic.config import ServerArgs
from moesaic.engine.runner.steps import AsynchronousSteps
from moesaic.engine.setup.device_memory import GIB

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def log_loaded(runner: ModelRunner, args: ServerArgs, weight_bytes: int, seconds: float) -> None:
    tokens = runner.num_pages * args.page_size
    reason = "what memory allows"
    if args.max_total_tokens is not None:
        reason = "as --max-total-tokens says"
    elif tokens >= runner.max_running * runner.context_length:
        reason = "as much as all requests can use"
    logger.info(
        "loaded %s in %.1f s: %.2f GiB of weights in %s, KV cache of %d tokens (%.2f GiB: %s), "
        "context of %d tokens, at most %d requests at once",
        args.model_path,
        seconds,
        weight_bytes / GIB,
        str(runner.moe.dtype).removeprefix("torch."),
        tokens,
        _cache_bytes(runner) / GIB,
        reason,
        runner.context_length,
        runner.max_running,
    )
    if runner.limits.drafts:
        logger.info(
            "speculative decoding: steps verify up to %d drafts beside %d requests; buffers "
            "of low-latency dispatch, logits and graphs follow from that: the largest step takes "
            "%.2f GiB for logits and sampling, and %.2f GiB for logits of a draft model",
            runner.limits.drafts,
            runner.limits.running,
            runner.step_bytes.logits / GIB,
            runner.step_bytes.drafts / GIB,
        )


def log_gpu_memory(runner: ModelRunner, steps: AsynchronousSteps) -> None:
    if runner.device.type != "cuda":
        return
    draft = runner.draft
    logger.info(
        "memory of the GPU: weights %.2f GiB, KV cache %.2f GiB, graphs %.2f GiB, %.2f GiB "
        "free, of which the largest step takes about %.2f GiB",
        (runner.model.nbytes + (0 if draft is None else draft.model.nbytes)) / GIB,
        _cache_bytes(runner) / GIB,
        (steps.graph_bytes + (0 if draft is None else draft.graph_bytes)) / GIB,
        torch.cuda.mem_get_info(runner.device)[0] / GIB,
        runner.step_bytes.total / GIB,
    )


def _cache_bytes(runner: ModelRunner) -> int:
    draft = runner.draft
    return runner.cache.num_bytes + (0 if draft is None else draft.cache.num_bytes)
