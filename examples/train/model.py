"""DeepSeek-V3 in plain PyTorch, for training: MLA, one dense layer, MoE layers, one MTP layer.

B rows, L tokens in a row, T = B * L, H hidden, E experts, K experts of a token, I inner size of an
expert, V vocabulary. Parameters are float32 and are rounded to the dtype of the activations where
they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


@dataclass(frozen=True)
class Shape:
    vocab: int = 1024
    hidden: int = 256
    dense_inner: int = 384
    layers: int = 4
    heads: int = 8
    q_rank: int = 128
    kv_rank: int = 128
    nope: int = 32
    rope: int = 32
    value: int = 64
    experts: int = 32
    top_k: int = 4
    expert_inner: int = 128
    groups: int = 4
    top_groups: int = 2
    scale: float = 2.5
    theta: float = 10000.0
    positions: int = 1024
    eps: float = 1e-6


class Noisy(nn.Module):
    """`noise`: by how much of its own size a matrix is off whenever it is used, at random. A model
    trained so bears being rounded to few bits later."""

    noise = 0.0

    def used(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        rounded = weight.to(dtype)
        if not (self.training and self.noise):
            return rounded
        size = self.noise * rounded.detach().square().mean((-2, -1), keepdim=True).sqrt()
        return rounded + size * torch.randn_like(rounded)


class Linear(nn.Linear, Noisy):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.used(self.weight, x.dtype))


class Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbours in the last dimension are a pair. The pairs' halves come out side by side, which
    the product of a query and a key does not notice."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, s = shape, shape
        self.q_a_proj = Linear(s.hidden, s.q_rank)
        self.q_a_layernorm = Norm(s.q_rank, s.eps)
        self.q_b_proj = Linear(s.q_rank, s.heads * (s.nope + s.rope))
        self.kv_a_proj_with_mqa = Linear(s.hidden, s.kv_rank + s.rope)
        self.kv_a_layernorm = Norm(s.kv_rank, s.eps)
        self.kv_b_proj = Linear(s.kv_rank, s.heads * (s.nope + s.value))
        self.o_proj = Linear(s.heads * s.value, s.hidden)

    def forward(self, x_BLH: Tensor, place: Place) -> Tensor:
        s, (rows, length, _) = self.shape, x_BLH.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BLH)))
        q = q.view(rows, length, s.heads, s.nope + s.rope).transpose(1, 2)
        q_nope, q_rope = q.split([s.nope, s.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BLH).split([s.kv_rank, s.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(rows, length, s.heads, s.nope + s.value).transpose(1, 2)
        k_nope, value = kv.split([s.nope, s.value], -1)
        k_rope = rotate(k_rope, place.cos, place.sin)[:, None].expand(-1, s.heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, place.cos, place.sin)], -1)
        k = torch.cat([k_nope, k_rope], -1)
        out = F.scaled_dot_product_attention(q, k, value.contiguous(), attn_mask=place.mask)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(hidden, inner), Linear(hidden, inner)
        self.down_proj = Linear(inner, hidden)

    def forward(self, x: Tensor, place: Place | None = None) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Spread(Function):
    """Rows of tokens to rows of (token, expert) pairs in the order of the experts. Its gradient is
    a gather and a sum in a fixed order, where that of plain indexing would add atomically."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = len(x_TH)
        return x_TH[order // (len(order) // len(x_TH))]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].view(ctx.tokens, -1, grad.shape[-1]).sum(1), None, None


class Unsort(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[inverse]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad[order], None, None


class Router(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.experts, shape.hidden) * shape.hidden**-0.5)
        self.register_buffer("bias", torch.zeros(shape.experts))
        self.register_buffer("load", torch.zeros(shape.experts), persistent=False)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights; the bias rules the choice alone."""
        s = self.shape
        scores_TE = F.linear(x_TH.float(), self.weight).sigmoid()
        with torch.no_grad():
            choice_TGe = (scores_TE + self.bias).view(len(x_TH), s.groups, -1)
            best_TG = choice_TGe.topk(2, -1).values.sum(-1)
            keep_TG = torch.zeros_like(best_TG, dtype=torch.bool)
            keep_TG.scatter_(1, best_TG.topk(s.top_groups, -1).indices, True)
            choice_TE = choice_TGe.masked_fill(~keep_TG[..., None], -torch.inf).flatten(1)
            ids_TK = choice_TE.topk(s.top_k, -1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * s.scale
        return ids_TK, weights_TK

    @torch.no_grad()
    def balance(self, rate: float, slack: float) -> None:
        """Balances without an auxiliary loss: lowers the bias of experts above `slack` times the
        mean load, raises it for those below the mean over `slack`; skew between is natural."""
        share = self.load / self.load.mean()
        self.bias += rate * ((share < 1 / slack).float() - (share > slack).float())
        self.load.zero_()


class MoE(Noisy):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = shape
        self.shape, self.gate = shape, Router(shape)
        self.shared_experts = MLP(s.hidden, s.expert_inner)
        sizes = (s.experts, 2, s.expert_inner, s.hidden)
        self.gate_up = nn.Parameter(torch.randn(sizes) * s.hidden**-0.5)
        down = torch.randn(s.experts, s.hidden, s.expert_inner) * s.expert_inner**-0.5
        self.down = nn.Parameter(down)

    def forward(self, x_BLH: Tensor, place: Place) -> Tensor:
        x_TH = x_BLH.flatten(0, 1)
        ids_TK, weights_TK = self.gate(x_TH)
        order = ids_TK.flatten().to(torch.uint8).argsort(stable=True)  # few bits sort fast
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        counts_E = torch.bincount(ids_TK.flatten(), minlength=self.shape.experts)
        if self.training:
            real = place.real_BL.flatten().repeat_interleave(self.shape.top_k).float()
            self.gate.load += torch.bincount(ids_TK.flatten(), real, self.shape.experts)
        ends = counts_E.cumsum(0).to(torch.int32)
        up = self.used(self.gate_up, x_TH.dtype).flatten(1, 2).transpose(1, 2)
        gate, up = torch._grouped_mm(Spread.apply(x_TH, order, inverse), up, offs=ends).chunk(2, -1)
        # The weights belong to the experts' outputs; before the last product they are the same and
        # touch half as many numbers.
        weights = weights_TK.flatten()[order, None].to(x_TH.dtype)
        inner = F.silu(gate) * up * weights
        down = self.used(self.down, x_TH.dtype).transpose(1, 2)
        out = Unsort.apply(torch._grouped_mm(inner, down, offs=ends), order, inverse)
        routed_TH = out.view(*ids_TK.shape, -1).sum(1)
        return routed_TH.view_as(x_BLH) + self.shared_experts(x_BLH)


class Layer(nn.Module):
    def __init__(self, shape: Shape, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = MLP(shape.hidden, shape.dense_inner) if dense else MoE(shape)

    def forward(self, x_BLH: Tensor, place: Place) -> Tensor:
        x_BLH = x_BLH + self.self_attn(self.input_layernorm(x_BLH), place)
        return x_BLH + self.mlp(self.post_attention_layernorm(x_BLH), place)


class NextN(nn.Module):
    """The MTP layer: from the main model's output at a token and the token after it, the token
    after that."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.enorm, self.hnorm = Norm(shape.hidden, shape.eps), Norm(shape.hidden, shape.eps)
        self.eh_proj = Linear(2 * shape.hidden, shape.hidden)
        self.layer = Layer(shape, dense=False)
        self.norm = Norm(shape.hidden, shape.eps)

    def forward(self, next_BLH: Tensor, x_BLH: Tensor, place: Place) -> Tensor:
        x_BLH = self.eh_proj(torch.cat([self.enorm(next_BLH), self.hnorm(x_BLH)], -1))
        return self.norm(self.layer(x_BLH, place))


@dataclass(frozen=True)
class Place:
    """Where tokens stand: the rotation of each position, which tokens see which, and which are
    no padding."""

    cos: Tensor
    sin: Tensor
    mask: Tensor
    real_BL: Tensor

    @classmethod
    def of(cls, documents_BL: Tensor, shape: Shape, dtype: torch.dtype) -> Place:
        """Tokens see those before them in their own document. Positions run through a row: only
        their differences count."""
        length, device = documents_BL.shape[1], documents_BL.device
        rates = shape.theta ** -(torch.arange(0, shape.rope, 2, device=device) / shape.rope)
        angles = torch.arange(length, device=device)[:, None] * rates
        same = documents_BL[:, None, :, None] == documents_BL[:, None, None, :]
        seen = same & torch.ones(length, length, dtype=torch.bool, device=device).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, -torch.inf)
        return cls(angles.cos().to(dtype), angles.sin().to(dtype), mask, documents_BL != 0)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=1.0)
        self.layers = nn.ModuleList(Layer(shape, dense=i == 0) for i in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.lm_head = Linear(shape.hidden, shape.vocab)
        self.nextn = NextN(shape)

    def forward(
        self, ids_BL: Tensor, documents_BL: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Logits of the next token, and those of the MTP layer for the one after it."""
        place = Place.of(documents_BL, self.shape, dtype)
        embedded = self.embed_tokens(ids_BL).to(dtype)
        x_BLH = embedded
        for layer in self.layers:
            x_BLH = layer(x_BLH, place)
        x_BLH = self.norm(x_BLH)
        ahead = self.nextn(embedded.roll(-1, 1), x_BLH, place)
        return self.lm_head(x_BLH), self.lm_head(ahead)

    def set_noise(self, noise: float) -> None:
        for module in self.modules():
            if isinstance(module, Noisy):
                module.noise = noise

    def routers(self) -> Sequence[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]
