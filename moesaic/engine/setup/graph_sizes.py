"""Which sizes of steps are captured as CUDA graphs."""

from __future__ import annotations

import logging
from typing import NamedTuple

from moesaic.config import ServerArgs
from moesaic.engine.setup.moe_setup import StepLimits

logger = logging.getLogger(__name__)

# Up to each number of sequences, the distance between buckets. Padding reads no experts, no cache.
STEPS = ((2, 1), (4, 2), (8, 4), (64, 8), (128, 16), (256, 32))
LAST_STEP = 64
# Of mixed steps: padding takes part in dense products. These are bound by reading weights up to
# some hundred tokens: up to there buckets are a quarter of a doubling apart, then an eighth. Steps
# above FINE_TOKENS are rare, and a graph of them takes as long to capture as a small one.
FIRST_TOKENS, COARSE_TOKENS, FINE_TOKENS = 64, 512, 4096
COARSE, FINE = 4, 8
# The default chunk with the requests that decode beside it: kernel by kernel, the host would hold
# up steps of that size.
MOST_CAPTURED_TOKENS = 9216


class GraphSizes(NamedTuple):
    """Rows of the graphs of decode steps, ascending: without drafts, and with some."""

    plain: tuple[int, ...] = ()
    verify: tuple[int, ...] = ()

    @classmethod
    def of(cls, args: ServerArgs, limits: StepLimits) -> GraphSizes:
        plain = graph_sizes(args, limits.running)
        return cls(plain, verify_graph_sizes(plain, limits.running, limits.drafts))


def graph_sizes(args: ServerArgs, max_running: int) -> tuple[int, ...]:
    """Sequences of the buckets, ascending; empty if no graphs are captured."""
    if args.disable_cuda_graph:
        return ()
    most = min(args.cuda_graph_max_bs or max_running, max_running)
    if args.cuda_graph_bs is not None:
        beyond = sorted(size for size in set(args.cuda_graph_bs) if size > most)
        if beyond:
            logger.warning(
                "--cuda-graph-bs: nothing is captured for %s, as at most %d requests run at once "
                "(--max-running-requests)",
                ", ".join(map(str, beyond)),
                most,
            )
        return tuple(sorted(set(args.cuda_graph_bs) - set(beyond)))
    return _sizes_up_to(most)


def verify_graph_sizes(plain: tuple[int, ...], max_running: int, drafts: int) -> tuple[int, ...]:
    """Rows of the buckets of steps with drafts, at most `drafts` of them: the `plain` ones, which
    ranks without drafts have in the same step, and larger ones in proportion."""
    if not plain or not drafts:
        return ()
    most = plain[-1] * (max_running + drafts) // max_running
    return (*plain, *(size for size in _sizes_up_to(most) if size > plain[-1]))


def _sizes_up_to(most: int) -> tuple[int, ...]:
    sizes: list[int] = []
    size = 1
    while size < most:
        sizes.append(size)
        size += next((step for limit, step in STEPS if size < limit), LAST_STEP)
    return (*sizes, most)


def mixed_graph_sizes(args: ServerArgs, most_tokens: int) -> tuple[int, ...]:
    """Tokens of the buckets of mixed steps, ascending; empty if none are captured."""
    if args.disable_cuda_graph or args.disable_prefill_cuda_graph:
        return ()
    most = min(args.cuda_graph_max_bs_prefill or MOST_CAPTURED_TOKENS, most_tokens)
    if args.cuda_graph_bs_prefill is not None:
        return tuple(sorted(size for size in set(args.cuda_graph_bs_prefill) if size <= most))
    sizes, size = list[int](), FIRST_TOKENS
    while size < most:
        sizes.append(size)
        parts = FINE if COARSE_TOKENS <= size < FINE_TOKENS else COARSE
        size += (1 << (size.bit_length() - 1)) // parts
    return (*sizes, most)
