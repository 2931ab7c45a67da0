"""`moesaic eval …`: how many problems a model, or a server, gets right."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.common import (
    add_model,
    join_node,
    prepare,
    read_args,
    requires_extra,
    set_up_logging,
    start_engine,
)
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.flags import FlagSpec, specs
from moesaic.config.parser import FlagParser, merge, sglang_values
from moesaic.config.sglang import sglang_flags
from moesaic.evals.args import EvalArgs, ServerTargetArgs
from moesaic.evals.server_url import ServerUrl
from moesaic.loadgen.endpoints import parse_extra_body

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
# Flags of the engine that also apply to a server.
SHARED_FLAGS = ("log_level",)


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic eval", "moesaic eval [MODEL] [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_flags(EvalArgs)
    parser.add_flags(ServerTargetArgs)
    parser.add_flags(ServerArgs)
    given = parser.parse(argv)
    args, server = merge(EvalArgs, given, {}), merge(ServerTargetArgs, given, {})
    if args.compare is not None:
        return _compare(args.compare)
    if args.write_data is not None:
        return _write_data(args, args.write_data)
    if server.base_url is not None:
        return _ask_server(args, server, server.base_url, given)
    return _ask_engine(args, given, server)


def _compare(paths: Sequence[str]) -> int:
    from moesaic.evals.compare import block, read_result

    if len(paths) != 2:
        raise ValueError(f"--compare has {len(paths)} files: give two, A.json B.json")
    print(block((paths[0], paths[1]), read_result(paths[0]), read_result(paths[1])))
    return 0


def _problems(args: EvalArgs) -> list[Problem]:
    """The problems; errors in them or in the files to write are reported before a model loads."""
    from moesaic.evals.data import check_target, choose, is_text

    for flag, path in (("--out", args.out), ("--write-data", args.write_data)):
        if path is not None:
            check_target(flag, path)
    if args.system is not None and not (args.system.strip() and is_text(args.system)):
        raise ValueError(f"--system is {args.system!r}: give a text in UTF-8 that is not empty")
    return choose(args.tasks, args.data, args.seed, args.num, not args.disable_tqdm)


def _write_data(args: EvalArgs, path: str) -> int:
    from moesaic.evals.data import write_problems

    problems = _problems(args)
    write_problems(path, problems)
    print(f"wrote {len(problems)} problems to {path}")
    return 0


def _ask_server(
    args: EvalArgs, server: ServerTargetArgs, url: str, given: Mapping[str, Any]
) -> int:
    address = ServerUrl.of(url)
    path = given["model"] or given.get("model_path")
    if path is not None:
        raise ValueError(
            f"--base-url {address.url} and --model-path {path}: keep one; to name the model of a "
            "server give --model"
        )
    shared = {*SHARED_FLAGS, *specs(ServerTargetArgs)}
    unused = [spec.name for spec in _given(ServerArgs, given) if spec.field not in shared]
    unused += [sglang_flags()[field].spec.name for field in sglang_values(ServerArgs, given, {})]
    if given["config"] is not None:
        unused.append("--config")
    if unused:
        raise ValueError(f"{', '.join(unused)}: for an engine, not for a server at --base-url")
    extra = parse_extra_body("--extra-body", server.extra_body)
    problems = _problems(args)
    set_up_logging(given.get("log_level", "info"))
    with requires_extra("eval --base-url", "bench", "aiohttp"):
        from moesaic.evals.http import HttpAsker
    public = replace(server, base_url=address.url)
    asker = HttpAsker(address, server, extra)
    return _evaluate(asker, problems, args, _changed(args) | _changed(public))


def _ask_engine(args: EvalArgs, given: Mapping[str, Any], server: ServerTargetArgs) -> int:
    shared = ("remote_model", "api_key")
    unused = [spec.name for spec in _given(ServerTargetArgs, given) if spec.field not in shared]
    if unused:
        raise ValueError(f"{', '.join(unused)}: for a server, and there is no --base-url")
    if server.remote_model is not None:  # --model is elsewhere an alias of --model-path
        if (other := given["model"] or given.get("model_path")) not in (None, server.remote_model):
            raise ValueError(f"two models, {other} and --model {server.remote_model}: keep one")
        given = {**given, "model": None, "model_path": server.remote_model}
    engine_args = read_args(given)
    if not engine_args.model_path:
        raise ValueError(
            "nothing to evaluate: give --model-path DIR, or --base-url URL for a server"
        )
    resolved = prepare(engine_args, "an evaluation needs")
    _log_unused(given)
    if resolved.node_rank > 0:
        return join_node(resolved)
    problems = _problems(args)
    with start_engine(engine_args) as engine:
        return _evaluate(engine, problems, args, _changed(args) | _changed(engine_args))


def _log_unused(given: Mapping[str, Any]) -> None:
    """A command line of `serve` works here; its HTTP flags have no effect."""
    names = [spec.name for spec in _given(ServerArgs, given) if spec.group == ServeArgs.GROUP]
    if names:
        logger.info("%s: not used, as no server is started", ", ".join(names))


def _given(cls: type, given: Mapping[str, Any]) -> list[FlagSpec]:
    return [spec for field, spec in specs(cls).items() if field in given]


def _changed(flags: object) -> dict[str, Any]:
    """Flags that differ from their defaults, without secrets."""
    return {
        spec.field: value
        for spec in specs(type(flags)).values()
        if (value := getattr(flags, spec.field)) != spec.default and not spec.flag.secret
    }


def _evaluate(
    target: Engine | Asker, problems: Sequence[Problem], args: EvalArgs, arguments: dict[str, Any]
) -> int:
    from moesaic.evals import report
    from moesaic.evals.ask import Options
    from moesaic.evals.data import DRAWN, write_whole
    from moesaic.evals.run import evaluate

    drawn = DRAWN if args.tasks or args.data is None else None
    options = Options(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        system=args.system,
        seed=args.seed,
        progress=not args.disable_tqdm,
        num=args.num or drawn,
        arguments=arguments,
    )
    result = evaluate(target, problems, options)
    unwritten = ""
    if args.out is not None:  # first: a closed pipe must not lose it
        try:
            write_whole(Path(args.out), result.to_json())
        except OSError as error:
            unwritten = f"error: --out {args.out} could not be written: {error}"
    if args.show_failures:
        print(report.failures(result, args.show_failures) + "\n")
    print(report.table(result))
    for line in report.errors(result):
        print(line, file=sys.stderr)
    if unwritten:
        print(unwritten, file=sys.stderr)
    if not result.complete:
        return INTERRUPTED
    return 1 if result.failed or unwritten else 0
