"""`moesaic generate …`: answers prompts from flags, from a pipe, or in a conversation."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moesaic.cli.common import (
    add_model,
    check_nodes,
    join_node,
    read_args,
    require_tokenizer,
    set_up_logging,
)
from moesaic.cli.sampling import GenerateArgs
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.parser import FlagParser, merge
from moesaic.config.resolve import resolve

if TYPE_CHECKING:
    from moesaic.engine.engine import Engine

DESCRIPTION = """\
Answer prompts with a model, in this process or on ranks of its own.
Without --prompt: a conversation on a terminal, or one prompt a line from a pipe."""
Message = dict[str, str]


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic generate", "moesaic generate MODEL [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_flags(GenerateArgs)
    parser.add_flags(ServerArgs, leave_out=(ServeArgs.GROUP,))
    given = parser.parse(argv)
    asked, args = merge(GenerateArgs, given, {}), read_args(given)
    resolved = resolve(args)  # before anything slow, so that a wrong flag is answered at once
    check_nodes(resolved)
    if resolved.node_rank > 0:
        set_up_logging(args.log_level)
        return join_node(resolved)
    require_tokenizer(resolved, "--chat needs" if asked.chat else "prompts here are texts and need")
    talk = not asked.prompt and sys.stdin is not None and sys.stdin.isatty()
    prompts = () if talk else asked.prompt or _piped_prompts()
    set_up_logging(args.log_level)
    with _start(args) as engine:
        conversation = Conversation(engine, asked)
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


def _start(args: ServerArgs) -> Engine:
    from moesaic.engine.engine import Engine

    return Engine(**asdict(args))


@dataclass(frozen=True)
class Conversation:
    """An engine and what was asked of it."""

    engine: Engine
    asked: GenerateArgs

    def answer(self, prompts: Sequence[str]) -> None:
        """Answer all prompts in one batch and print the results in order."""
        sampling = self.asked.sampling()
        if self.asked.chat:
            ids = [self._chat_ids([_user(prompt)]) for prompt in prompts]
            results = self.engine.generate(input_ids=ids, sampling_params=sampling)
        else:
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
        if self.asked.json:
            print(json.dumps({"prompt": prompt, **result}, ensure_ascii=False))
        elif several:
            print(f">>> {prompt}\n{result['text']}\n")
        else:
            print(result["text"])

    def talk(self) -> None:
        """Prompts from the terminal until its end (Ctrl-D); Ctrl-C cuts an answer short."""
        print(
            "Type a prompt; /new starts over, Ctrl-C cuts an answer short, Ctrl-D ends.",
            file=sys.stderr,
        )
        history: list[Message] = []
        for prompt in _typed_prompts():
            if prompt.strip() == "/new":
                history = []
                continue
            try:
                if self.asked.json or self.asked.n not in (None, 1):
                    self.answer([prompt])
                else:
                    history = self._turn(history, prompt)
            except (ValueError, RuntimeError) as error:
                print(f"error: {error}", file=sys.stderr)

    def _turn(self, history: list[Message], prompt: str) -> list[Message]:
        messages = [*history, _user(prompt)]
        sampling = self.asked.sampling()
        if self.asked.chat:
            ids = self._chat_ids(messages)
            stream = self.engine.generate(input_ids=ids, sampling_params=sampling, stream=True)
        else:
            stream = self.engine.generate(prompt=prompt, sampling_params=sampling, stream=True)
        assert isinstance(stream, Generator)
        text = _show_growing(stream)
        return [*messages, {"role": "assistant", "content": text}]

    def _chat_ids(self, messages: list[Message]) -> list[int]:
        """The templated conversation; the template has written the special tokens itself."""
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        return tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _show_growing(stream: Generator[dict[str, Any], None, None]) -> str:
    """Print an answer while it grows; what has been printed by then is the answer."""
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
    with suppress(ImportError):  # not on every platform; gives `input` editing and history
        importlib.import_module("readline")
    while True:
        try:
            line = input(">>> ")
        except EOFError:
            print()
            return
        if line.strip():
            yield line
