"""From logits to tokens: vectorised, and with the same result for a row alone or in any batch.

R rows · V vocabulary · N blocks of the vocabulary · W tokens a block · M blocks that are kept ·
D drafts behind a row

Two choices make a row independent of its neighbours:

* Probabilities become integers in float64, `round(exp((score - best) / temperature) * scale)`.
  Their sums are exact, so no order of summation on any device can change them.
* top-k and top-p are thresholds on the score: tokens that tie with the last one kept are kept too.
  The draw walks the survivors in vocabulary order with one random number per (seed, position).

So every method finds the same thresholds, and a request that is replayed from its emitted tokens
continues as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from moesaic.core.sampling import SamplingParams
from moesaic.engine.sampling.adjust import adjust
from moesaic.engine.sampling.scores import BLOCK, Scores
from moesaic.engine.sampling.token_masks import forbid
from moesaic.kernels.sampling import (
    MAX_TEMPERATURE,
    OfferedDrafts,
    second_uniform,
    uniform,
)

TopLogprobs = list[tuple[float, int]]

# Elements of a piece of rows: small enough for the cache of a CPU, bounded in memory on a GPU.
CPU_PIECE: Final = 2**19
DEVICE_PIECE: Final = 2**24
# A row that may keep more tokens than this uses the histogram instead of the nearest blocks.
NARROW_TOP_K = 512
NARROW_TOP_P = 128
TIE_SLACK: Final = 32


class NonFiniteLogits(RuntimeError):
    """`rows` cannot be sampled; the engine fails their requests and no others."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = tuple(rows)
        super().__init__(
            f"logits of rows {list(rows)} hold NaN or +inf, or leave no token to choose: "
            "fail these requests and sample the others again"
        )


class SampleRow(msgspec.Struct, frozen=True, gc=False):
    """How one row of logits is sampled; `position`: the number of tokens before the sampled one."""

    params: SamplingParams
    seed: int
    position: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    """An `OutputTokens` of a request that goes on: what it has counted is not counted again."""
    eos_ids: frozenset[int] = frozenset()
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()


class Sampled(NamedTuple):
    """One entry per row; logprobs are the model's own, None where not requested."""

    token_ids: list[int]
    logprobs: list[float | None]
    top_logprobs: list[TopLogprobs | None]


