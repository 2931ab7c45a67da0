"""Steps that run once at start, so that no request waits for a kernel to compile.

Kernels depend on the power of two that a step's tokens reach, and on whether their number is odd;
those of logits on the rows that sample; attention of single tokens on their number and context.
Decode steps run when their graphs are captured. Ranks may dispatch decode steps in another mode, so
those without a graph run here, too. All ranks run the same steps in the same order, but their
kernels do not wait for each other (DeviceWindow.isolated), so slow compilation delays no other
rank; NCCL's kernels do wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from moesaic.core.overlap import Overlap
from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling.gpu_sampler import draw_rows
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.setup.moe_setup import StepLimits
from moesaic.kernels.penalties import PenaltyTables, RowPenalty, penalise_rows
from moesaic.kernels.sampling import OfferedDrafts, greedy_rows
from moesaic.layers.paged_cache import Sequences

if TYPE_CHECKING:
    from moesaic.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# A context that several programs share.
SOME_TOKENS = 2048
# Only rows with top-p and without top-k use all kernels.
DRAWN = SampleRow(SamplingParams(temperature=0.7, top_p=0.9), seed=0, position=1)


def step_sizes(most: int, parts: Sequence[int] = (1,)) -> list[int]:
    """Tokens of the steps, up to 20 these: 1, 2, 3, 4, 7, 8, 15, 16, 19, 20. Where a token has
    `parts`, the last number of tokens whose parts fit a power of two is included."""
    powers = ((1 << n, part) for part in parts for n in range((most * part).bit_length()))
    marks = {most, *(power // part for power, part in powers)}
    return sorted({size for mark in marks for size in (mark - 1, mark) if size > 0})


def sorted_parts(ranks: int, top_k: int) -> tuple[int, ...]:
    """Parts of a token that kernels depend on: products on the pairs of one rank's tokens, sorting
    on those of all ranks. With a power of two ranks, all reach powers of two together."""
    return (1,) if ranks & (ranks - 1) == 0 else (1, top_k, ranks * top_k)


def shared_sizes(most: int, parts: Sequence[int], sharers: int) -> list[int]:
    """Step sizes where `sharers` ranks have the same tokens and each takes a share to the experts:
    expert kernels depend on the largest share, all others on all tokens."""
    shares = step_sizes(-(-most // sharers), parts)
    return sorted({*step_sizes(most), *(min(most, sharers * size) for size in shares)})


def warm_steps(
    limits: StepLimits,
    captured: Sequence[int],
    exchange: bool,
    parts: Sequence[int] = (1,),
    sharers: int = 1,
) -> list[tuple[int, bool]]:
    """Tokens of each step, and whether any rank prefills in it. The largest step holds a chunk and
    all requests that decode. Ranks that `exchange` rows may use another mode when none prefills, so
    decode steps beyond the `captured` sizes are included."""
    steps = [(size, True) for size in shared_sizes(limits.tokens, parts, sharers)]
    if exchange:
        held, most = max(captured, default=0), limits.decode_tokens
        sizes = shared_sizes(most, parts, sharers)
        steps += [(size, False) for size in sizes if size > held]
    return steps


def split_steps(steps: Sequence[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """Those of the steps that run in two micro-batches, too: the smallest and the largest of each
    kind, as only the kernels that send and wait differ from those of whole steps."""
    found = list[tuple[int, bool]]()
    for kind in (True, False):
        sizes = sorted(size for size, prefill in steps if prefill == kind and size > 1)
        found += [(size, kind) for size in dict.fromkeys([*sizes[:1], *sizes[-1:]])]
    return found


def single_tokens(most: int, longest: int) -> list[tuple[int, int]]:
    """Numbers of single tokens and their context, for the largest steps first: they decide how many
    parts attention cuts a sequence into. Up to 4 requests of up to 9000 tokens: (4, 2048),
    (2, 2048), (1, 2048), (1, 9000), (1, 1)."""
    some = min(SOME_TOKENS, longest)
    counts = [1 << n for n in reversed(range(most.bit_length()))]
    return [*((count, some) for count in counts), (1, longest), (1, 1)]


def warm_sequences(size: int, singles: int, context: int) -> Sequences:
    """Single tokens with `context`, and a prompt of at least two tokens; all in the same row of the
    page table."""
    singles = min(singles, max(0, size - 2))
    lengths = np.array([1] * singles + [size - singles], np.int32)
    kv_lens = np.array([context] * singles + [size - singles], np.int32)
    starts = np.arange(singles + 1, dtype=np.int32)
    return Sequences(starts, lengths, kv_lens, 0 * starts)


def _penalise(logits_1V: Tensor) -> None:
    """Compiles the kernels for rows whose logits are adjusted."""
    device, vocab = logits_1V.device, logits_1V.shape[1]
    counts_1V = torch.zeros(1, vocab, dtype=torch.int32, device=device)
    tables = PenaltyTables(counts_1V, counts_1V[:, :1], torch.zeros(1, 1, device=device))
    packed = torch.from_numpy(RowPenalty.pack([RowPenalty(0, 0, repetition=1.1)]).copy())
    penalise_rows(logits_1V, tables, packed.to(device), torch.zeros(1, device=device).long())


@torch.inference_mode()
def warm_up(runner: ModelRunner, steps: Sequence[tuple[int, bool]]) -> None:
    """Runs steps that all use one page, and samples from each. `steps`: see `warm_steps`."""
    began = time.monotonic()
    kinds = single_tokens(runner.max_running, runner.context_length)
    most = sum(prefill for _, prefill in steps)
    order = tqdm(steps, desc="Compiling kernels", unit="step", disable=None, leave=False)
    for number, (size, prefill) in enumerate(order):
        order.set_postfix(tokens=size, refresh=False)
        kind = kinds[(most - 1 - number) % len(kinds)]
        try:
            logits_RV = runner.dummy_logits(warm_sequences(size, *kind), prefill)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"a step of {size} tokens does not fit beside the weights: lower "
                "--chunked-prefill-size or --max-running-requests, or end what else runs there"
            ) from error
        if len(logits_RV):  # one rank of a group samples
            greedy_rows(logits_RV)
            draw_rows(logits_RV[:1], [DRAWN])
            if runner.accept_thresholds is not None:
                offered = OfferedDrafts.of([[0]], runner.accept_thresholds, logits_RV.device)
                draw_rows(logits_RV[:1], [DRAWN], offered)
            _penalise(logits_RV[:1])
    for size, prefill in split_steps(steps) if Overlap.TBO in runner.schedules else ():
        runner.dummy_logits(warm_sequences(size, 1, 1), prefill, Overlap.TBO)
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    logger.info(
        "ran %d steps of 1 to %d tokens in %.1f s, so that their kernels are compiled",
        len(steps),
        max(size for size, _ in steps),
        time.monotonic() - began,
    )
