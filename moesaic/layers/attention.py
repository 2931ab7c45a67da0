"""Attention layers: grouped-query attention, and multi-head latent attention (MLA).

T tokens · H hidden · N query heads · M key/value heads · D head size · V value size ·
R latent rank · C = R + rope channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.comm.mesh import share
from moesaic.kernels.experts import PairSum, Rows
from moesaic.layers.context import ForwardContext, HeadSpec, LatentSpec
from moesaic.layers.linear import (
    Linear,
    LinearConfig,
    MergedLinear,
    OutputPart,
    RowLinear,
    head_products,
)
from moesaic.layers.module import Module, Shard, parameter
from moesaic.layers.norm import RMSNorm
from moesaic.layers.parallel import Parallel
from moesaic.layers.rotary import RotaryTable

FEWER_RANKS = (
    "attention is split over --tp-size ranks, or over --tp-size / --dp-size of them with "
    "--enable-dp-attention: a larger --dp-size makes them fewer"
)


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None
    sinks: bool = False
    window: int | None = None
    input_size: int | None = None
    """Of the rows that are projected to queries, keys and values; None: the hidden size."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one rank. Ranks that share a key/value head split its queries."""

    queries: range
    kv: range

    @classmethod
    def of(cls, config: AttentionConfig, rank: int, size: int) -> Heads:
        per_kv = config.num_heads // config.num_kv_heads
        if not _splits(config, size):
            raise ValueError(_no_split(config, size))
        if size <= config.num_kv_heads:
            kv = share(config.num_kv_heads, rank, size)
            return cls(range(kv.start * per_kv, kv.stop * per_kv), kv)
        first = rank * config.num_kv_heads // size
        return cls(share(config.num_heads, rank, size), range(first, first + 1))


def _splits(config: AttentionConfig, size: int) -> bool:
    """Whether each rank gets whole key/value heads, or an even share of one head's queries."""
    if size <= config.num_kv_heads:
        return True
    return size % config.num_kv_heads == 0 and config.num_heads % size == 0


def _no_split(config: AttentionConfig, size: int) -> str:
    works = [n for n in range(1, config.num_heads + 1) if _splits(config, n)]
    nearest = [str(n) for n in (max(n for n in works if n < size), *(n for n in works if n > size))]
    return (
        f"num_attention_heads {config.num_heads} with num_key_value_heads {config.num_kv_heads} "
        f"cannot be split over {size} ranks of attention: {' and '.join(nearest[:2])} can be; "
        f"{FEWER_RANKS}"
    )


