"""`moesaic generate …`: answers prompts from flags, from a pipe, or in a conversation."""

import importlib
import json
import logging
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moesaic.cli.common import add_model, join_node, prepare, read_args, start_engine
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.flags import flag
from moesaic.config.parser import FlagParser, merge
from moesaic.evals.args import TEMPERATURE, TOP_P

if TYPE_CHECKING:
    from moesaic.engine.engine import Engine

DESCRIPTION = """\
Answer prompts with a model, in this process or on several ranks.
Without --prompt: a conversation on a terminal, or one prompt a line from a pipe."""
Message = dict[str, str]
logger = logging.getLogger(__name__)
NOT_SAMPLING = ("prompt", "chat", "json")


@dataclass(frozen=True)
class GenerateArgs:
    """Unset sampling flags are not passed on: SamplingParams has the defaults."""

    GROUP: ClassVar[str] = "Prompts and sampling"

    prompt: tuple[str, ...] = flag((), "A prompt; may be given several times.", repeat=True)
    chat: bool = flag(False, "Wrap prompts in the model's chat template.")
    max_new_tokens: int | None = flag(None, "Most tokens of an answer.", at_least=0)
    temperature: float | None = flag(None, TEMPERATURE, at_least=0)
    top_p: float | None = flag(None, TOP_P, above=0, at_most=1)
    top_k: int | None = flag(None, "Keep this many tokens; -1: all.", at_least=1, also=(-1,))
    min_p: float | None = flag(
        None, "Drop tokens below this share of the likeliest one.", at_least=0, at_most=1
    )
    seed: int | None = flag(None, "Seed of the answers.", at_least=0)
    stop: tuple[str, ...] | None = flag(
        None, "End at this text; may be given several times.", repeat=True
    )
    n: int | None = flag(None, "Answers to each prompt.", at_least=1)
    ignore_eos: bool | None = flag(None, "Continue after the end-of-text token.")
    json: bool = flag(False, "Print one JSON object for each answer.")

    def sampling(self) -> dict[str, Any]:
        """The given sampling parameters."""
        values = {name: value for name, value in vars(self).items() if name not in NOT_SAMPLING}
        return {name: value for name, value in values.items() if value is not None}


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic generate", "moesaic generate MODEL [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_flags(GenerateArgs)
    parser.add_flags(ServerArgs, leave_out=(ServeArgs.GROUP,))
    given = parser.parse(argv)
    options, args = merge(GenerateArgs, given, {}), read_args(given)
    resolved = prepare(args, "--chat needs" if options.chat else "prompts here are texts and need")
    if resolved.node_rank > 0:
        return join_node(resolved)
    talk = not options.prompt and sys.stdin is not None and sys.stdin.isatty()
    prompts = () if talk else options.prompt or _piped_prompts()
    with start_engine(args) as engine:
        conversation = Conversation(engine, options)
        if talk:
            conversation.talk()
        else:
            conversation.answer(prompts)
    return 0


def _piped_prompts() -> tuple[str, ...]:
    lines = () if sys.stdin is None else sys.stdin
    prompts = tuple(line.rstrip("\r\n") for line in lines if line.strip())
    if not prompts:
        raise ValueError('no prompt: give --prompt "...", or one prompt a line on standard input')
    return prompts


@dataclass(frozen=True)
class Conversation:
    engine: "Engine"
    options: GenerateArgs

    def answer(self, prompts: Sequence[str]) -> None:
        """Answer all prompts in one batch and print the results in order."""
        sampling = self.options.sampling()
        if self.options.chat:
            ids = [self._chat_ids([_user(prompt)]) for prompt in prompts]
            results = self.engine.generate(input_ids=ids, sampling_params=sampling)
        else:
            tokenizer = self.engine.tokenizer
            if tokenizer is not None and tokenizer.chat.texts:
                logger.info("prompts are continued as plain text; --chat asks as a user does")
            results = self.engine.generate(prompt=list(prompts), sampling_params=sampling)
        assert isinstance(results, list)
        several = len(results) > 1
        for number, result in enumerate(results):
            prompt = prompts[number * len(prompts) // len(results)]
            self._print(prompt, result, several)
        reasons = [result["meta_info"]["finish_reason"] for result in results]
        failures = [reason["message"] for reason in reasons if reason["type"] == "abort"]
        if failures:
            raise RuntimeError(f"{len(failures)} of {len(results)} answers failed: {failures[0]}")

    def _print(self, prompt: str, result: dict[str, Any], several: bool) -> None:
        if self.options.json:
            print(json.dumps({"prompt": prompt, **result}, ensure_ascii=False))
        elif several:
            print(f">>> {prompt}\n{result['text']}\n")
        else:
            print(result["text"])

    def talk(self) -> None:
        """Answer prompts from the terminal until Ctrl-D; Ctrl-C stops an answer."""
        print(
            "Type a prompt; /new starts over, Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr
        )
        history: list[Message] = []
        for prompt in _typed_prompts():
            if prompt.strip() == "/new":
                history = []
                continue
            try:
                if self.options.json or self.options.n not in (None, 1):
                    self.answer([prompt])
                else:
                    history = self._turn(history, prompt)
            except (ValueError, RuntimeError) as error:
                print(f"error: {error}", file=sys.stderr)

    def _turn(self, history: list[Message], prompt: str) -> list[Message]:
        messages = [*history, _user(prompt)]
        sampling = self.options.sampling()
        if self.options.chat:
            ids = self._chat_ids(messages)
            stream = self.engine.generate(input_ids=ids, sampling_params=sampling, stream=True)
        else:
            stream = self.engine.generate(prompt=prompt, sampling_params=sampling, stream=True)
        assert isinstance(stream, Generator)
        text = _show_growing(stream)
        return [*messages, {"role": "assistant", "content": text}]

    def _chat_ids(self, messages: list[Message]) -> list[int]:
        """The templated conversation; the template adds the special tokens itself."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _show_growing(stream: Generator[dict[str, Any], None, None]) -> str:
    """Print an answer while it grows; Ctrl-C keeps the printed part."""
    shown = ""
    try:
        for piece in stream:
            print(piece["text"][len(shown) :], end="", flush=True)
            shown = piece["text"]
    except KeyboardInterrupt:
        stream.close()
    print()
    return shown


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _typed_prompts() -> Iterator[str]:
    with suppress(ImportError):  # not on every platform; adds editing and history to `input`
        importlib.import_module("readline")
    while True:
        try:
            line = input(">>> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line
