"""`moesaic COMMAND …`: runs the command and prints errors as one line."""

import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import moesaic
from moesaic.config.flags import nearest


@dataclass(frozen=True)
class Command:
    """A subcommand, whose module has `run(argv) -> int` and is imported on use."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command("serve", "start the HTTP server", "moesaic.cli.serve"),
    Command("generate", "answer prompts on the command line", "moesaic.cli.generate"),
    Command("bench", "measure a server, or the engine alone", "moesaic.cli.bench"),
    Command("eval", "score a model, or a server, on problems with answers", "moesaic.cli.eval"),
    Command("quantize", "write a checkpoint anew with fewer bits", "moesaic.cli.quantize"),
    Command("tune", "find the fastest kernel configurations on this GPU", "moesaic.cli.tune"),
    Command(
        "doctor", "what this machine has, and how a model would be laid out", "moesaic.cli.doctor"
    ),
)
EXAMPLES = """\
Try it without a checkpoint; the weights are random, so the text is noise:
  moesaic generate --model-path tiny:qwen3_moe --prompt "Hello" --max-new-tokens 16

Ask a model in a local Hugging Face folder, in chat form:
  moesaic generate --model-path DIR --chat

Score a model on problems with known answers; nothing is downloaded:
  moesaic eval --model-path DIR --num 100

See what every rank would hold, and whether it fits, without loading anything:
  moesaic doctor tiny:deepseek_v3 --tp 4 --dp 4 --enable-dp-attention --moe-a2a-backend deepep

Every flag of the engine, with its default and what is built:
  moesaic generate --help
"""


def overview() -> str:
    """The output of `moesaic --help`."""
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: moesaic COMMAND [flags]",
            "",
            "Expert-parallel inference for Mixture-of-Experts language models.",
            "",
            "commands:",
            *lines,
            "",
            "moesaic COMMAND --help shows a command's flags; moesaic --version the version.",
            "",
            EXAMPLES,
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(), end="", file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"moesaic {moesaic.__version__}")
        return 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a limited locale must not lose an answer
            stream.reconfigure(errors="replace")
    try:
        return _run(words[0], words[1:])
    except BrokenPipeError:
        # The reader closed the pipe; keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(name: str, argv: Sequence[str]) -> int:
    for command in COMMANDS:
        if command.name == name:
            return int(importlib.import_module(command.module).run(argv))
    names = [command.name for command in COMMANDS]
    hint = nearest(name, names)
    raise ValueError(f"unknown command {name}: choose one of {', '.join(names)}{hint}")


if __name__ == "__main__":
    sys.exit(main())
