"""From resolved flags to a mesh. No torch here: whoever starts ranks needs none."""

from __future__ import annotations

from moesaic.comm.mesh import Mesh
from moesaic.config.args import ServerArgs


def mesh_of(args: ServerArgs) -> Mesh:
    """Of arguments that `resolve` has accepted and filled in.

    In deterministic mode what is summed over ranks is summed over an attention group, so that the
    bits of an answer depend on that group's size and not on how many such groups there are.
    """
    tp, split = args.tp_size, args.enable_dp_attention
    dp = args.dp_size if split else 1
    deterministic = args.enable_deterministic_inference
    dense_tp = tp // dp if deterministic else tp
    return Mesh(
        tp=tp,
        pp=args.pp_size,
        dp=dp,
        ep=args.ep_size,
        replicas=1 if split else args.dp_size,
        nnodes=args.nnodes,
        dense_tp=dense_tp if args.moe_dense_tp_size is None else args.moe_dense_tp_size,
        vocab_tp=tp // dp if args.enable_dp_lm_head or deterministic else tp,
    )