class DrawParams(NamedTuple):
    """Parameters of random rows, as columns [R, 1]; `top_k` is V where it is off. `offered`: drafts
    that they may take, then with `second`, the number of those that take none."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    second: Tensor
    offered: OfferedDrafts | None

    def rows(self, index: Tensor) -> DrawParams:
        temperature, top_k, top_p, min_p, uniform, second = (one[index] for one in self[:6])
        offered = self.offered and self.offered.rows(index)
        return DrawParams(temperature, top_k, top_p, min_p, uniform, second, offered)


def sample(
    logits_BV: Tensor,
    rows: Sequence[SampleRow],
    masks: Sequence[Tensor | None] = (),
    offered: OfferedDrafts | None = None,
) -> Sampled:
    """Samples a token per row (`masks`: see token_masks; `offered`: drafts that random rows may
    take); NonFiniteLogits names the others."""
    assert logits_BV.shape[0] == len(rows), (logits_BV.shape, len(rows))
    out = Sampled([], [], [])
    bad: list[int] = []
    for piece in _pieces(logits_BV):
        raw_RV = logits_BV[piece].float()
        chosen = rows[piece]
        scores_RV = forbid(adjust(raw_RV, chosen), masks[piece])
        tokens, broken = _pick(scores_RV, chosen, offered and offered.rows(piece))
        bad += [piece.start + i for i in broken]
        if not bad:
            _extend(out, raw_RV, tokens, chosen)
    if bad:
        raise NonFiniteLogits(bad)
    return out


def token_logprobs(
    logits_TV: Tensor, target_ids: Sequence[int], top_n: int = 0, further: Sequence[int] = ()
) -> tuple[list[float], list[TopLogprobs]]:
    """Logprob of each row's target, and of its `top_n` most likely tokens and the `further` ones;
    NaN for invalid rows."""
    assert logits_TV.shape[0] == len(target_ids), (logits_TV.shape, len(target_ids))
    logprobs: list[float] = []
    top: list[TopLogprobs] = []
    for piece in _pieces(logits_TV):
        raw_RV = logits_TV[piece].float()
        targets = target_ids[piece]
        asked = [further] * len(targets) if further else ()
        some, some_top = _logprobs(raw_RV, targets, [top_n] * len(targets), asked)
        logprobs += some
        top += some_top
    return logprobs, top


def _pieces(logits_BV: Tensor) -> Iterator[slice]:
    limit = CPU_PIECE if logits_BV.device.type == "cpu" else DEVICE_PIECE
    step = max(1, limit // max(1, logits_BV.shape[1]))
    for start in range(0, logits_BV.shape[0], step):
        yield slice(start, min(start + step, logits_BV.shape[0]))


def _pick(
    scores_RV: Tensor, rows: Sequence[SampleRow], offered: OfferedDrafts | None = None
) -> tuple[list[int], list[int]]:
    """Token of each row, and the rows that have none."""
    scores = Scores.of(scores_RV)
    random = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(random) == len(rows):
        ids_R = _draw(scores, rows, offered)
    else:
        ids_R = _argmax(scores)
        if random:
            index = torch.tensor(random, device=scores_RV.device)
            some = offered and offered.rows(index)
            ids_R[index] = _draw(scores.rows(index), [rows[i] for i in random], some)
    # float64 holds both exactly, and one transfer brings both to the host.
    tokens, best = torch.stack([ids_R.double(), scores.best_R1[:, 0].double()]).tolist()
    return [int(t) for t in tokens], [i for i, b in enumerate(best) if not math.isfinite(b)]


def _argmax(scores: Scores) -> Tensor:
    """The first token with the highest score, by the block maxima."""
    block_R1 = scores.peaks_RN.argmax(-1, keepdim=True)
    inside_RW = scores.blocks_RNW.gather(1, block_R1[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    return block_R1[:, 0] * BLOCK + inside_RW.argmax(-1)


def _draw_params(
    rows: Sequence[SampleRow],
    vocab: int,
    device: torch.device,
    offered: OfferedDrafts | None,
) -> DrawParams:
    columns = [
        (
            min(row.params.temperature, MAX_TEMPERATURE),
            vocab if row.params.top_k == -1 else min(row.params.top_k, vocab),
            row.params.top_p,
            row.params.min_p,
            uniform(row.seed, row.position),
            0.0 if offered is None else second_uniform(row.seed, row.position),
        )
        for row in rows
    ]
    table = torch.tensor(columns, dtype=torch.float64, device=device)
    temperature, top_k, top_p, min_p, uniform_R1, second_R1 = (c[:, None] for c in table.unbind(1))
    kept = (temperature.float(), top_k.long(), top_p, min_p.float())
    return DrawParams(*kept, uniform_R1, second_R1, offered)


def _draw(
    scores: Scores, rows: Sequence[SampleRow], offered: OfferedDrafts | None = None
) -> Tensor:
    """Draws a token per row; rows without top-k and top-p walk the whole vocabulary."""
    vocab = scores.blocks_RNW.shape[1] * BLOCK
    device = scores.blocks_RNW.device
    params = _draw_params(rows, vocab, device, offered)
    ids_R = torch.empty(len(rows), dtype=torch.int64, device=device)
    near, wide, plain = _rows_by_method(rows)
    if near:
        index, some, their = _select_rows(scores, params, near)
        need = max(_blocks_needed(rows[i].params) for i in near)
        open_rows = [n for n, i in enumerate(near) if rows[i].params.top_k == -1]
        blocks, floor_R1, exact_R = _nearest_blocks(some, their, need, open_rows)
        ids_R[index] = _walk(blocks, their, floor_R1)
        wide = sorted(wide + [i for i, ok in zip(near, exact_R.tolist(), strict=True) if not ok])
    if wide:
        index, some, their = _select_rows(scores, params, wide)
        any_top_k = any(rows[i].params.top_k != -1 for i in wide)
        ids_R[index] = _walk(some, their, _floor_by_histogram(some, their, any_top_k))
    if plain:
        index, some, their = _select_rows(scores, params, plain)
        ids_R[index] = _walk(some, their, None)
    return ids_R


def _select_rows(
    scores: Scores, params: DrawParams, group: list[int]
) -> tuple[Tensor, Scores, DrawParams]:
    """The rows of a group, in ascending order; no copy if these are all rows."""
    index = torch.tensor(group, device=scores.best_R1.device)
    if len(group) == len(scores.best_R1):
        return index, scores, params
    return index, scores.rows(index), params.rows(index)


def _rows_by_method(rows: Sequence[SampleRow]) -> tuple[list[int], list[int], list[int]]:
    near: list[int] = []
    wide: list[int] = []
    plain: list[int] = []
    for i, row in enumerate(rows):
        if row.params.top_k == -1 and row.params.top_p == 1.0:
            plain.append(i)
        else:
            (near if _blocks_needed(row.params) else wide).append(i)
    return near, wide, plain


def _blocks_needed(params: SamplingParams) -> int:
    """Blocks that hold the kept tokens, unless many tie; 0 if these are too many to be cheap."""
    if params.top_k == -1:
        return NARROW_TOP_P
    return params.top_k + TIE_SLACK if params.top_k <= NARROW_TOP_K else 0


def _weights(
    scores: Scores, params: DrawParams, floor_R1: Tensor | None = None, min_p: bool = False
) -> Tensor:
    """Integer weights [R, N * W] of the tokens at or above the floor."""
    flat = scores.blocks_RNW.flatten(1)
    # Without the clamp the weight is 0, too, but exp(-inf) takes torch ten times as long.
    share = (flat - scores.best_R1).div_(params.temperature).clamp_(min=-80.0).exp_()
    if floor_R1 is not None:
        share.masked_fill_(flat < floor_R1, 0.0)
    if min_p:
        share.masked_fill_(share < params.min_p, 0.0)
    return share.mul_(scores.scale).round_().double()


def _walk(scores: Scores, params: DrawParams, floor_R1: Tensor | None) -> Tensor:
    """Inverse CDF in vocabulary order: first the block, then the token in it; or a draft."""
    weights_RNW = _weights(scores, params, floor_R1, min_p=True).view(scores.blocks_RNW.shape)
    if params.offered is None:
        return _token_at(scores, weights_RNW, params.uniform)
    taken_R, number_R1 = _take_drafts(scores, weights_RNW, params, params.offered)
    return torch.where(taken_R < 0, _token_at(scores, weights_RNW, number_R1), taken_R)


def _take_drafts(
    scores: Scores, weights_RNW: Tensor, params: DrawParams, offered: OfferedDrafts
) -> tuple[Tensor, Tensor]:
    """The draft that each row takes, -1 for none, and the number by which it then draws another
    token: the weights of its drafts become 0. No draft is taken that must not be drawn."""
    drafts_RD, weights_RK = offered.tokens_RD, weights_RNW.flatten(1)
    is_block_RDN = scores.ids_RN[:, None] == (drafts_RD // BLOCK)[:, :, None]
    place_RD = is_block_RDN.int().argmax(-1) * BLOCK + drafts_RD % BLOCK
    weights_RD = weights_RK.gather(1, place_RD).where(is_block_RDN.any(-1), 0.0)
    total_R1, (single, acc) = weights_RK.sum(-1, keepdim=True), offered.thresholds_2.unbind()
    reached_RD = weights_RD.cumsum(-1) > params.uniform * total_R1 * acc
    takes_RD = (weights_RD > 0) & (reached_RD | (weights_RD >= single * total_R1))
    first_R1 = takes_RD.int().argmax(-1, keepdim=True)
    taken_R1 = drafts_RD.gather(1, first_R1).where(takes_RD.gather(1, first_R1), -1)
    weights_RK.scatter_add_(1, place_RD, -weights_RD)
    return taken_R1[:, 0], torch.where(drafts_RD[:, :1] < 0, params.uniform, params.second)


def _token_at(scores: Scores, weights_RNW: Tensor, number_R1: Tensor) -> Tensor:
    """Where the sum of weights passes this share of their total."""
    sums_RN = weights_RNW.sum(-1)
    ends_RN = sums_RN.cumsum(-1)
    total_R1 = ends_RN[:, -1:]
    mark_R1 = torch.minimum((number_R1 * total_R1).floor(), total_R1 - 1)
    block_R1 = _first_above(ends_RN, mark_R1)
    mark_R1 = mark_R1 - (ends_RN - sums_RN).gather(1, block_R1)
    inside_RW = weights_RNW.gather(1, block_R1[:, :, None].expand(-1, 1, BLOCK))[:, 0]
    offset_R1 = _first_above(inside_RW.cumsum(-1), mark_R1)
    return (scores.ids_RN.gather(1, block_R1) * BLOCK + offset_R1)[:, 0]


def _first_above(ends: Tensor, mark_R1: Tensor) -> Tensor:
    """The index of the first end beyond the mark; rows of NaN get a valid one and fail later."""
    found = torch.searchsorted(ends, mark_R1.contiguous(), right=True)
    return found.clamp_(max=ends.shape[1] - 1)


def _nearest_blocks(
    scores: Scores, params: DrawParams, need: int, open_rows: list[int]
) -> tuple[Scores, Tensor, Tensor]:
    """The `need` highest blocks, the lowest score kept, and whether that is exact: the other rows
    need the histogram. `open_rows` have top-p without top-k."""
    blocks = min(need, scores.peaks_RN.shape[1])
    near = scores.nearest(blocks)
    sorted_RC, order_RC = near.blocks_RNW.flatten(1).topk(min(need, blocks * BLOCK), dim=-1)
    is_open_R1 = params.top_k == scores.blocks_RNW.shape[1] * BLOCK
    rank_R1 = torch.where(is_open_R1, 1, params.top_k) - 1
    kth_R1 = sorted_RC.gather(1, rank_R1)
    floor_k_R1 = torch.where(is_open_R1, -math.inf, kth_R1)

    weights_RK = _weights(near, params, floor_k_R1)
    total_R1 = weights_RK.sum(-1, keepdim=True)
    if open_rows:
        index = torch.tensor(open_rows, device=total_R1.device)
        total_R1[index] = _weights(scores.rows(index), params.rows(index)).sum(-1, keepdim=True)
    enough_RC = weights_RK.gather(1, order_RC).cumsum(-1) >= params.top_p * total_R1
    first_R1 = enough_RC.int().argmax(-1, keepdim=True)
    floor_p_R1 = torch.maximum(sorted_RC.gather(1, first_R1), floor_k_R1)
    floor_R1 = torch.where(params.top_p < 1, floor_p_R1, floor_k_R1)

    reached_R = enough_RC[:, -1] | (params.top_p[:, 0] == 1)
    inside_R = (scores.peaks_RN >= torch.minimum(floor_R1, kth_R1)).sum(-1) <= blocks
    return near, floor_R1, reached_R & inside_R


def _floor_by_histogram(scores: Scores, params: DrawParams, any_top_k: bool) -> Tensor:
    """The lowest score kept, for any distribution, without sorting the vocabulary."""
    flat = scores.blocks_RNW.flatten(1)
    floor_k_R1 = None
    if any_top_k:
        ones = (flat > -math.inf).double()
        count_R1 = torch.minimum(params.top_k.double(), ones.sum(-1, keepdim=True))
        floor_k_R1 = _score_reaching(flat, ones, count_R1)
    weights_RK = _weights(scores, params, floor_k_R1)
    target_R1 = params.top_p * weights_RK.sum(-1, keepdim=True)
    floor_p_R1 = _score_reaching(flat, weights_RK, target_R1)
    return (
        floor_p_R1 if floor_k_R1 is None else torch.where(params.top_p < 1, floor_p_R1, floor_k_R1)
    )


def _score_reaching(scores_RK: Tensor, weights_RK: Tensor, target_R1: Tensor) -> Tensor:
    """The highest score such that the tokens at or above it weigh at least the target: a radix
    selection on monotone float32 bits, first 12 by a histogram of the whole vocabulary, then twice
    10 by histograms of the tokens that share what is known."""
    keys_RK = _monotone(scores_RK.contiguous().view(torch.int32))
    digit_RK = (keys_RK >> 20).long() + 2**11
    hist_RD = torch.zeros(len(keys_RK), 2**12, dtype=torch.float64, device=keys_RK.device)
    digit_R1, target_R1 = _digit_reaching(hist_RD.scatter_add_(1, digit_RK, weights_RK), target_R1)
    answer_R1 = (digit_R1 - 2**11) << 20
    row, column = torch.nonzero(digit_RK == digit_R1, as_tuple=True)
    key, weight = keys_RK[row, column], weights_RK[row, column]
    for shift in (10, 0):
        digit = (key >> shift) & 0x3FF
        hist_RD = torch.zeros(len(keys_RK), 2**10, dtype=torch.float64, device=key.device)
        hist_RD.view(-1).index_add_(0, (row << 10) + digit, weight)
        digit_R1, target_R1 = _digit_reaching(hist_RD, target_R1)
        answer_R1 |= digit_R1 << shift
        same = torch.nonzero(digit == digit_R1[row, 0])[:, 0]
        key, weight, row = key[same], weight[same], row[same]
    return _monotone(answer_R1.int()).view(torch.float32)


def _digit_reaching(hist_RD: Tensor, target_R1: Tensor) -> tuple[Tensor, Tensor]:
    """From the top: the digit at which the target is reached, and the rest of the target."""
    falling_RD = hist_RD.flip(-1)
    ends_RD = falling_RD.cumsum(-1)
    found_R1 = torch.searchsorted(ends_RD, target_R1).clamp_(max=hist_RD.shape[1] - 1)
    left_R1 = target_R1 - (ends_RD - falling_RD).gather(1, found_R1)
    return hist_RD.shape[1] - 1 - found_R1, left_R1


def _monotone(bits: Tensor) -> Tensor:
    """Float bits as integers that compare like the floats; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _extend(out: Sampled, raw_RV: Tensor, tokens: list[int], rows: Sequence[SampleRow]) -> None:
    asked = [i for i, row in enumerate(rows) if row.return_logprob]
    logprobs: list[float | None] = [None] * len(rows)
    top: list[TopLogprobs | None] = [None] * len(rows)
    if asked:
        some_RV = raw_RV if len(asked) == len(rows) else raw_RV[asked]
        counts = [rows[i].top_logprobs_num for i in asked]
        further = [rows[i].token_ids_logprob for i in asked]
        found, found_top = _logprobs(some_RV, [tokens[i] for i in asked], counts, further)
        for i, logprob, best in zip(asked, found, found_top, strict=True):
            logprobs[i], top[i] = logprob, best
    out.token_ids.extend(tokens)
    out.logprobs.extend(logprobs)
    out.top_logprobs.extend(top)


