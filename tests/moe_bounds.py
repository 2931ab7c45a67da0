"""How far a MoE layer may be from the truth, derived from the formats it computes in.

T tokens · K chosen · N pairs of token and expert · H hidden · I intermediate of one shard ·
G expert groups · S shards of an expert.

Every stage of the layer is followed in float64 with two bounds on what the layer may differ by:
`worst`, if all roundings conspire, and `variance`, the mean square if they are independent. A sum
of N independent errors of zero mean within b_n is beyond LAMBDA * sqrt(sum of b_n ** 2) with
probability below 2 * exp(-LAMBDA ** 2 / 2) (Hoeffding): 3e-14 for each number that is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from moesaic.moe.formats import TopKOutput
from moesaic.moe.quant.payload import PayloadFormat
from moesaic.moe.quant.weights import WeightFormat
from tests.moe_oracle import Experts

LAMBDA = 8.0
FLOAT32 = 2.0**-24
EXP_STEPS = 4  # float32 steps that a vectorised silu may be off by
SILU_SLOPE = 1.1


@dataclass(frozen=True)
class Numerics:
    """The formats that a layer's result depends on; not how its rows travel."""

    weights: WeightFormat
    payload: PayloadFormat
    activation: PayloadFormat | None
    dtype: torch.dtype
    ep: int
    moe_tp: int
    on_grid: bool = False
    """Whether the oracle rounds where the layer does."""
    inner: torch.dtype | None = None
    """On the grid: what activations are rounded to before they are quantised."""

    @property
    def unit(self) -> float:
        return torch.finfo(self.dtype).eps / 2

    @property
    def tiny(self) -> float:
        """What is lost below the normal numbers; some bf16 products flush all of them to zero."""
        info = torch.finfo(self.dtype)
        return info.tiny if self.dtype == torch.bfloat16 else info.smallest_normal * info.eps / 2


@dataclass(frozen=True)
class Noisy:
    """A number of the oracle, and by how much the layer's own may differ.

    `rare`: the mean square over a row's numbers of what is too rare to be a matter of means: that
    the one activation which matters most lands on the next step of its format.
    """

    exact: Tensor
    worst: Tensor
    variance: Tensor
    rare: Tensor  # [T, 1]

    @property
    def size(self) -> Tensor:
        return self.exact.abs() + self.worst

    @property
    def bound(self) -> Tensor:
        return torch.minimum(self.worst, LAMBDA * self.variance.sqrt())

    def off_by(self, most: Tensor, typical: Tensor | None = None) -> Noisy:
        typical = most if typical is None else typical
        return replace(self, worst=self.worst + most, variance=self.variance + typical**2)

    def rounded(self, numerics: Numerics) -> Noisy:
        return self.off_by(numerics.unit * self.size + numerics.tiny)

    def __add__(self, other: Noisy) -> Noisy:
        return Noisy(
            self.exact + other.exact,
            self.worst + other.worst,
            self.variance + other.variance,
            self.rare + other.rare,
        )

    def __getitem__(self, index: Tensor | slice) -> Noisy:
        return Noisy(self.exact[index], self.worst[index], self.variance[index], self.rare[index])


def held(experts: Experts, numerics: Numerics) -> list[Experts]:
    """What the layer holds after quantisation, exactly, by shard."""
    inner = experts.gate_EIH.shape[1] // numerics.moe_tp

    def stored(w: Tensor) -> Tensor:
        planes = numerics.weights.encode(w)
        return numerics.weights.decode(planes, torch.empty(w.shape, dtype=numerics.dtype)).double()

    cuts = [slice(s * inner, (s + 1) * inner) for s in range(numerics.moe_tp)]
    return [
        Experts(
            stored(experts.gate_EIH[:, cut]),
            stored(experts.up_EIH[:, cut]),
            stored(experts.down_EHI[:, :, cut]),
        )
        for cut in cuts
    ]


def whole(shards: list[Experts]) -> Experts:
    return Experts(
        torch.cat([shard.gate_EIH for shard in shards], 1),
        torch.cat([shard.up_EIH for shard in shards], 1),
        torch.cat([shard.down_EHI for shard in shards], 2),
    )


