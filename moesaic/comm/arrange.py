"""From resolved flags to a mesh. No torch here: whoever starts ranks needs none."""

from __future__ import annotations

from moesaic.comm.mesh import Mesh
from moesaic.config.args import ServerArgs


def mesh_of(args: ServerArgs) -> Mesh:
    """Of arguments that `resolve` has accepted and filled in."""
    tp, split = args.tp_size, args.enable_dp_attention
    dp = args.dp_size if split else 1
    return Mesh(
        tp=tp,
        pp=args.pp_size,
        dp=dp,
        ep=args.ep_size,
        replicas=1 if split else args.dp_size,
        nnodes=args.nnodes,
        dense_tp=tp if args.moe_dense_tp_size is None else args.moe_dense_tp_size,
        vocab_tp=tp // dp if args.enable_dp_lm_head else tp,
    )