def _logprobs(
    raw_RV: Tensor,
    targets: Sequence[int],
    counts: Sequence[int],
    further: Sequence[Sequence[int]],
) -> tuple[list[float], list[TopLogprobs]]:
    """The logprob of each row's target, and those of its `counts` most likely tokens and then of
    its `further` ones."""
    scores = Scores.of(raw_RV)
    share = (scores.blocks_RNW - scores.best_R1[:, :, None]).exp_()
    total_R = share.mul_(scores.scale).round_().sum((1, 2), dtype=torch.float64)
    target_R1 = torch.tensor(targets, device=raw_RV.device)[:, None]
    table = [raw_RV.gather(1, target_R1)[:, 0], scores.best_R1[:, 0], total_R]
    picked, best, totals = torch.stack([column.double() for column in table]).tolist()
    norms = [b + math.log(t / scores.scale) for b, t in zip(best, totals, strict=True)]
    top = _most_likely(raw_RV, norms, counts)
    if any(further):
        _append_further(top, raw_RV, norms, further)
    return [p - norm for p, norm in zip(picked, norms, strict=True)], top


def _append_further(
    top: list[TopLogprobs],
    raw_RV: Tensor,
    norms: Sequence[float],
    further: Sequence[Sequence[int]],
) -> None:
    where = [(row, token) for row, tokens in enumerate(further) for token in tokens]
    index = torch.tensor(where, device=raw_RV.device).unbind(1)
    for (row, token), value in zip(where, raw_RV[index].tolist(), strict=True):
        top[row].append((value - norms[row], token))


def _most_likely(
    raw_RV: Tensor, norms: Sequence[float], counts: Sequence[int]
) -> list[TopLogprobs]:
    """The `counts[i]` highest of each row, ties by token id, without impossible tokens."""
    most = max(counts)
    if most <= 0:
        return [[] for _ in counts]
    found = raw_RV.topk(min(most + TIE_SLACK, raw_RV.shape[1]), dim=-1)
    values, ids = found.values.tolist(), found.indices.tolist()
    top = []
    for i, count in enumerate(counts):
        pairs = sorted(zip(values[i], ids[i], strict=True), key=lambda p: (-p[0], p[1]))
        if 0 < count < len(pairs) < raw_RV.shape[1] and pairs[count - 1][0] == pairs[-1][0]:
            # More tokens tie than the slack holds: topk returned any of them.
            tied = torch.nonzero(raw_RV[i] >= pairs[-1][0])[:, 0]
            pairs = list(zip(raw_RV[i][tied].tolist(), tied.tolist(), strict=True))
            pairs.sort(key=lambda p: (-p[0], p[1]))
        top.append([(v - norms[i], t) for v, t in pairs[:count] if v > -math.inf])
    return top