class Attention(Module):
    """Heads are split over the ranks of the attention group."""

    def __init__(
        self,
        config: AttentionConfig,
        layer: int,
        rope: RotaryTable,
        dtype: torch.dtype,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, dim, same = config.hidden_size, config.head_dim, parallel.deterministic
        queries, kv = config.num_heads * dim, config.num_kv_heads * dim
        group = parallel.attention
        per_rank = [Heads.of(config, rank, group.size) for rank in range(group.size)]
        heads, parts = per_rank[group.rank], [_channels(h.queries, dim) for h in per_rank]
        self.num_heads = len(heads.queries)
        held, held_kv = parts[group.rank], _channels(heads.kv, dim)
        self.qkv_proj = MergedLinear(
            LinearConfig(
                config.input_size or hidden, queries + 2 * kv, dtype, config.qkv_bias, same
            ),
            {"q_proj": OutputPart(queries, held), "k_proj": OutputPart(kv, held_kv)}
            | {"v_proj": OutputPart(kv, held_kv)},
        )
        output = LinearConfig(queries, hidden, dtype, config.output_bias, same)
        self.o_proj = RowLinear(output, parts, group, f"attention of layer {layer}")
        eps = config.qk_norm_eps
        self.q_norm = RMSNorm(dim, eps, dtype) if eps is not None else None
        self.k_norm = RMSNorm(dim, eps, dtype) if eps is not None else None
        self.sinks = parameter(len(heads.queries), dtype=dtype) if config.sinks else None
        self.shards = {"sinks": Shard.of((config.num_heads,), heads.queries)}
        self.spec = HeadSpec(
            parallel.stage_layer(layer),
            dim**-0.5,
            config.window,
            self.sinks,
            num_heads=len(heads.queries),
            num_kv_heads=len(heads.kv),
            head_dim=dim,
            rope=rope,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            output=self.o_proj,
        )

    def norm_and_project(
        self, norm: RMSNorm, x_TH: Tensor | PairSum, residual_TH: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Projects the output of `norm.add` to the input of `forward`; also returns the sum."""
        return self.qkv_proj.norm_and_project(norm, x_TH, residual_TH)

    def forward(self, qkv_TX: Tensor, ctx: ForwardContext) -> Tensor:
        if not len(qkv_TX):
            return qkv_TX.new_empty(0, self.config.hidden_size)
        mixed = ctx.attention.attend_heads(self.spec, qkv_TX, ctx.angles)
        return self.o_proj(mixed if isinstance(mixed, Rows) else mixed.flatten(1))

    def store(self, qkv_TX: Tensor, ctx: ForwardContext) -> None:
        """Only puts the rows' keys and values into the cache."""
        ctx.attention.store_heads(self.spec, qkv_TX, ctx.angles)


@dataclass(frozen=True, slots=True)
class LatentAttentionConfig:
    hidden_size: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    bias: bool = False


# DeepSeek's latent norms do not follow the model's rms_norm_eps.
LATENT_NORM_EPS = 1e-6


class LatentAttention(Module):
    """MLA: the cache holds one latent of R + rope channels per token, which all heads share. The
    attention backend chooses between the absorbed and the expanded form (`LatentProjections`).
    Heads are split over the ranks of the attention group, latents are not."""

    def __init__(
        self,
        config: LatentAttentionConfig,
        layer: int,
        rope: RotaryTable,
        dtype: torch.dtype,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        hidden, rank, count = config.hidden_size, config.kv_rank, config.num_heads
        query_dim, up_dim = config.nope_dim + config.rope_dim, config.nope_dim + config.value_dim
        self.deterministic, group = parallel.deterministic, parallel.attention
        per_rank = _latent_heads(count, group.size)
        heads = per_rank[group.rank]
        self.num_heads = len(heads)

        def dense(inputs: int, outputs: int, bias: bool = False) -> LinearConfig:
            return LinearConfig(inputs, outputs, dtype, bias, parallel.deterministic)

        queries = _channels(heads, query_dim)
        if config.q_rank is None:
            self.q_proj = Linear(dense(hidden, count * query_dim), queries)
        else:
            self.q_a_proj = Linear(dense(hidden, config.q_rank, config.bias))
            self.q_a_layernorm = RMSNorm(config.q_rank, LATENT_NORM_EPS, dtype)
            self.q_b_proj = Linear(dense(config.q_rank, count * query_dim), queries)
        self.kv_a_proj_with_mqa = Linear(dense(hidden, rank + config.rope_dim, config.bias))
        self.kv_a_layernorm = RMSNorm(rank, LATENT_NORM_EPS, dtype)
        self.kv_b_proj = Linear(dense(rank, count * up_dim), _channels(heads, up_dim))
        self.o_proj = RowLinear(
            dense(count * config.value_dim, hidden, config.bias),
            [_channels(heads, config.value_dim) for heads in per_rank],
            group,
            f"attention of layer {layer}",
        )
        self.spec = LatentSpec(
            parallel.stage_layer(layer),
            config.scale,
            rope_dim=config.rope_dim,
            rope=rope,
            norm=self.kv_a_layernorm,
            projections=self,
        )

    def norm_and_project(
        self, norm: RMSNorm, x_TH: Tensor | PairSum, residual_TH: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `norm.add`: two projections take the normed rows."""
        return norm.add(x_TH, residual_TH)

    def forward(self, x_TH: Tensor, ctx: ForwardContext) -> Tensor:
        if not len(x_TH):
            return x_TH
        q_TND, latents_TC = self._queries(x_TH), self.kv_a_proj_with_mqa(x_TH)
        values_TNV = ctx.attention.attend_latents(self.spec, q_TND, latents_TC, ctx.angles)
        return self.o_proj(values_TNV.flatten(1))

    def store(self, x_TH: Tensor, ctx: ForwardContext) -> None:
        """Only puts the rows' latents into the cache."""
        latents_TC = self.kv_a_proj_with_mqa(x_TH)
        ctx.attention.store_latents(self.spec, latents_TC, ctx.angles)

    def prefers_absorbed(self, queries: int, kv_len: int) -> bool:
        cfg = self.config
        up = cfg.kv_rank * (cfg.nope_dim + cfg.value_dim)
        absorbed = queries * (kv_len * (2 * cfg.kv_rank + cfg.rope_dim) + up)
        expanded = kv_len * (queries * (cfg.nope_dim + cfg.rope_dim + cfg.value_dim) + up)
        return absorbed < expanded

    def absorb(self, q_TND: Tensor) -> Tensor:
        q_nope, q_rope = q_TND.split([self.config.nope_dim, self.config.rope_dim], dim=-1)
        return torch.cat((self.absorb_nope(q_nope), q_rope), dim=-1)

    def absorb_nope(self, q_TND: Tensor) -> Tensor:
        keys_NRD = self._up_projections()[0].transpose(1, 2)
        q_latent_NTR = head_products(q_TND.transpose(0, 1), keys_NRD, self.deterministic)
        return q_latent_NTR.transpose(0, 1)

    def up_project(self, mixed_TNC: Tensor) -> Tensor:
        mixed_NTR = mixed_TNC[..., : self.config.kv_rank].transpose(0, 1)
        values_NVR = self._up_projections()[1]
        return head_products(mixed_NTR, values_NVR, self.deterministic).transpose(0, 1)

    def expand(self, latents_LC: Tensor) -> tuple[Tensor, Tensor]:
        cfg = self.config
        latents_LR, k_rope = latents_LC.split([cfg.kv_rank, cfg.rope_dim], dim=-1)
        both = self.kv_b_proj(latents_LR).unflatten(-1, (self.num_heads, -1))
        k_nope, values_LNV = both.split([cfg.nope_dim, cfg.value_dim], dim=-1)
        k_rope = k_rope.unsqueeze(1).expand(-1, self.num_heads, -1)
        return torch.cat((k_nope, k_rope), dim=-1), values_LNV

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Projections from the latent to each head's keys [N, nope, R] and values [N, V, R]."""
        cfg = self.config
        both = self.kv_b_proj.weight.view(self.num_heads, -1, cfg.kv_rank)
        keys, values = both.split([cfg.nope_dim, cfg.value_dim], dim=1)
        return keys, values

    def _queries(self, x_TH: Tensor) -> Tensor:
        if self.config.q_rank is None:
            q = self.q_proj(x_TH)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_TH)))
        return q.unflatten(-1, (self.num_heads, -1))


def _channels(heads: range, dim: int) -> range:
    return range(heads.start * dim, heads.stop * dim)


def _latent_heads(count: int, size: int) -> list[range]:
    """The heads of each rank."""
    if size > count:
        raise ValueError(
            f"num_attention_heads {count} cannot be split over {size} ranks of attention: "
            f"at most {count} can share them; {FEWER_RANKS}"
        )
    return [share(count, rank, size) for rank in range(size)]
