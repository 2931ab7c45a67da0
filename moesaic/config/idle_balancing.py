"""Flags of balancing that have nothing to act on."""

from __future__ import annotations

from moesaic.config.args import ServerArgs
from moesaic.config.flags import show, specs


def idle_balancing(args: ServerArgs) -> str:
    """A warning that names the --eplb flags which are given without --enable-eplb; else empty. The
    algorithm also plans a first placement from recorded loads, and the period is also how many
    passes a recorder keeps."""
    if args.enable_eplb:
        return ""
    used = {
        "eplb_algorithm": args.init_expert_location != "trivial",
        "eplb_rebalance_num_iterations": args.expert_distribution_recorder_mode is not None,
    }
    idle = [
        show(spec, getattr(args, spec.field))
        for spec in specs(ServerArgs).values()
        if spec.field.startswith("eplb_")
        and getattr(args, spec.field) != spec.default
        and not used.get(spec.field, False)
    ]
    if not idle:
        return ""
    return f"{', '.join(idle)}: nothing moves experts without --enable-eplb: give it, too"
