"""Steps that are run once at start, so that nothing is compiled while somebody waits.

Kernels differ by the power of two that the tokens of a step reach, and by whether these are odd;
those of logits by the rows that sample; attention of single tokens by their number and the length
of their context. What decodes alone is run when its graphs are captured; between ranks that may be
another mode of dispatch, so steps for which there is no graph are run here. Several ranks run the
same steps in the same order, though their kernels do not wait for each other meanwhile
(DeviceWindow.apart): who compiles for long holds up nobody. NCCL's do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling.gpu_sampler import DeviceSampler
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.kernels.sampling import greedy_rows
from moesaic.layers.paged_cache import SequenceSpan

logger = logging.getLogger(__name__)

# A context that several programs share, besides none and the longest.
SOME_TOKENS = 2048
# Without top-k: only rows that have top-p alone need all kernels.
DRAWN = SampleRow(SamplingParams(temperature=0.7, top_p=0.9), seed=0, position=1)


def step_sizes(most: int, parts: Sequence[int] = (1,)) -> list[int]:
    """Tokens of the steps: up to 6, these are 1, 2, 3, 4, 5, 6; up to 20: 1, 2, 3, 4, 7, 8, 15, 16,
    19, 20. `parts` of a token: the last token with which these reach a power of two counts, too."""
    powers = ((1 << n, part) for part in parts for n in range((most * part).bit_length()))
    marks = {most, *(power // part for power, part in powers)}
    return sorted({size for mark in marks for size in (mark - 1, mark) if size > 0})


def sorted_parts(ranks: int, top_k: int) -> tuple[int, ...]:
    """Of a token. Products go by the pairs of as many tokens as a rank has, sorting by those of all
    ranks; where these are a power of two both pass one at once, and with the tokens."""
    return (1,) if ranks & (ranks - 1) == 0 else (1, top_k, ranks * top_k)


def shared_sizes(most: int, parts: Sequence[int], sharers: int) -> list[int]:
    """The same where so many ranks have the same tokens and take a share each to the experts:
    kernels before and behind go by the tokens of all, those between by the largest share."""
    shares = step_sizes(-(-most // sharers), parts)
    return sorted({*step_sizes(most), *(min(most, sharers * size) for size in shares)})


def warm_steps(
    limits: StepLimits,
    captured: Sequence[int],
    exchange: bool,
    parts: Sequence[int] = (1,),
    sharers: int = 1,
) -> list[tuple[int, bool]]:
    """Tokens of each step, and whether any rank prefills in it. The largest has all of a chunk and
    of the requests that decode. Ranks that `exchange` rows may do so otherwise when none of them
    prefills: so what no graph holds of `captured` rows is run that way, too."""
    steps = [(size, True) for size in shared_sizes(limits.tokens, parts, sharers)]
    if exchange:
        held, most = max(captured, default=0), limits.decode_tokens
        sizes = shared_sizes(most, parts, sharers)
        steps += [(size, False) for size in sizes if size > held]
    return steps


def single_tokens(most: int, longest: int) -> list[tuple[int, int]]:
    """How many single tokens steps have, and of what context, for the largest steps first. These
    two decide into how many parts attention cuts a sequence. Up to 4 requests of up to 9000 tokens:
    (4, 2048), (2, 2048), (1, 2048), (1, 9000), (1, 1)."""
    some = min(SOME_TOKENS, longest)
    counts = [1 << n for n in reversed(range(most.bit_length()))]
    return [*((count, some) for count in counts), (1, longest), (1, 1)]


def warm_spans(size: int, singles: int, context: int, page_size: int) -> list[SequenceSpan]:
    """Tokens of so long sequences, as many as leave room for a prompt of two, and the prompt; all
    in the only page there is."""
    singles = min(singles, max(0, size - 2))
    rest = size - singles
    lengths = [(1, context)] * singles + [(rest, rest)]
    return [
        SequenceSpan(start, length, kv_len, [1] * -(-kv_len // page_size))
        for start, (length, kv_len) in enumerate(lengths)
    ]


class WarmUpTarget(Protocol):
    """What the warm-up needs of a runner."""

    device: torch.device
    max_running: int
    context_length: int

    def dummy_logits(self, spans: Sequence[SequenceSpan], tokens: int, prefill: bool) -> Tensor: ...


@torch.inference_mode()
def warm_up(runner: WarmUpTarget, steps: Sequence[tuple[int, bool]], page_size: int) -> None:
    """Runs steps that all use one page, and samples from each. `steps`: see `warm_steps`."""
    began, sampler = time.monotonic(), DeviceSampler(runner.device)
    kinds = single_tokens(runner.max_running, runner.context_length)
    most = sum(prefill for _, prefill in steps)
    order = tqdm(steps, desc="Compiling kernels", unit="step", disable=None, leave=False)
    for number, (size, prefill) in enumerate(order):
        order.set_postfix(tokens=size, refresh=False)
        kind = kinds[(most - 1 - number) % len(kinds)]
        try:
            logits_RV = runner.dummy_logits(warm_spans(size, *kind, page_size), size, prefill)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a step of {size} tokens does not fit beside the weights: lower "
                "--chunked-prefill-size or --max-running-requests, or end what else runs there"
            ) from error
        if len(logits_RV):  # one rank of a group samples
            greedy_rows(logits_RV)
            sampler.draw(logits_RV[:1], [DRAWN])
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    logger.info(
        "ran %d steps of 1 to %d tokens in %.1f s, so that their kernels are compiled",
        len(steps),
        max(size for size, _ in steps),
        time.monotonic() - began,
    )
