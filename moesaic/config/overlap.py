"""What --overlap is, from the flag and from the guide's two switches."""

from __future__ import annotations

from collections.abc import Iterator

from moesaic.config.args import ServerArgs
from moesaic.core.link import EmulatedLink

# What each switch asks for, the one that counts first: with two micro-batches shared experts are
# computed while tokens travel, too.
SWITCHES = {"enable_two_batch_overlap": "tbo", "enable_single_batch_overlap": "sbo"}
AGREE = {
    "enable_two_batch_overlap": ("tbo", "auto"),
    "enable_single_batch_overlap": ("sbo", "tbo", "auto"),
}


def resolved_overlap(args: ServerArgs) -> tuple[str, str]:
    """off, auto, sbo or tbo, and why."""
    asked, why = args.overlap or "off", "the default" if args.overlap is None else "--overlap"
    for field, value in SWITCHES.items():
        if args.overlap is None and getattr(args, field):
            asked, why = value, "--" + field.replace("_", "-")
            break
    if asked != "off" and args.tp_size == 1:
        return "off", "the experts of a layer are on one rank, which sends nothing"
    return asked, why


def asks_for_overlap(args: ServerArgs) -> bool:
    """Whether a flag asks for more than `off`."""
    if args.overlap is None:
        return any(getattr(args, field) for field in SWITCHES)
    return args.overlap != "off"


def link_of(args: ServerArgs) -> EmulatedLink | None:
    return None if args.emulate_link is None else EmulatedLink.parse(args.emulate_link)


def link_contradictions(args: ServerArgs) -> Iterator[str]:
    if args.emulate_link is None:
        return
    try:
        link_of(args)
    except ValueError as error:
        yield f"--emulate-link: {error}"
    if args.nnodes > 1:
        yield (
            f"--emulate-link with --nnodes {args.nnodes}: there is a network between nodes; start "
            "all ranks on one, or leave --emulate-link out"
        )
    if args.tp_size == 1:
        yield (
            "--emulate-link with one rank: it sends nothing to others; give --tp-size 2 or more, "
            "or leave --emulate-link out"
        )


def overlap_contradictions(args: ServerArgs) -> Iterator[str]:
    """The values that `resolved_overlap` makes of a switch do not contradict it."""
    if args.overlap == "auto" and args.pp_size > 1:
        yield (
            f"--overlap auto with --pp-size {args.pp_size}: it measures steps that have all layers "
            "at start; give --overlap sbo or tbo"
        )
    for field, values in AGREE.items():
        if getattr(args, field) and args.tp_size > 1 and args.overlap not in (None, *values):
            yield (
                f"--{field.replace('_', '-')} and --overlap {args.overlap} exclude each other: "
                "keep one"
            )
