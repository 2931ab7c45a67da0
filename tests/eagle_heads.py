"""Heads of EAGLE and EAGLE-3 in their published layout, and what they draft: plain torch over whole
sequences, from hidden states that transformers computes.

S tokens of a sequence · H hidden · N heads · D head size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

Weights = dict[str, Tensor]


@dataclass
class Head:
    """A head of a target with `target`'s config. `names`: midlayer or layers.0, and what comes in
    front of all names but the lm_head's."""

    target: dict[str, Any]
    third: bool = True
    names: tuple[str, str] = ("midlayer", "")
    taps: tuple[int, ...] = (1, 2, 3)
    changes: dict[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    """Of embed_tokens, lm_head: what has weights of its own. EAGLE-3 always has a head of its own
    if its vocabulary is smaller."""
    biases: bool = False
    seed: int = 0

    @cached_property
    def config(self) -> dict[str, Any]:
        made = {
            "architectures": ["LlamaForCausalLMEagle3" if self.third else "LlamaForCausalLMEagle"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.target["hidden_size"],
            "intermediate_size": 80,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 1,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "vocab_size": self.target["vocab_size"],
            "torch_dtype": "float32",
        }
        if self.third:
            ids = [layer - 1 for layer in self.taps]
            made["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
            made["draft_vocab_size"] = 100
        return made | self.changes

    @property
    def num_tokens(self) -> int:
        return self.config.get("draft_vocab_size") or self.config["vocab_size"]

    @cached_property
    def token_map(self) -> Tensor | None:
        if self.num_tokens == self.config["vocab_size"]:
            return None
        chance = torch.Generator().manual_seed(self.seed)
        return torch.randperm(self.config["vocab_size"], generator=chance)[
            : self.num_tokens
        ].sort()[0]

    @cached_property
    def weights(self) -> Weights:
        """By the shortest names: layer.self_attn.q_proj.weight, fc.weight, …"""
        config, size, given = self.config, self.config["hidden_size"], self.target["hidden_size"]
        heads, pairs, dim = (
            config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        inner, width = config["intermediate_size"], 2 * size if self.third else size
        shapes: dict[str, tuple[int, ...]] = {
            "layer.self_attn.q_proj.weight": (heads * dim, width),
            "layer.self_attn.k_proj.weight": (pairs * dim, width),
            "layer.self_attn.v_proj.weight": (pairs * dim, width),
            "layer.self_attn.o_proj.weight": (size, heads * dim),
            "layer.mlp.gate_proj.weight": (inner, size),
            "layer.mlp.up_proj.weight": (inner, size),
            "layer.mlp.down_proj.weight": (size, inner),
            "layer.post_attention_layernorm.weight": (size,),
            "fc.weight": (size, 3 * given if self.third else 2 * size),
        }
        if self.third:
            shapes |= {
                f"layer.{name}.weight": (size,) for name in ("input_layernorm", "hidden_norm")
            }
            shapes |= {"norm.weight": (size,)}
            if config.get("norm_before_fc"):
                shapes["input_norm.weight"] = (3 * given,)
            if config.get("fc_norm"):
                shapes |= {f"fc_norm.{n}.weight": (given,) for n in range(3)}
        if self.biases:
            shapes |= {
                name.replace(".weight", ".bias"): (shape[0],)
                for name, shape in shapes.items()
                if "_proj." in name or name == "fc.weight"
            }
        if "embed_tokens" in self.own:
            shapes["embed_tokens.weight"] = (config["vocab_size"], size)
        if "lm_head" in self.own or self.token_map is not None:
            shapes["lm_head.weight"] = (self.num_tokens, size)
        chance = torch.Generator().manual_seed(self.seed)
        return {name: _random(name, shape, chance) for name, shape in shapes.items()}

    def write(self, folder: Path, without: tuple[str, ...] = ()) -> Path:
        layer, stem = self.names
        tensors = {
            (name if name == "lm_head.weight" else stem + name.replace("layer.", f"{layer}.", 1)): (
                tensor.detach().float().contiguous()
            )
            for name, tensor in self.weights.items()
        }
        if self.token_map is not None:
            words = self.config["vocab_size"]
            tensors["d2t"] = self.token_map - torch.arange(self.num_tokens)
            tensors["t2d"] = torch.isin(torch.arange(words), self.token_map)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: tensor for name, tensor in tensors.items() if name not in without}
        save_file(kept, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def _random(name: str, shape: tuple[int, ...], chance: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=chance)
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    return noise * (0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)


class Reference:
    """The head with its target, in float64."""

    def __init__(self, head: Head, target: Path, hot: list[int] | None = None) -> None:
        """`hot`: the only tokens that a head of EAGLE may propose."""
        self.head, self.hot = head, hot
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.weights = {name: tensor.double() for name, tensor in head.weights.items()}
        embedding = self.weights.get("embed_tokens.weight")
        self.embedding = self._target(self.model.get_input_embeddings(), embedding)
        self.words = self._target(
            self.model.get_output_embeddings(), self.weights.get("lm_head.weight")
        )
        if hot is not None:
            self.words = self.words[hot]
        self.to_target = torch.tensor(hot) if hot is not None else head.token_map
        self._seen: tuple[list[int], Tensor] | None = None

    @staticmethod
    def _target(module: Any, own: Tensor | None) -> Tensor:
        return module.weight.detach().double() if own is None else own

    @torch.no_grad()
    def rows(self, ids: list[int]) -> Tensor:
        """What the head reads of the target, [S, H or 3 H]."""
        ends = list[Tensor]()
        norm = self.model.base_model.norm.register_forward_pre_hook(
            lambda module, given: ends.append(given[0])
        )
        found = self.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        norm.remove()
        if not self.head.third:
            return found[-1][0].double()
        taps = (*found[:-1], *ends)  # the last one of transformers is normed
        return torch.cat([taps[layer][0].double() for layer in self.head.taps], -1)

    def joined(self, rows: Tensor) -> Tensor:
        """The hidden states that the first pass of a head takes."""
        if not self.head.third:
            return rows
        if self.head.config.get("fc_norm"):
            parts = rows.chunk(3, -1)
            rows = torch.cat([self.norm(part, f"fc_norm.{n}") for n, part in enumerate(parts)], -1)
        if self.head.config.get("norm_before_fc"):
            rows = self.norm(rows, "input_norm")
        return self.linear(rows, "fc")

    def outputs(self, next_ids: Tensor, hidden_SH: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the hidden states that a chain goes on with."""
        embedded = self.embedding[next_ids]
        config = self.head.config
        if self.head.third:
            residual = self.norm(hidden_SH, "layer.hidden_norm")
            given = torch.cat((self.norm(embedded, "layer.input_layernorm"), residual), -1)
            if not config.get("norm_before_residual"):
                residual = hidden_SH
        else:
            given = residual = self.linear(torch.cat((embedded, hidden_SH), -1), "fc")
        found = residual + self.attention(given)
        x = self.norm(found, "layer.post_attention_layernorm")
        inner = F.silu(self.linear(x, "layer.mlp.gate_proj")) * self.linear(x, "layer.mlp.up_proj")
        found = found + self.linear(inner, "layer.mlp.down_proj")
        normed = self.norm(found, "norm") if self.head.third else found
        return normed @ self.words.T, normed if config.get("norm_output") else found

    def attention(self, given: Tensor) -> Tensor:
        config, length = self.head.config, len(given)
        dim, groups = config["head_dim"], config["num_key_value_heads"]
        q, k, v = (
            self.linear(given, f"layer.self_attn.{name}_proj").view(length, -1, dim).transpose(0, 1)
            for name in "qkv"
        )
        repeats = len(q) // groups
        k, v = (x.repeat_interleave(repeats, 0) for x in (self.rotate(k), v))
        found = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        return self.linear(found.transpose(0, 1).reshape(length, -1), "layer.self_attn.o_proj")

    def rotate(self, x_NSD: Tensor) -> Tensor:
        dim, theta = x_NSD.shape[-1], self.head.config["rope_theta"]
        turns = theta ** (-torch.arange(0, dim, 2).double() / dim)
        angles = torch.outer(torch.arange(x_NSD.shape[1]).double(), turns)
        a, b = x_NSD.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * (x.square().mean(-1, keepdim=True) + self.head.config["rms_norm_eps"]).rsqrt()
        return scaled * self.weights[f"{name}.weight"]

    @torch.no_grad()
    def drafts(self, ids: list[int], length: int, steps: int) -> list[int]:
        """The chain behind the first tokens of a text, of which the target has seen all but the
        last."""
        path = list[int]()
        for _ in range(steps):
            path += self.likely(ids, length, path, 1)
        return path

    @torch.no_grad()
    def likely(
        self, ids: list[int], length: int, path: Sequence[int], topk: int
    ) -> dict[int, float]:
        """The likeliest tokens behind a path of drafts, best first, and the logarithms of their
        probabilities."""
        if self._seen is None or self._seen[0] != ids:
            self._seen = ids, self.joined(self.rows(ids))
        next_ids, hidden = ids[1:length], self._seen[1][: length - 1]
        logits, behind = self.outputs(torch.tensor(next_ids), hidden)
        for token in path:
            next_ids, hidden = [*next_ids, token], torch.cat((hidden, behind[-1:]))
            logits, behind = self.outputs(torch.tensor(next_ids), hidden)
        found, tokens = logits[-1].log_softmax(-1).topk(topk)
        tokens = tokens if self.to_target is None else self.to_target[tokens]
        return dict(zip(tokens.tolist(), found.tolist(), strict=True))

    def train(self, texts: list[list[int]], depth: int, rate: float) -> None:
        """Fits the head's weights to texts, by chains of `depth` tokens."""
        self.weights = {n: w.float().double().requires_grad_() for n, w in self.weights.items()}
        if "lm_head.weight" in self.weights:
            self.words = self.weights["lm_head.weight"]
        self.head.weights.update(self.weights)
        back = None if self.to_target is None else self.to_target.tolist()
        rows = [self.rows(ids) for ids in texts]
        steps = torch.optim.Adam(self.weights.values(), rate)
        for _ in range(60):
            loss = torch.zeros((), dtype=torch.float64)
            for ids, given in zip(texts, rows, strict=True):
                hidden = self.joined(given)
                for ahead in range(1, 1 + depth):
                    logits, behind = self.outputs(torch.tensor(ids[ahead:-1]), hidden[: -ahead - 1])
                    wanted = ids[ahead + 1 :]
                    wanted = wanted if back is None else [*map(back.index, wanted)]
                    loss = loss + F.cross_entropy(logits, torch.tensor(wanted))
                    hidden = torch.cat((behind, hidden[-ahead - 1 :]))
            steps.zero_grad()
            loss.backward()
            steps.step()
        self.weights = {name: tensor.detach() for name, tensor in self.weights.items()}
        self.head.weights.update(self.weights)
