"""`moesaic router …`: one address in front of several instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moesaic.cli.common import requires_extra, set_up_logging
from moesaic.config.parser import FlagParser, merge, read_config
from moesaic.router.args import RouterArgs, contradiction

DESCRIPTION = """\
Serve one address in front of several instances, and send each request to one of them, or to a pair:

  moesaic router --worker-urls http://a:30000 http://b:30000 --policy cache_aware
  moesaic router --pd-disaggregation --prefill http://p:30000 8998 --decode http://d:30001

When an instance is lost, others do its requests, those in the middle of an answer, too."""


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic router", "moesaic router [flags]", DESCRIPTION)
    parser.add_flags(RouterArgs)
    given = parser.parse([*_with_ports(argv)])
    args = merge(RouterArgs, given, read_config(RouterArgs, given["config"]))
    if problem := contradiction(args):
        raise ValueError(problem)
    set_up_logging(args.log_level)
    modules = ("aiohttp", "starlette", "uvicorn")
    with requires_extra("the router", "server", *modules):
        from moesaic.router.app import serve
    return serve(args)


def _with_ports(argv: Sequence[str]) -> Iterator[str]:
    """`--prefill URL PORT` as one value, which argparse would take for two."""
    words = list(argv)
    while words:
        word = words.pop(0)
        yield word
        if word == "--prefill" and words:
            url = words.pop(0)
            has_port = bool(words) and (words[0].isdigit() or words[0] == "none")
            yield f"{url} {words.pop(0)}" if has_port else url
