"""Asks an engine in this process; http.py asks a server."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from moesaic.evals.tasks.problem import ChatTurn, Problem

if TYPE_CHECKING:
    from moesaic.engine.engine import Engine

logger = logging.getLogger(__name__)

SYSTEM_ROLES: Final = ("system", "developer")


@dataclass(frozen=True, slots=True)
class Options:
    """How problems are asked."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    system: str | None = None  # for problems without a system message
    concurrency: int | None = None  # None: as many as the target accepts
    progress: bool = True
    num: int | None = None  # recorded only, as is `arguments`
    arguments: dict[str, Any] | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters; a seed makes random runs repeatable."""
        seed = {"seed": self.seed} if self.temperature > 0 else {}
        top_p = {"top_p": self.top_p} if self.top_p < 1 else {}
        return {"temperature": self.temperature, **top_p, **seed}

    def conversation(self, problem: Problem) -> tuple[ChatTurn, ...]:
        turns = problem.conversation
        if self.system is None or any(turn.role in SYSTEM_ROLES for turn in turns):
            return turns
        return (ChatTurn("system", self.system), *turns)


@dataclass(frozen=True, slots=True)
class ModelReply:
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    latency_s: float = 0.0
    error: str = ""  # why there is no reply


class Asker(ABC):
    target: str  # the path of a model, or an address
    limit: int | None = None  # most problems at once

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Runs around all problems, on their event loop."""
        yield

    @abstractmethod
    async def ask(self, problem: Problem, options: Options) -> ModelReply:
        """Ask a problem; the reply holds errors, too."""


class EngineAsker(Asker):
    """Asks all problems at once; the scheduler batches them."""

    def __init__(self, engine: Engine) -> None:
        if engine.tokenizer is None:
            raise ValueError("an evaluation needs a tokenizer: leave out --skip-tokenizer-init")
        self._engine, self._tokenizer = engine, engine.tokenizer
        self.target = engine.args.served_model_name or engine.args.model_path
        if engine.args.max_queued_requests is not None:
            self.limit = engine.max_running
        if not self._tokenizer.templates:
            logger.warning("%s has no chat template: prompts are plain text", self.target)

    async def ask(self, problem: Problem, options: Options) -> ModelReply:
        from moesaic.engine.frontend.inputs import GenerateInput

        sampling = {"max_new_tokens": options.max_new_tokens, **options.sampling}
        try:
            call = GenerateInput(
                input_ids=self._tokens(options.conversation(problem)), sampling_params=sampling
            )
            async with aclosing(self._engine.stream(call)) as stream:
                pieces = [piece async for piece in stream]
        except (ValueError, RuntimeError) as error:
            return ModelReply(error=str(error))
        request, text = pieces[-1].request, pieces[-1].text
        reason = request.finish_reason
        assert reason is not None and request.finished is not None
        return ModelReply(
            text,
            reason.type,
            request.prompt_len,
            request.num_output,
            request.finished - request.created,
            (reason.message or "aborted") if reason.type == "abort" else "",
        )

    def _tokens(self, conversation: Sequence[ChatTurn]) -> list[int]:
        if not self._tokenizer.templates:
            text = "\n".join(message.content for message in conversation)
            return self._tokenizer.encode(text)
        turns = [{"role": message.role, "content": message.content} for message in conversation]
        text = self._tokenizer.apply_chat_template(turns)
        self._engine.limits.check_chars(len(text))
        return self._tokenizer.encode(text, add_special_tokens=False)
