"""`moesaic eval …`: how many problems a model, or a server, gets right."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.common import (
    add_model,
    check_nodes,
    join_node,
    read_args,
    require_tokenizer,
    set_up_logging,
)
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.flags import specs
from moesaic.config.parser import FlagParser, merge
from moesaic.config.resolve import resolve
from moesaic.evals.args import EvalArgs, ServerTargetArgs
from moesaic.evals.server_url import ServerUrl

if TYPE_CHECKING:
    from moesaic.engine.engine import Engine
    from moesaic.evals.ask import Asker
    from moesaic.evals.tasks.problem import Problem

logger = logging.getLogger(__name__)

DESCRIPTION = """\
Ask a model, or a server, problems with known answers, and count the right ones.

  moesaic eval --model-path DIR --tasks all --num 200 --out scores.json
  moesaic eval --base-url http://127.0.0.1:30000 --data mine.jsonl
  moesaic eval --base-url URL --tasks words --system "End with #### and the answer alone."
  moesaic eval --compare scores.json others.json"""
INTERRUPTED = 130
# What may be said besides of a server: everything else is the engine's.
BESIDES_URL = ("log_level",)


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic eval", "moesaic eval [MODEL] [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_flags(EvalArgs)
    parser.add_flags(ServerTargetArgs)
    parser.add_flags(ServerArgs)
    given = parser.parse(argv)
    asked, server = merge(EvalArgs, given, {}), merge(ServerTargetArgs, given, {})
    if asked.compare is not None:
        return _compare(asked.compare)
    if asked.write_data is not None:
        return _write_data(asked, asked.write_data)
    if server.base_url is not None:
        return _ask_server(asked, server, server.base_url, given)
    return _ask_engine(asked, given, server)


def _compare(paths: Sequence[str]) -> int:
    from moesaic.evals.compare import block, read_result

    if len(paths) != 2:
        raise ValueError(f"--compare has {len(paths)} files: give two, A.json B.json")
    print(block((paths[0], paths[1]), read_result(paths[0]), read_result(paths[1])))
    return 0


def _problems(asked: EvalArgs) -> list[Problem]:
    """All that can be wrong with them, and with the files to write, is said before a model is
    loaded."""
    from moesaic.evals.data import check_target, choose, is_text

    for flag, path in (("--out", asked.out), ("--write-data", asked.write_data)):
        if path is not None:
            check_target(flag, path)
    if asked.system is not None and not (asked.system.strip() and is_text(asked.system)):
        raise ValueError(f"--system is {asked.system!r}: give a text in UTF-8 that is not empty")
    return choose(asked.tasks, asked.data, asked.seed, asked.num, not asked.disable_tqdm)


def _write_data(asked: EvalArgs, path: str) -> int:
    from moesaic.evals.data import write_problems

    problems = _problems(asked)
    write_problems(path, problems)
    print(f"wrote {len(problems)} problems to {path}")
    return 0


def _ask_server(
    asked: EvalArgs, server: ServerTargetArgs, url: str, given: Mapping[str, Any]
) -> int:
    place = ServerUrl.of(url)
    path = given["model"] or given.get("model_path")
    if path is not None:
        raise ValueError(
            f"--base-url {place.url} and --model-path {path}: keep one; to name the model of a "
            "server give --model"
        )
    idle = [
        spec.name
        for field, spec in specs(ServerArgs).items()
        if field in given and field not in {*BESIDES_URL, *specs(ServerTargetArgs)}
    ]
    if given["config"] is not None:
        idle.append("--config")
    if idle:
        raise ValueError(f"{', '.join(idle)}: for an engine, not for a server at --base-url")
    extra = _extra_body(server.extra_body)
    problems = _problems(asked)
    set_up_logging(given.get("log_level", "info"))
    try:
        from moesaic.evals.http import HttpAsker, ServerAccess
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise ValueError(
            "eval --base-url needs aiohttp, which is not installed: pip install 'moesaic[bench]'"
        ) from None
    access = ServerAccess(
        server.remote_model, server.api_key, server.concurrency, server.timeout, extra
    )
    public = replace(server, base_url=place.url)
    return _evaluate(HttpAsker(place, access), problems, asked, _changed(asked) | _changed(public))


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        extra = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ValueError('--extra-body is not an object: give {"NAME": VALUE}')
    return extra


def _ask_engine(asked: EvalArgs, given: Mapping[str, Any], server: ServerTargetArgs) -> int:
    idle = [spec.name for field, spec in specs(ServerTargetArgs).items() if field in given]
    if idle := [name for name in idle if name not in ("--remote-model", "--api-key")]:
        raise ValueError(f"{', '.join(idle)}: for a server, and there is no --base-url")
    if server.remote_model is not None:  # --model, which elsewhere is the same as --model-path
        if (other := given["model"] or given.get("model_path")) not in (None, server.remote_model):
            raise ValueError(f"two models, {other} and --model {server.remote_model}: keep one")
        given = {**given, "model": None, "model_path": server.remote_model}
    args = read_args(given)
    if not args.model_path:
        raise ValueError(
            "nothing to evaluate: give --model-path DIR, or --base-url URL for a server"
        )
    resolved = resolve(args)
    check_nodes(resolved)
    require_tokenizer(resolved, "an evaluation needs")
    set_up_logging(args.log_level)
    _say_unused(given)
    if resolved.node_rank > 0:
        return join_node(resolved)
    problems = _problems(asked)
    from moesaic.engine.engine import Engine

    with Engine(**asdict(args)) as engine:
        return _evaluate(engine, problems, asked, _changed(asked) | _changed(args))


def _say_unused(given: Mapping[str, Any]) -> None:
    """A command line that serves a model evaluates it as well, without what is HTTP's alone."""
    fields = specs(ServerArgs).items()
    names = [
        spec.name for field, spec in fields if field in given and spec.group == ServeArgs.GROUP
    ]
    if names:
        logger.info("%s: not used, as no server is started", ", ".join(names))


def _changed(args: object) -> dict[str, Any]:
    """Flags that differ from their defaults, without secrets."""
    return {
        spec.field: value
        for spec in specs(type(args)).values()
        if (value := getattr(args, spec.field)) != spec.default and not spec.flag.secret
    }


def _evaluate(
    target: Engine | Asker,
    problems: Sequence[Problem],
    asked: EvalArgs,
    arguments: dict[str, Any],
) -> int:
    from moesaic.evals import report
    from moesaic.evals.ask import Options
    from moesaic.evals.data import DRAWN, write_whole
    from moesaic.evals.run import evaluate

    drawn = DRAWN if asked.tasks or asked.data is None else None
    options = Options(
        max_new_tokens=asked.max_new_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        system=asked.system,
        seed=asked.seed,
        progress=not asked.disable_tqdm,
        num=asked.num or drawn,
        arguments=arguments,
    )
    result = evaluate(target, problems, options)
    unwritten = ""
    if asked.out is not None:  # first: it must not be lost to a pipe that closes
        try:
            write_whole(Path(asked.out), result.to_json())
        except OSError as error:
            unwritten = f"error: --out {asked.out} could not be written: {error}"
    if asked.show_failures:
        print(report.failures(result, asked.show_failures) + "\n")
    print(report.table(result))
    for line in report.errors(result):
        print(line, file=sys.stderr)
    if unwritten:
        print(unwritten, file=sys.stderr)
    if not result.complete:
        return INTERRUPTED
    return 1 if result.failed or unwritten else 0
