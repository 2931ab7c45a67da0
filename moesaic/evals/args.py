"""Flags of `moesaic eval` that are not the engine's."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from moesaic.config.flags import Flag

# Sampling flags that `moesaic generate` shares.
TEMPERATURE = Flag("0 takes the likeliest token.", at_least=0)
TOP_P = Flag("Keep the likeliest tokens up to this mass.", above=0, at_most=1)


@dataclass(frozen=True)
class EvalArgs:
    GROUP: ClassVar[str] = "Problems and report"

    tasks: Annotated[
        str | None,
        Flag("Tasks to draw problems from; unset: all, or none with --data.", metavar="A,B|all"),
    ] = None
    num: Annotated[
        int | None,
        Flag("Problems of each task; unset: 100 drawn ones, or all of a file.", at_least=1),
    ] = None
    seed: Annotated[int, Flag("Seed of the problems; training never uses them.", at_least=0)] = 0
    data: Annotated[
        str | None, Flag("Your own problems, one JSON object a line.", metavar="FILE.jsonl")
    ] = None
    out: Annotated[str | None, Flag("Write figures and replies here.", metavar="FILE.json")] = None
    max_new_tokens: Annotated[int, Flag("Most tokens of a reply.", at_least=1)] = 256
    temperature: Annotated[float, TEMPERATURE] = 0.0
    top_p: Annotated[float, TOP_P] = 1.0
    system: Annotated[
        str | None, Flag("System message for every problem without one.", metavar="TEXT")
    ] = None
    show_failures: Annotated[
        int, Flag("Print this many wrong replies.", metavar="K", at_least=0)
    ] = 0
    write_data: Annotated[
        str | None, Flag("Write the problems here and stop; needs no model.", metavar="FILE.jsonl")
    ] = None
    compare: Annotated[
        tuple[str, ...] | None, Flag("Compare two files of --out and stop.", metavar="FILE.json")
    ] = None
    disable_tqdm: Annotated[bool, Flag("Show no progress bar.")] = False


@dataclass(frozen=True)
class ServerTargetArgs:
    GROUP: ClassVar[str] = "A server instead of --model-path"

    base_url: Annotated[
        str | None, Flag("Address of a server with OpenAI's API.", metavar="URL")
    ] = None
    remote_model: Annotated[
        str | None,
        Flag(
            "Model to name in requests; unset: the first that the server lists.",
            aliases=("--model",),
            metavar="NAME",
        ),
    ] = None
    api_key: Annotated[
        str | None, Flag("Key of the server; unset: that in OPENAI_API_KEY.", secret=True)
    ] = None
    concurrency: Annotated[int, Flag("Most requests at once.", at_least=1)] = 64
    timeout: Annotated[float, Flag("Timeout in seconds of one attempt.", metavar="S", above=0)] = (
        600.0
    )
    extra_body: Annotated[
        str | None, Flag("Merged into the body of every request.", metavar="JSON")
    ] = None
