"""The coordinates of each rank: pure arithmetic, without torch.

Ranks are numbered replica by replica, then stage by stage, then by tensor-parallel rank. The
tensor-parallel ranks of a stage are divided in two ways: into attention groups, each of which
serves its own requests, and into expert groups, each of which holds its own experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.config.args import ServerArgs


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    replica: int
    stage: int
    tp_rank: int
    dp_rank: int
    """The attention group, within the stage."""
    attention_rank: int
    ep_rank: int
    moe_tp_rank: int

    @property
    def is_leader(self) -> bool:
        """Whether it plans the steps of its attention group."""
        return self.stage == 0 and self.attention_rank == 0


@dataclass(frozen=True, slots=True)
class Mesh:
    """`dp`: attention groups per stage. `replicas`: copies of the model. `dense_tp`, `vocab_tp`:
    ranks that share dense layers and logits: `tp`, or 1 or the attention group's size."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    replicas: int = 1
    nnodes: int = 1
    dense_tp: int = 1
    vocab_tp: int = 1

    @property
    def world(self) -> int:
        return self.replicas * self.pp * self.tp

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def dense_spans_groups(self) -> bool:
        """Whether the ranks that share dense layers belong to several attention groups."""
        return self.dense_tp not in (1, self.attention_tp)

    @property
    def ranks_per_node(self) -> int:
        return self.world // self.nnodes

    @property
    def num_groups(self) -> int:
        """Groups that serve their own requests."""
        return self.replicas * self.dp

    def node_of(self, rank: int) -> int:
        return rank // self.ranks_per_node

    def ranks_of_node(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def place(self, rank: int) -> RankPlace:
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        stage, tp_rank = divmod(rank % (self.pp * self.tp), self.tp)
        return RankPlace(
            rank=rank,
            replica=rank // (self.pp * self.tp),
            stage=stage,
            tp_rank=tp_rank,
            dp_rank=tp_rank // self.attention_tp,
            attention_rank=tp_rank % self.attention_tp,
            ep_rank=tp_rank // self.moe_tp,
            moe_tp_rank=tp_rank % self.moe_tp,
        )

    def rank(self, replica: int, stage: int, tp_rank: int) -> int:
        return (replica * self.pp + stage) * self.tp + tp_rank

    def ranks_of_replica(self, replica: int) -> range:
        first = self.rank(replica, 0, 0)
        return range(first, first + self.pp * self.tp)

    def stage_ranks(self, place: RankPlace) -> Sequence[int]:
        first = self.rank(place.replica, place.stage, 0)
        return range(first, first + self.tp)

    def attention_ranks(self, place: RankPlace) -> Sequence[int]:
        first = self.rank(place.replica, place.stage, place.dp_rank * self.attention_tp)
        return range(first, first + self.attention_tp)

    def pipe_ranks(self, place: RankPlace) -> Sequence[int]:
        """The ranks of all stages that pass hidden states to each other."""
        return [self.rank(place.replica, stage, place.tp_rank) for stage in range(self.pp)]

    def leader(self, group: int) -> int:
        """The rank that plans the steps of a serving group."""
        replica, dp_rank = divmod(group, self.dp)
        return self.rank(replica, 0, dp_rank * self.attention_tp)

    def group_of(self, place: RankPlace) -> int:
        return place.replica * self.dp + place.dp_rank

    def describe(self, rank: int) -> str:
        """A rank's coordinates for logs, without those of size 1."""
        place = self.place(rank)
        sizes = (
            ("replica", place.replica, self.replicas),
            ("pp", place.stage, self.pp),
            ("tp", place.tp_rank, self.tp),
            ("dp", place.dp_rank, self.dp),
            ("ep", place.ep_rank, self.ep),
        )
        shown = [f"{name} {number}" for name, number, size in sizes if size > 1]
        return f"rank {rank}" + (f" ({', '.join(shown)})" if shown else "")


def mesh_of(args: ServerArgs) -> Mesh:
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


def share(count: int, part: int, parts: int) -> range:
    """One of `parts` even parts of `count` items: 5 items in 2 parts are 0..1 and 2..4."""
    return range(count * part // parts, count * (part + 1) // parts)
