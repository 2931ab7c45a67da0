"""Flags of `moesaic eval` that are not the engine's."""

from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.flags import flag

# Help of the sampling flags that `moesaic generate` shares.
TEMPERATURE = "0 takes the likeliest token."
TOP_P = "Keep the likeliest tokens up to this mass."


@dataclass(frozen=True)
class EvalArgs:
    GROUP: ClassVar[str] = "Problems and report"

    tasks: str | None = flag(
        None, "Tasks to draw problems from; unset: all, or none with --data.", metavar="A,B|all"
    )
    num: int | None = flag(
        None, "Problems of each task; unset: 100 drawn ones, or all of a file.", at_least=1
    )
    seed: int = flag(0, "Seed of the problems; training never uses them.", at_least=0)
    data: str | None = flag(
        None, "Your own problems, one JSON object a line.", metavar="FILE.jsonl"
    )
    out: str | None = flag(None, "Write figures and replies here.", metavar="FILE.json")
    max_new_tokens: int = flag(256, "Most tokens of a reply.", at_least=1)
    temperature: float = flag(0.0, TEMPERATURE, at_least=0)
    top_p: float = flag(1.0, TOP_P, above=0, at_most=1)
    system: str | None = flag(None, "System message for every problem without one.", metavar="TEXT")
    show_failures: int = flag(0, "Print this many wrong replies.", metavar="K", at_least=0)
    write_data: str | None = flag(
        None, "Write the problems here and stop; needs no model.", metavar="FILE.jsonl"
    )
    compare: tuple[str, ...] | None = flag(
        None, "Compare two files of --out and stop.", metavar="FILE.json"
    )
    disable_tqdm: bool = flag(False, "Show no progress bar.")


@dataclass(frozen=True)
class ServerTargetArgs:
    GROUP: ClassVar[str] = "A server instead of --model-path"

    base_url: str | None = flag(None, "Address of a server with OpenAI's API.", metavar="URL")
    remote_model: str | None = flag(
        None,
        "Model to name in requests; unset: the first that the server lists.",
        aliases=("--model",),
        metavar="NAME",
    )
    api_key: str | None = flag(
        None, "Key of the server; unset: that in OPENAI_API_KEY.", secret=True
    )
    concurrency: int = flag(64, "Most requests at once.", at_least=1)
    timeout: float = flag(600.0, "Timeout in seconds of one attempt.", metavar="S", above=0)
    extra_body: str | None = flag(None, "Merged into the body of every request.", metavar="JSON")