def expected(shards: list[Experts], x_TH: Tensor, topk: TopKOutput, numerics: Numerics) -> Noisy:
    """The result of the layer for these tokens."""
    sent = _on_the_wire(x_TH, numerics)
    groups = [[_zeros(x_TH) for _ in shards] for _ in range(numerics.ep)]
    per_group = len(shards[0].gate_EIH) // numerics.ep
    for expert in range(len(shards[0].gate_EIH)):
        tokens, ks = (topk.ids_TK == expert).nonzero(as_tuple=True)
        if len(tokens) == 0:
            continue
        weights = topk.weights_TK[tokens, ks].double().unsqueeze(1)
        for index, shard in enumerate(shards):
            y = _expert(shard, expert, sent[tokens], numerics)
            _accumulate(groups[expert // per_group][index], tokens, _weighted(y, weights, numerics))
    parts = [part.rounded(numerics) for group in groups for part in group]
    total = reduce(add, parts)
    terms = 2 * topk.ids_TK.shape[1] * len(shards) + len(parts)
    size = reduce(add, [part.size for part in parts])
    return total.off_by(terms * FLOAT32 * size, terms**0.5 * FLOAT32 * size).rounded(numerics)


def _zeros(x_TH: Tensor) -> Noisy:
    return Noisy(
        *(torch.zeros(x_TH.shape, dtype=torch.float64) for _ in range(3)),
        torch.zeros(len(x_TH), 1, dtype=torch.float64),
    )


def _accumulate(into: Noisy, tokens: Tensor, part: Noisy) -> None:
    for name in ("exact", "worst", "variance", "rare"):
        getattr(into, name).index_add_(0, tokens, getattr(part, name))


def _on_the_wire(x_TH: Tensor, numerics: Numerics) -> Noisy:
    """Rounded to the payload; then, if the weights want another format, to that."""
    x = replace(_zeros(x_TH), exact=x_TH.double())
    x, arrived = _through(x, x_TH, numerics.payload, numerics)
    if numerics.activation not in (None, numerics.payload):
        assert numerics.activation is not None
        x, _ = _through(x, arrived, numerics.activation, numerics)
    return x


def _through(
    x: Noisy, values: Tensor, format: PayloadFormat, numerics: Numerics
) -> tuple[Noisy, Tensor]:
    """Known numbers through a format: what it can write as it is does not change."""
    decoded = format.encode(values).dense(torch.float32)
    error = format.error_bound(values).masked_fill(decoded.double() == values.double(), 0.0)
    dense = decoded.to(numerics.dtype)
    if numerics.on_grid:
        return replace(x, exact=dense.double()), dense
    again = numerics.unit * decoded.double().abs() + numerics.tiny
    again = again.masked_fill(dense.double() == decoded.double(), 0.0)
    return x.off_by(error).off_by(again), dense


def _product(w_NK: Tensor, x: Noisy, numerics: Numerics) -> Noisy:
    """x @ w.T with float32 sums, rounded once. Sums of absolute products are at most the product of
    both lengths, which is cheaper than a third matrix product."""
    size = x.size.norm(dim=1, keepdim=True) * w_NK.norm(dim=1)
    count = w_NK.shape[1] + 1
    # The oracle on the grid has no need of the worst: rounding takes its size for that of numbers.
    worst = x.worst[:, :1] * 0 if numerics.on_grid else x.worst @ w_NK.abs().t()
    y = Noisy(x.exact @ w_NK.t(), worst, x.variance @ (w_NK**2).t(), x.rare)
    y = y.off_by(count * FLOAT32 * size, count**0.5 * FLOAT32 * size)
    return y.rounded(numerics)


def _silu(x: Noisy, numerics: Numerics) -> Noisy:
    """Its slope is at most 1.1 and changes by at most half of what its argument changes."""
    gate = x.exact.sigmoid()
    slope = (gate * (1 + x.exact * (1 - gate))).abs() + 0.5 * x.variance.sqrt()
    slope = slope.clamp(max=SILU_SLOPE)
    y = Noisy(x.exact * gate, SILU_SLOPE * x.worst, slope**2 * x.variance, x.rare)
    return y.off_by(EXP_STEPS * FLOAT32 * y.size).rounded(numerics)


def _times(a: Noisy, b: Noisy, numerics: Numerics) -> Noisy:
    y = Noisy(
        a.exact * b.exact,
        a.exact.abs() * b.worst + b.exact.abs() * a.worst + a.worst * b.worst,
        a.exact**2 * b.variance + b.exact**2 * a.variance + a.variance * b.variance,
        a.rare,
    )
    return y.rounded(numerics)


def _requantised(h: Noisy, down_HI: Tensor, numerics: Numerics) -> Noisy:
    """Scales grow with the numbers, and half a step of the format lies between 1/2 and 1 times a
    fixed part of a number: twice the bound of the largest possible numbers holds for all others."""
    if numerics.activation is None:
        return h
    most = 2 * numerics.activation.error_bound(h.size)
    if numerics.on_grid:
        return _nearly_on_grid(h, most, down_HI, numerics)
    return h.off_by(most, numerics.activation.error_bound(h.exact)).rounded(numerics)


def _nearly_on_grid(h: Noisy, most: Tensor, down_HI: Tensor, numerics: Numerics) -> Noisy:
    """A number that is off by d before it is rounded to steps of s lands on the next one with
    probability d / s: the mean square of that is d * s."""
    assert numerics.activation is not None
    step = 2 * numerics.activation.error_bound(h.exact)
    finished = h.exact if numerics.inner is None else h.exact.to(numerics.inner)
    rounded = numerics.activation.encode(finished).dense(numerics.dtype).double()
    variance = h.variance + h.variance.sqrt() * step
    rare = (step**2 * (down_HI**2).mean(0)).amax(1, keepdim=True)
    return Noisy(rounded, h.worst + most, variance, rare).rounded(numerics)


def _expert(shard: Experts, expert: int, x: Noisy, numerics: Numerics) -> Noisy:
    gate = _silu(_product(shard.gate_EIH[expert], x, numerics), numerics)
    inner = _times(gate, _product(shard.up_EIH[expert], x, numerics), numerics)
    down_HI = shard.down_EHI[expert]
    return _product(down_HI, _requantised(inner, down_HI, numerics), numerics)


def _weighted(y: Noisy, weights: Tensor, numerics: Numerics) -> Noisy:
    """The weight is a sum of two numbers of 16 bits where the results are such numbers."""
    split = 0.0 if numerics.dtype == torch.float32 else numerics.unit**2
    lost = (split * weights + (numerics.tiny if split else 0.0)) * y.size
    squares = weights**2
    weighted = Noisy(y.exact * weights, y.worst * weights, y.variance * squares, y.rare * squares)
    return weighted.off_by(lost)
