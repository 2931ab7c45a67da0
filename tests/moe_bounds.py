"""How far a MoE layer may be from the truth, derived from the formats it computes in.

T tokens · K chosen · N pairs of token and expert · H hidden · I intermediate of one shard ·
O outputs of a matrix · G expert groups · S shards of an expert.

Every stage of the layer is followed in float64 with two bounds on what the layer may differ by:
`worst`, if all roundings conspire, and `variance`, the mean square if they are independent. A sum
of N independent errors of zero mean within b_n is beyond LAMBDA * sqrt(sum of b_n ** 2) with
probability below 2 * exp(-LAMBDA ** 2 / 2) (Hoeffding): 3e-14 for each number that is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
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


@dataclass(frozen=True)
class Pairs:
    """Tokens and the experts that they chose, in the order of experts; `rows_E`: of each expert."""

    tokens_N: Tensor
    experts_N: Tensor
    weights_N1: Tensor
    rows_E: list[slice]

    @classmethod
    def of(cls, topk: TopKOutput, num_experts: int) -> Pairs:
        tokens_N, ks_N = (topk.ids_TK >= 0).nonzero(as_tuple=True)
        experts_N, order_N = topk.ids_TK[tokens_N, ks_N].sort(stable=True)
        tokens_N, ks_N = tokens_N[order_N], ks_N[order_N]
        weights_N1 = topk.weights_TK[tokens_N, ks_N].double().unsqueeze(1)
        ends = experts_N.bincount(minlength=num_experts).cumsum(0).tolist()
        rows_E = [slice(*both) for both in pairwise([0, *ends])]
        return cls(tokens_N, experts_N, weights_N1, rows_E)

    def times(self, x_NI: Tensor, w_EOI: Tensor) -> Tensor:
        """Each row by the matrix of its expert."""
        parts = [x_NI[rows] @ w.t() for rows, w in zip(self.rows_E, w_EOI, strict=True)]
        return torch.cat(parts)


def expected(shards: list[Experts], x_TH: Tensor, topk: TopKOutput, numerics: Numerics) -> Noisy:
    """The result of the layer for these tokens. All experts are followed at once, which is faster
    than one after the other: only their matrices are multiplied one by one."""
    sent = _on_the_wire(x_TH, numerics)
    per_group = len(shards[0].gate_EIH) // numerics.ep
    pairs = Pairs.of(topk, len(shards[0].gate_EIH))
    weighted = [
        _weighted(_experts(shard, pairs, sent[pairs.tokens_N], numerics), pairs, numerics)
        for shard in shards
    ]
    parts = []
    for group in range(numerics.ep):
        own_N = pairs.experts_N // per_group == group
        for y in weighted:
            part = _zeros(x_TH)
            _accumulate(part, pairs.tokens_N[own_N], y[own_N])
            parts.append(part.rounded(numerics))
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


def _product(w_EOI: Tensor, x: Noisy, pairs: Pairs, numerics: Numerics) -> Noisy:
    """x @ w.T with float32 sums, rounded once. Sums of absolute products are at most the product of
    both lengths, which is cheaper than a third matrix product."""
    size = x.size.norm(dim=1, keepdim=True) * w_EOI.norm(dim=2)[pairs.experts_N]
    count = w_EOI.shape[2] + 1
    # The oracle on the grid has no need of the worst: rounding takes its size for that of numbers.
    worst = x.worst[:, :1] * 0 if numerics.on_grid else pairs.times(x.worst, w_EOI.abs())
    y = Noisy(pairs.times(x.exact, w_EOI), worst, pairs.times(x.variance, w_EOI**2), x.rare)
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


def _requantised(h: Noisy, down_EHI: Tensor, pairs: Pairs, numerics: Numerics) -> Noisy:
    """Scales grow with the numbers, and half a step of the format lies between 1/2 and 1 times a
    fixed part of a number: twice the bound of the largest possible numbers holds for all others."""
    if numerics.activation is None:
        return h
    most = 2 * numerics.activation.error_bound(h.size)
    if numerics.on_grid:
        squares_NI = (down_EHI**2).mean(1)[pairs.experts_N]
        return _nearly_on_grid(h, most, squares_NI, numerics)
    return h.off_by(most, numerics.activation.error_bound(h.exact)).rounded(numerics)


def _nearly_on_grid(h: Noisy, most: Tensor, squares_NI: Tensor, numerics: Numerics) -> Noisy:
    """A number that is off by d before it is rounded to steps of s lands on the next one with
    probability d / s: the mean square of that is d * s. `squares_NI`: of what each number is
    multiplied with."""
    assert numerics.activation is not None
    step = 2 * numerics.activation.error_bound(h.exact)
    finished = h.exact if numerics.inner is None else h.exact.to(numerics.inner)
    rounded = numerics.activation.encode(finished).dense(numerics.dtype).double()
    variance = h.variance + h.variance.sqrt() * step
    rare = (step**2 * squares_NI).amax(1, keepdim=True)
    return Noisy(rounded, h.worst + most, variance, rare).rounded(numerics)


def _experts(shard: Experts, pairs: Pairs, x: Noisy, numerics: Numerics) -> Noisy:
    gate = _silu(_product(shard.gate_EIH, x, pairs, numerics), numerics)
    inner = _times(gate, _product(shard.up_EIH, x, pairs, numerics), numerics)
    stored = _requantised(inner, shard.down_EHI, pairs, numerics)
    return _product(shard.down_EHI, stored, pairs, numerics)


def _weighted(y: Noisy, pairs: Pairs, numerics: Numerics) -> Noisy:
    """The weight is a sum of two numbers of 16 bits where the results are such numbers."""
    weights = pairs.weights_N1
    split = 0.0 if numerics.dtype == torch.float32 else numerics.unit**2
    lost = (split * weights + (numerics.tiny if split else 0.0)) * y.size
    squares = weights**2
    weighted = Noisy(y.exact * weights, y.worst * weights, y.variance * squares, y.rare * squares)
    return weighted.off_by(lost)
