"""Flags of `moesaic router`, with the names of SGLang's router."""

from dataclasses import dataclass
from typing import ClassVar

from moesaic.config.flags import flag

POLICIES = ("random", "round_robin", "cache_aware", "power_of_two", "least_tokens")
DEFAULT_BOOTSTRAP_PORT = 8998


@dataclass(frozen=True)
class RouterArgs:
    GROUP: ClassVar[str] = "Router"

    host: str = flag("127.0.0.1", "Address to listen at.")
    port: int = flag(30000, "Port to listen at; 0: a free one.", at_least=0, at_most=65535)
    worker_urls: tuple[str, ...] = flag(
        (), "Servers that are alike: each request goes to one of them.", metavar="URL"
    )
    pd_disaggregation: bool = flag(
        False, "Each request goes to a prefill and a decode instance: give --prefill and --decode."
    )
    prefill: tuple[str, ...] = flag(
        (),
        "A prefill instance, and its --disaggregation-bootstrap-port if that is not 8998: "
        "--prefill http://HOST:30000 8999. May be repeated.",
        metavar="URL",
        repeat=True,
    )
    decode: tuple[str, ...] = flag(
        (), "A decode instance. May be repeated.", metavar="URL", repeat=True
    )
    service_discovery_file: str | None = flag(
        None,
        "A JSON file with the instances, which may change while the router runs: "
        '{"prefill": ["http://HOST:30000 8998"], "decode": ["http://HOST:30000"]}, or {"workers": '
        "[…]}.",
        metavar="PATH",
    )
    service_discovery: bool = flag(
        False, "Use the pods of this Kubernetes cluster that have the labels of the selectors."
    )
    selector: tuple[str, ...] = flag(
        (), "Labels of the pods of servers that are alike.", metavar="KEY=VALUE"
    )
    prefill_selector: tuple[str, ...] = flag(
        (),
        "Labels of the pods of prefill instances. Their annotation sglang.ai/bootstrap-port is the "
        "bootstrap port if that is not 8998.",
        metavar="KEY=VALUE",
    )
    decode_selector: tuple[str, ...] = flag(
        (), "Labels of the pods of decode instances.", metavar="KEY=VALUE"
    )
    service_discovery_port: int = flag(
        80, "The port of the servers in the pods.", at_least=1, at_most=65535
    )
    service_discovery_namespace: str | None = flag(
        None, "The namespace of the pods; unset: all, which the account must be allowed to see."
    )
    policy: str = flag(
        "cache_aware",
        "How an instance is chosen: at random, in turn, the one that probably has the beginning of "
        "the prompt cached unless it is busier than others, the less busy one of two at random, or "
        "the one with the least text to compute and write.",
        choices=POLICIES,
    )
    prefill_policy: str | None = flag(
        None, "The same for prefill instances; unset: --policy.", choices=POLICIES
    )
    decode_policy: str | None = flag(
        None, "The same for decode instances; unset: --policy.", choices=POLICIES
    )
    request_timeout_secs: float = flag(
        1800.0, "How long an instance may be silent in the middle of an answer.", above=0
    )
    retry_max_retries: int = flag(
        5, "How often a request is sent again, to other instances.", at_least=0
    )
    health_check_interval_secs: float = flag(
        2.0, "Seconds between two checks of an instance's /health.", above=0
    )
    health_check_timeout_secs: float = flag(
        5.0, "How long such a check may take; the instance then counts as gone.", above=0
    )
    log_level: str = flag(
        "info", "How much is logged.", choices=("debug", "info", "warning", "error")
    )


def contradiction(args: RouterArgs) -> str:
    """What is wrong with the flags; empty if nothing is."""
    if problem := _discovery_problem(args):
        return problem
    finds = args.service_discovery or args.service_discovery_file is not None
    if args.pd_disaggregation:
        if args.worker_urls:
            return "--worker-urls and --pd-disaggregation exclude each other: keep one"
        if not finds and not (args.prefill and args.decode):
            return "--pd-disaggregation needs --prefill URL [PORT] and --decode URL"
    elif args.prefill or args.decode:
        return "--prefill and --decode need --pd-disaggregation"
    elif not finds and not args.worker_urls:
        return (
            "there is nothing to route to: give --worker-urls URL …, --pd-disaggregation, "
            "--service-discovery or --service-discovery-file"
        )
    return ""


def _discovery_problem(args: RouterArgs) -> str:
    selectors = {
        "--selector": args.selector,
        "--prefill-selector": args.prefill_selector,
        "--decode-selector": args.decode_selector,
    }
    for name, labels in selectors.items():
        if labels and not args.service_discovery:
            return f"{name} needs --service-discovery"
        for label in labels:
            key, is_there, _ = label.partition("=")
            if not key or not is_there or "," in label:
                return f"{name} {label}: give KEY=VALUE"
    if not args.service_discovery:
        return ""
    if args.service_discovery_file is not None:
        return "--service-discovery and --service-discovery-file exclude each other: keep one"
    pair = ("--prefill-selector", "--decode-selector")
    wanted = pair if args.pd_disaggregation else ("--selector",)
    if not all(selectors[name] for name in wanted):
        return f"--service-discovery needs {' and '.join(wanted)}"
    if unused := [name for name, labels in selectors.items() if labels and name not in wanted]:
        return f"{unused[0]} is not used with these flags: give {' and '.join(wanted)}"
    return ""
