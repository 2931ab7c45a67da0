"""What `generate` gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from moesaic.core.request import FinishReason, Request, TopLogprobs
from moesaic.engine.schedule.request_state import Progress, RequestState
from moesaic.engine.text.tokenizer import Tokenizer

Signal = tuple[int, Progress]
Entry = tuple[float | None, int, str | None]
# Logprobs that the growing answers of one stream may repeat before they are told only at the end;
# each is about 40 bytes of JSON.
MAX_REPEATED: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """How far one request of a call is; `index` counts prompts, and within them samples. The first
    `progress.num_output` tokens of the request belong to it; its reason to finish is set once
    `progress.finished`."""

    index: int
    progress: Progress
    request: Request

    @property
    def text(self) -> str:
        """All of it so far."""
        return self.progress.text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.request.finish_reason if self.progress.finished else None


class CallOutputs:
    """The jobs of one call, and which of them are still open."""

    def __init__(self, jobs: list[RequestState], single: bool, texts: Tokenizer | None) -> None:
        self.jobs, self.single = jobs, single
        self.pending = set(range(len(jobs)))
        self._form = OutputFormat(texts)
        self._final: dict[int, dict[str, Any]] = {}
        self._shown = [-1] * len(jobs)

    def take(self, signal: Signal) -> dict[str, Any] | None:
        """The answer as it now stands, or None if a signal brings nothing new."""
        number, progress = signal
        request = self.jobs[number].request
        if progress.finished:
            self.pending.discard(number)
            # In a list the others' answers must not be lost: there the failure is an entry.
            if self.single and request.failed:
                raise RuntimeError(request.failure)
        elif progress.num_output == self._shown[number]:
            return None
        self._shown[number] = progress.num_output
        output = self._form.answer(request, progress)
        if progress.finished:
            self._final[number] = output
        return output if self.single else {**output, "index": number}

    def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        outputs = [self._final[number] for number in range(len(self.jobs))]
        return outputs[0] if self.single else outputs


class OutputFormat:
    """Of the answers of one call. Every one of a stream has all that there is so far, which grows
    with the square of its length; so logprobs are told while they are few, and at the end."""

    def __init__(self, texts: Tokenizer | None) -> None:
        self._texts = texts
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
            "total_retractions": request.retractions,
        }
        if request.finished is not None and progress.finished:
            meta["e2e_latency"] = request.finished - request.created
            if request.first_token is not None:
                meta["ttft"] = request.first_token - request.created
        if request.return_logprob and self._tells(request, progress):
            meta |= _logprobs(request, number, self._texts)
        output_ids = request.token_ids[request.prompt_len : request.prompt_len + number]
        return {"text": progress.text, "output_ids": output_ids, "meta_info": meta}

    def weight(self, request: Request, progress: Progress) -> int:
        """Of the answer that would be next."""
        if self._fits(request, progress):
            return weight(request, 0, progress.num_output)
        return progress.num_output // 8

    def _tells(self, request: Request, progress: Progress) -> bool:
        fits = self._fits(request, progress)
        if not progress.finished:
            self._repeated += num_logprobs(request, 0, progress.num_output)
        return fits

    def _fits(self, request: Request, progress: Progress) -> bool:
        number = num_logprobs(request, 0, progress.num_output)
        return progress.finished or self._repeated + number <= MAX_REPEATED


def num_logprobs(request: Request, start: int, stop: int) -> int:
    """To tell of the tokens of the answer from `start` on, and of the prompt before the first."""
    if not request.return_logprob:
        return 0
    inputs = 0 if start else request.prompt_len - request.logprob_start
    return (inputs + stop - start) * (request.top_logprobs_num + 1)


def weight(request: Request, start: int, stop: int) -> int:
    """About how many microseconds it takes to build and encode an answer, or the rest of one."""
    return 8 + (stop - start) // 8 + num_logprobs(request, start, stop)


def _logprobs(request: Request, number: int, texts: Tokenizer | None) -> dict[str, Any]:
    def entry(logprob: float | None, token: int) -> Entry:
        return logprob, token, None if texts is None else texts.token_text(token)

    def top(rows: list[TopLogprobs]) -> list[list[Entry]]:
        return [[entry(logprob, token) for logprob, token in row] for row in rows]

    inputs = request.prompt_ids[request.logprob_start :]
    outputs = request.token_ids[request.prompt_len : request.prompt_len + number]
    found: dict[str, Any] = {
        "input_token_logprobs": [
            entry(logprob, token)
            for logprob, token in zip([None, *request.input_logprobs], inputs, strict=False)
        ],
        "output_token_logprobs": [
            entry(logprob, token)
            for logprob, token in zip(request.output_logprobs, outputs, strict=False)
        ],
    }
    if request.top_logprobs_num:
        found["input_top_logprobs"] = [None, *top(request.input_top_logprobs)]
        found["output_top_logprobs"] = top(request.output_top_logprobs[:number])
    return found
