"""`moesaic COMMAND …`: runs the command and prints errors as one line."""

import importlib
import io
import os
import sys
from collections.abc import Sequence

import moesaic
from moesaic.config.flags import nearest

# Each command is a module of this package with `run(argv) -> int`, which is imported on use.
COMMANDS = {
    "serve": "start the HTTP server",
    "router": "serve one address in front of several servers",
    "generate": "answer prompts on the command line",
    "bench": "measure a server, or the engine alone",
    "eval": "score a model, or a server, on problems with answers",
    "quantize": "write a checkpoint anew with fewer bits",
    "tune": "find the fastest kernel configurations on this GPU",
    "balance": "compare placements of experts on recorded or generated routing",
    "doctor": "what this machine has, and how a model would be laid out",
}
EXAMPLES = """\
Try it without a checkpoint; the weights are random, so the text is noise:
  moesaic generate --model-path tiny:qwen3_moe --prompt "Hello" --max-new-tokens 16

Ask a model in a local Hugging Face folder, in chat form:
  moesaic generate --model-path DIR --chat

Score a model on problems with known answers; nothing is downloaded:
  moesaic eval --model-path DIR --num 100

See what every rank would hold, and whether it fits, without loading anything:
  moesaic doctor tiny:deepseek_v3 --tp 4 --dp 4 --enable-dp-attention --moe-a2a-backend deepep

Compare placements of 256 experts on 32 ranks under a skewed load, without a model:
  moesaic balance --ep 32 --redundant 0 32

Every flag of the engine, with its default and what is built:
  moesaic generate --help
"""


def overview() -> str:
    """The output of `moesaic --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {help}" for name, help in COMMANDS.items()]
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
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ValueError(f"unknown command {name}: choose one of {known}{nearest(name, COMMANDS)}")
    return int(importlib.import_module(f"moesaic.cli.{name}").run(argv))


if __name__ == "__main__":
    sys.exit(main())
