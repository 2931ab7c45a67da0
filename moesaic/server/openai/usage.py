"""Token counts of one request's answers."""

from __future__ import annotations

from moesaic.engine.frontend.outputs import RequestUpdate
from moesaic.server.openai.response_types import CompletionDetails, TokensDetails, Usage


class UsageCount:
    """`samples`: answers per prompt, which counts once. `report_cached`: adds cached tokens."""

    def __init__(self, samples: int, report_cached: bool) -> None:
        self._samples, self._report_cached = samples, report_cached
        self._prompts: dict[int, tuple[int, int]] = {}
        self._outputs: dict[int, int] = {}
        self._completion = 0
        self.reasoning: int | None = None

    def record(self, update: RequestUpdate) -> None:
        number, request = update.progress.num_output, update.request
        self._completion += number - self._outputs.get(update.index, 0)
        self._outputs[update.index] = number
        prompt, sample = divmod(update.index, self._samples)
        if sample == 0 or prompt not in self._prompts:
            self._prompts[prompt] = (request.prompt_len, request.cached_tokens)

    def num_output(self, index: int) -> int:
        """Tokens of one answer."""
        return self._outputs.get(index, 0)

    def usage(self) -> Usage:
        prompt = sum(length for length, _ in self._prompts.values())
        usage = Usage(prompt, self._completion, prompt + self._completion)
        if self._report_cached:
            cached = sum(cached for _, cached in self._prompts.values())
            usage.prompt_tokens_details = TokensDetails(cached)
        if self.reasoning is not None:
            usage.completion_tokens_details = CompletionDetails(self.reasoning)
        return usage
