"""A service that may grow: it is laid out for its most ranks, of which fewer run at the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moesaic.config.args import ServerArgs
from moesaic.config.devices import expert_ranks


def grown(args: ServerArgs) -> ServerArgs:
    """The arguments with the sizes of the most ranks; the same if they do not ask for more, or
    cannot have them. `elastic_ep_initial_size` is then the number that runs at the start."""
    most, start = args.max_ep_size, args.tp_size
    if most is None or most == start or any(growth_problems(args)):
        return args
    attention_tp = start // groups(args)
    return replace(
        args,
        tp_size=most,
        ep_size=most,
        dp_size=most // attention_tp,
        attn_dp_size=most // attention_tp if args.attn_dp_size > 1 else args.attn_dp_size,
        enable_dp_attention=True,
        elastic_ep_initial_size=args.elastic_ep_initial_size or start,
    )


def groups(args: ServerArgs) -> int:
    """The attention groups of one replica."""
    return args.dp_size if args.enable_dp_attention else 1


def growth_problems(args: ServerArgs) -> Iterator[str]:
    """Why the service cannot grow as it is asked to."""
    most, start = args.max_ep_size, args.elastic_ep_initial_size
    name = "--max-ep-size" if most is not None else "--elastic-ep-initial-size"
    size = args.tp_size if start is None else start
    if most is None and start is None:
        return
    if args.elastic_ep_backend is None:
        shown = most if most is not None else start
        yield f"{name} {shown} needs --elastic-ep-backend mooncake"
    elif most is not None and most < args.tp_size:
        yield f"--max-ep-size is {most}: give at least --tp-size {args.tp_size}"
    elif start is not None and start > args.tp_size:
        yield f"--elastic-ep-initial-size is {start}: give at most --tp-size {args.tp_size}"
    elif most in (None, size) and start in (None, args.tp_size):
        return
    elif args.pp_size > 1:
        yield f"{name} with --pp-size {args.pp_size}: each stage needs all of its ranks"
    elif args.dp_size > 1 and not args.enable_dp_attention:
        yield f"{name} with {args.dp_size} replicas (--dp-size): give --enable-dp-attention, too"
    elif args.tp_size > 1 and groups(args) == 1:
        yield (
            f"{name} with --tp-size {args.tp_size}: all ranks compute each request; give "
            f"--enable-dp-attention --dp-size {args.tp_size}"
        )
    elif expert_ranks(args) != args.tp_size:
        yield (
            f"{name} with --ep-size {args.ep_size} below --tp-size {args.tp_size}: several ranks "
            f"share each expert; give --ep-size {args.tp_size}"
        )
    else:
        width = args.tp_size // groups(args)
        for flag, given in (("--max-ep-size", most), ("--elastic-ep-initial-size", start)):
            if given is not None and given % width:
                yield f"{flag} is {given}: attention groups have {width} ranks; give a multiple"
