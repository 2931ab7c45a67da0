"""How fast a step of a model could be on a device: the limit that benchmarks compare with.

Of every operation the larger of two times counts: bytes that it must read over the rate of a plain
copy, and what it computes over the rate of a large matrix product. Read are weights, each once, and
keys and values; activations are small and may stay in caches. Of E experts a batch of B tokens that
choose k at random touches E (1 - (1 - k / E)^B) in the mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BYTES = 2
"""Of a number in bfloat16: routers, the output layer and the cache stay in it."""


@dataclass(frozen=True)
class Ceilings:
    """Of a device: bytes and operations a second."""

    bandwidth: float
    rate: float
    fp8_rate: float


@dataclass(frozen=True)
class Forward:
    """What one pass computes: `pairs` of a token with one that it attends to, `cached` tokens whose
    keys and values are read, `sampled` tokens whose logits are wanted."""

    tokens: int
    pairs: float
    cached: float
    sampled: int

    @classmethod
    def decode(cls, batch: int, context: float) -> Forward:
        return cls(batch, batch * context, batch * context, batch)

    @classmethod
    def prefill(cls, prompts: float, length: int) -> Forward:
        """Whole prompts; a token attends to those before it and to itself."""
        tokens = prompts * length
        return cls(round(tokens), tokens * (length + 1) / 2, tokens, max(1, round(prompts)))


class ModelLimit:
    """From a config.json; `fp8`: weights of experts and of attention take one byte."""

    def __init__(self, config: Mapping[str, Any], ceilings: Ceilings, fp8: bool = False) -> None:
        self.config, self.ceilings = config, ceilings
        self.weight = 1 if fp8 else BYTES
        self.rate = ceilings.fp8_rate if fp8 else ceilings.rate
        self.hidden: int = config["hidden_size"]
        self.experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
        self.top_k = _first(config, "num_experts_per_tok", "experts_per_token")
        self.inner = _first(config, "moe_intermediate_size", "intermediate_size")
        self.shared = config.get("shared_expert_intermediate_size") or (
            (config.get("n_shared_experts") or 0) * self.inner
        )

    def seconds(self, forward: Forward) -> float:
        layers = sum(self._layer(forward, layer) for layer in range(self.num_layers))
        head = self._product(forward.sampled, self.config["vocab_size"], self.hidden, BYTES)
        return layers + head

    @property
    def num_layers(self) -> int:
        number: int = self.config["num_hidden_layers"]
        return number

    def _layer(self, forward: Forward, layer: int) -> float:
        total = self._attention(forward, layer)
        for rows, columns in self._projections():
            total += self._product(forward.tokens, rows, columns, self.weight)
        if layer < self.config.get("first_k_dense_replace", 0) or (
            layer in self.config.get("mlp_only_layers", ())
        ):
            return total + self._mlp(forward.tokens, self.config["intermediate_size"])
        if self.shared:
            total += self._mlp(forward.tokens, self.shared)
        return total + self._router_and_experts(forward.tokens)

    def _mlp(self, tokens: int, inner: int) -> float:
        up = self._product(tokens, 2 * inner, self.hidden, self.weight)
        return up + self._product(tokens, self.hidden, inner, self.weight)

    def _router_and_experts(self, tokens: int) -> float:
        total = self._product(tokens, self.experts, self.hidden, BYTES)
        touched = distinct_experts(self.experts, self.top_k, tokens)
        for rows, columns in ((2 * self.inner, self.hidden), (self.hidden, self.inner)):
            operations = 2 * tokens * self.top_k * rows * columns
            total += self._larger(touched * rows * columns * self.weight, operations, self.rate)
        return total

    def _attention(self, forward: Forward, layer: int) -> float:
        config = self.config
        if rank := config.get("kv_lora_rank"):
            rope: int = config["qk_rope_head_dim"]
            width, work = rank + rope, 2 * config["num_attention_heads"] * (2 * rank + rope)
        else:
            width = 2 * config["num_key_value_heads"] * self._head_dim
            work = 4 * config["num_attention_heads"] * self._head_dim
        share = self._seen(forward, layer)
        nbytes = forward.cached * share * width * BYTES
        return self._larger(nbytes, forward.pairs * share * work, self.ceilings.rate)

    def _seen(self, forward: Forward, layer: int) -> float:
        """The share of its context that a token sees in this layer."""
        types, window = self.config.get("layer_types"), self.config.get("sliding_window")
        if not types or types[layer] != "sliding_attention" or not window:
            return 1.0
        return min(1.0, window * forward.tokens / forward.pairs)

    @property
    def _head_dim(self) -> int:
        config = self.config
        return int(config.get("head_dim") or self.hidden // config["num_attention_heads"])

    def _projections(self) -> Iterator[tuple[int, int]]:
        config, hidden = self.config, self.hidden
        heads: int = config["num_attention_heads"]
        if not (rank := config.get("kv_lora_rank")):
            yield (heads + 2 * config["num_key_value_heads"]) * self._head_dim, hidden
            yield hidden, heads * self._head_dim
            return
        nope, rope, value = (
            config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        if query := config.get("q_lora_rank"):
            yield query, hidden
        yield heads * (nope + rope), query or hidden
        yield rank + rope, hidden
        yield heads * (nope + value), rank
        yield hidden, heads * value

    def _product(self, tokens: int, rows: int, columns: int, nbytes: int) -> float:
        rate = self.rate if nbytes == self.weight else self.ceilings.rate
        return self._larger(rows * columns * nbytes, 2 * tokens * rows * columns, rate)

    def _larger(self, nbytes: float, operations: float, rate: float) -> float:
        return max(nbytes / self.ceilings.bandwidth, operations / rate)


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    return experts * (1 - (1 - top_k / experts) ** tokens)


def _first(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        if (value := config.get(name)) is not None:
            return int(value)
    raise ValueError(f"the model's config.json has none of {', '.join(names)}: it has no experts")
