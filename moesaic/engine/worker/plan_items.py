"""The items of a plan, from the scheduler's part of a step and the requests."""

from __future__ import annotations

from moesaic.core.disagg import KVSend
from moesaic.core.request import Request
from moesaic.engine.sampling.sampler import SampleRow
from moesaic.engine.sampling.token_history import TokenHistory
from moesaic.engine.schedule.inflight import PlannedItem
from moesaic.engine.schedule.plan import FUTURE_TOKEN, PlanItem, PromptScore


def history_of(request: Request) -> TokenHistory:
    return TokenHistory(request.params, request.eos_ids, request.token_ids, request.prompt_len)


def plan_item(planned: PlannedItem, history: TokenHistory | None) -> PlanItem:
    request, first, drafts = planned.request, planned.first, planned.drafts
    stop = planned.confirmed if drafts else planned.stop
    tokens, sent = request.token_ids, request.pages_sent
    position = len(tokens) + request.pending
    ids = tokens[first:stop] if first < len(tokens) else [FUTURE_TOKEN]
    sample, score, num_routed = None, None, 0
    if stop == position and position < len(request.prompt_ids) + request.max_new_tokens:
        sample = _sample_row(request, position, history)
    if request.return_logprob:
        score = _score(request, stop)
    if drafts:
        ids = [*ids, *drafts]
    if request.routed_start is not None:
        num_routed = max(0, planned.stop - max(first, request.routed_start))
    return PlanItem(
        request.request_no,
        ids,
        first,
        request.row,
        request.pages[sent:] if sent < len(request.pages) else (),
        sent,
        score,
        sample,
        len(drafts),
        num_routed,
        kv_from=None if request.arriving is None else request.arriving.ticket,
        kv_send=_kv_send(request, first, stop),
        parents=planned.parents,
    )


def _kv_send(request: Request, first: int, stop: int) -> KVSend | None:
    """What another instance has not got yet: with the first chunk also what was cached here."""
    target = request.kv_target
    if target is None:
        return None
    begin, end = max(target.first, min(request.kv_sent, first)), min(stop, target.stop)
    return KVSend(target, begin, end) if begin < end else None


def _score(request: Request, stop: int) -> PromptScore | None:
    """The prompt tokens whose logprobs this chunk's rows give."""
    begin = request.logprob_start + request.num_scored
    end = min(stop, request.prompt_len - 1)
    if begin >= end:
        return None
    assert begin >= request.num_computed, "a prefix was reused whose logprobs are requested"
    row = begin - request.num_computed
    targets = request.prompt_ids[begin + 1 : end + 1]
    return PromptScore(row, targets, request.top_logprobs_num, request.token_ids_logprob)


def _sample_row(request: Request, position: int, history: TokenHistory | None) -> SampleRow:
    return SampleRow(
        request.params,
        request.seed,
        position,
        request.prompt_ids if request.params.repetition_penalty != 1.0 else (),
        history.outputs() if history is not None else (),
        request.eos_ids,
        request.return_logprob,
        request.top_logprobs_num,
        request.token_ids_logprob,
    )
