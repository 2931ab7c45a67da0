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
    if args.pd_disaggregation:
        if args.worker_urls:
            return "--worker-urls and --pd-disaggregation exclude each other: keep one"
        if not (args.prefill and args.decode):
            return "--pd-disaggregation needs --prefill URL [PORT] and --decode URL"
    elif args.prefill or args.decode:
        return "--prefill and --decode need --pd-disaggregation"
    elif not args.worker_urls:
        return "there is nothing to route to: give --worker-urls URL …, or --pd-disaggregation"
    return ""
