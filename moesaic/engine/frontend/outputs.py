"""The outputs of `generate`."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from moesaic.core.request import FinishReason, Request, TopLogprobs
from moesaic.engine.frontend import routed_experts
from moesaic.engine.schedule.request_state import Progress, RequestState
from moesaic.engine.text.tokenizer import Tokenizer

IndexedProgress = tuple[int, Progress]
Entry = tuple[float | None, int, str | None]
# Logprobs that a stream may repeat before only its last output has them, each 40 bytes of JSON.
MAX_REPEATED: Final = 1 << 18


class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """The progress of a request; its first `progress.num_output` output tokens belong to it."""

    index: int
    """Counts prompts, and within them samples."""
    progress: Progress
    request: Request

    @property
    def text(self) -> str:
        return self.progress.text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason if self.progress.finished else None


class CallOutputs:
    """Collects the outputs of one call's requests."""

    def __init__(self, states: list[RequestState], single: bool, format: OutputFormat) -> None:
        self.states, self.single = states, single
        self.pending = set(range(len(states)))
        self._format = format
        self._final: dict[int, dict[str, Any]] = {}
        self._num_shown = [-1] * len(states)

    def update(self, update: IndexedProgress) -> dict[str, Any] | None:
        """The request's output so far, or None if it has not grown."""
        number, progress = update
        request = self.states[number].request
        if progress.finished:
            self.pending.discard(number)
            # In a list, a failure is an entry: the other outputs must not be lost.
            if self.single and request.failed:
                raise RuntimeError(request.failure)
        elif progress.num_output == self._num_shown[number]:
            return None
        self._num_shown[number] = progress.num_output
        output = self._format.answer(request, progress)
        if progress.finished:
            self._final[number] = output
        return output if self.single else {**output, "index": number}

    def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        outputs = [self._final[number] for number in range(len(self.states))]
        return outputs[0] if self.single else outputs


class OutputFormat:
    """Formats the outputs of one call. Each output of a stream repeats everything so far, which
    grows quadratically; so intermediate outputs have logprobs only while they are few."""

    def __init__(self, texts: Tokenizer | None = None, prompt_ids: bool = False) -> None:
        """`texts`: for the texts of tokens in logprobs. `prompt_ids`: the last output has them."""
        self._texts, self._prompt_ids = texts, prompt_ids
        self._repeated = 0

    def answer(self, request: Request, progress: Progress) -> dict[str, Any]:
        number = progress.num_output
        reason = request.finish_reason if progress.finished else None
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": None if reason is None else reason.to_dict(),
            "prompt_tokens": request.prompt_len,
            "completion_tokens": number,
            "cached_tokens": request.cached_tokens,
            "cached_tokens_details": cached_tokens_details(request),
            "total_retractions": request.retractions,
        }
        if request.finished is not None and progress.finished:
            meta["e2e_latency"] = request.finished - request.created
            if request.first_token is not None:
                meta["ttft"] = request.first_token - request.created
            if request.draft_counts[0]:
                meta |= speculation(request)
            if request.routed_start is not None:
                meta["routed_experts"] = routed_experts.encoded(request)
        if request.return_logprob:
            if self._has_logprobs(request, progress):
                meta |= _logprobs(request, number, self._texts)
            if not progress.finished:
                self._repeated += num_logprobs(request, 0, number)
        output_ids = request.token_ids[request.prompt_len : request.prompt_len + number]
        output = {"text": progress.text, "output_ids": output_ids, "meta_info": meta}
        if self._prompt_ids and progress.finished:
            output["prompt_token_ids"] = request.prompt_ids
        return output

    def weight(self, request: Request, progress: Progress) -> int:
        if self._has_logprobs(request, progress):
            return weight(request, 0, progress.num_output)
        return progress.num_output // 8

    def _has_logprobs(self, request: Request, progress: Progress) -> bool:
        number = num_logprobs(request, 0, progress.num_output)
        return progress.finished or self._repeated + number <= MAX_REPEATED


def speculation(request: Request) -> dict[str, int | float]:
    """As SGLang has it. A verified draft gives its accepted tokens and one that is sampled."""
    verified, drafted, accepted = request.draft_counts
    return {
        "spec_verify_ct": verified,
        "spec_accept_length": 1 + accepted / verified,
        "spec_accept_rate": accepted / drafted,
        "spec_accept_token_num": accepted,
        "spec_draft_token_num": drafted,
    }


def cached_tokens_details(request: Request) -> dict[str, int] | None:
    """As SGLang has it; pages are cached on the device only."""
    return {"device": request.cached_tokens, "host": 0} if request.cached_tokens else None


def num_logprobs(request: Request, start: int, stop: int) -> int:
    """Logprobs of the output tokens from `start` to `stop`; with the first, of the prompt too."""
    if not request.return_logprob:
        return 0
    inputs = 0 if start else request.prompt_len - request.logprob_start
    entries = 1 + request.top_logprobs_num + len(request.token_ids_logprob)
    return (inputs + stop - start) * entries


def is_heavy(request: Request) -> bool:
    """Whether `weight` is more than a few microseconds for an update of a few tokens."""
    return request.return_logprob or request.routed_start is not None


def weight(request: Request, start: int, stop: int) -> int:
    """Estimated microseconds to build and encode these output tokens."""
    routed = routed_experts.encoding_time(request)
    return 8 + (stop - start) // 8 + num_logprobs(request, start, stop) + routed


def _logprobs(request: Request, number: int, texts: Tokenizer | None) -> dict[str, Any]:
    def entry(logprob: float | None, token: int) -> Entry:
        return logprob, token, None if texts is None else texts.token_text(token)

    def top(rows: list[TopLogprobs], part: slice) -> list[list[Entry]]:
        return [[entry(logprob, token) for logprob, token in row[part]] for row in rows]

    # The instance that continues a request answers with those of the prompt. SGLang's router puts
    # the answers of both instances together.
    is_half = request.kv_target is not None
    input_ids = [] if is_half else request.prompt_ids[request.logprob_start :]
    before = [] if is_half else [None]
    output_ids = request.token_ids[request.prompt_len : request.prompt_len + number]
    found: dict[str, Any] = {
        "input_token_logprobs": [
            entry(logprob, token)
            for logprob, token in zip([None, *request.input_logprobs], input_ids, strict=False)
        ],
        "output_token_logprobs": [
            entry(logprob, token)
            for logprob, token in zip(request.output_logprobs, output_ids, strict=False)
        ],
    }
    further = len(request.token_ids_logprob)
    inputs = [] if is_half else request.input_top_logprobs
    outputs = request.output_top_logprobs[:number]
    if request.top_logprobs_num:
        likely = slice(None, -further or None)
        found["input_top_logprobs"] = [*before, *top(inputs, likely)]
        found["output_top_logprobs"] = top(outputs, likely)
    if further:
        asked = slice(-further, None)
        found["input_token_ids_logprobs"] = [*before, *top(inputs, asked)]
        found["output_token_ids_logprobs"] = top(outputs, asked)
    return found
