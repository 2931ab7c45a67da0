"""Draft heads of EAGLE and EAGLE-3 in their published layout: one dense decoder layer that reads
hidden states of the target.

Row i joins the target's hidden states for token i with the embedding of token i + 1, and predicts
token i + 2. Behind the target's rows a head continues its own output.

EAGLE joins the target's normed output. EAGLE-3 joins the hidden states before three of its layers,
and predicts among tokens of its own, which `d2t` maps to the target's.

T tokens · H hidden of the head · W numbers in an output row of the target · X in a row that the
head's attention projects · R rows with logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from moesaic.core.step import PREFILL, Step
from moesaic.layers.attention import Attention, Heads
from moesaic.layers.context import AttentionStep, CacheSpec, ForwardContext
from moesaic.layers.embedding import CutHead, LMHead
from moesaic.layers.linear import Linear
from moesaic.layers.module import MatrixSlot, Module, ModuleList, TensorSlot
from moesaic.layers.norm import RMSNorm
from moesaic.layers.rotary import RotaryTable
from moesaic.models.blocks import CausalLM, dense_mlp
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import BuildContext, ModelConfig, RawConfig, common_config
from moesaic.models.schemes import Scheme
from moesaic.models.weights import load_weights

NUM_TAPS: Final = 3
INTEGERS: Final = ("I64", "I32")
# Keys of EAGLE-3's variants, beside the config's others or in its `eagle_config`.
VARIANTS: Final = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS: Final = "eagle_aux_hidden_state_layer_ids"
# Tensors of heads of EAGLE and EAGLE-3 that tell what they are like.
USUAL: Final = {
    False: ("fc.weight", "fc.bias"),
    True: ("fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"),
}


@dataclass(frozen=True)
class HeadFiles:
    """The tensors of a head's folder, whose names differ from one training program to another."""

    folder: Path
    names: frozenset[str]
    are_random: bool = False
    """There are none: a head has random weights."""

    @classmethod
    def of(cls, folder: Path, random: Sequence[str] = ()) -> HeadFiles:
        """`random`: the tensors of a head without files, which has random weights."""
        if random and not any(folder.glob("*.safetensors")):
            return cls(folder, frozenset(random), are_random=True)
        with Checkpoint(folder) as checkpoint:
            return cls(folder, frozenset(checkpoint.location))

    @property
    def stem(self) -> str:
        return "model." if "model.fc.weight" in self.names else ""

    @property
    def layer(self) -> str:
        """The name of the decoder layer."""
        found = any(name.startswith(f"{self.stem}midlayer.") for name in self.names)
        return "midlayer" if found else "layers.0"

    def has(self, name: str) -> bool:
        return f"{self.stem}{name}" in self.names

    def in_layer(self, name: str) -> bool:
        return self.has(f"{self.layer}.{name}")

    @property
    def is_head(self) -> bool:
        return self.has("fc.weight")

    @property
    def is_third(self) -> bool:
        return self.in_layer("hidden_norm.weight")

    def token_map(self) -> list[int] | None:
        """The target's token for each of the head's; None: they are the same. In the file are the
        differences between the two."""
        if "d2t" not in self.names:
            return None
        with Checkpoint(self.folder) as checkpoint:
            shape, dtype = checkpoint.shape("d2t"), checkpoint.dtype("d2t")
            if len(shape) != 1 or dtype not in INTEGERS:
                raise ValueError(
                    f"tensor d2t in {self.folder} has shape {list(shape)} and type {dtype}: it "
                    "must be a list of integers, one for each token of the head"
                )
            found = checkpoint.read("d2t").long()
        return (found + torch.arange(len(found))).tolist()


@dataclass(frozen=True)
class HeadConfig:
    """A head's config.json and files, checked against its target."""

    raw: RawConfig
    files: HeadFiles
    target_size: int
    """The target's hidden size."""
    taps: tuple[int, ...] = ()
    """Of EAGLE-3: layers of the target whose inputs it reads."""
    variants: frozenset[str] = frozenset()
    token_map: tuple[int, ...] | None = None
    """The target's token for each that has a logit; None: all tokens of the target, in order."""
    cuts_target: bool = False
    """Whether the mapped tokens' logits come from the target's own head."""
    draft_vocab_size: int = field(default=0)

    @cached_property
    def own_embedding(self) -> bool:
        return self.files.has("embed_tokens.weight")

    @property
    def own_head(self) -> bool:
        return "lm_head.weight" in self.files.names


def read_head(
    folder: Path,
    target: RawConfig,
    is_third: bool,
    hot_tokens: Sequence[int] | None = None,
    random: bool = False,
) -> HeadConfig:
    """The head in the folder; ValueError if it is none, or not of this target. `is_third`: whether
    one of EAGLE-3 is asked for. `hot_tokens`: the only ones that one of EAGLE may propose.
    `random`: its weights are not read."""
    raw = _flat(RawConfig.read(folder))
    files = HeadFiles.of(folder, USUAL[is_third] if random else ())
    _check_kind(raw, files, is_third)
    raw.one_of("partial_rotary_factor", [1, None])
    words, size = target.integer("vocab_size"), target.integer("hidden_size")
    if (own := raw.integer("vocab_size")) != words:
        raise ValueError(
            f"{raw.source}: vocab_size is {own}, and the target's is {words}: give a head that was "
            "trained for this target"
        )
    made = HeadConfig(raw, files, size)
    made = _third(made, target) if is_third else replace(made, draft_vocab_size=words)
    _check_sizes(made, is_third)
    if hot_tokens is None:
        return made
    if made.own_head:
        raise ValueError(
            f"{folder} has an lm_head of its own, and --speculative-token-map takes rows of the "
            "target's: leave the flag out"
        )
    return replace(made, token_map=tuple(hot_tokens), cuts_target=True)


def _flat(raw: RawConfig) -> RawConfig:
    """With the keys of nested objects, of which one names the layer's sizes and another the head's
    variants. Ids of tapped layers mean something else there, so they stay where they are."""
    found = dict(raw.data)
    found |= raw.mapping("transformer_layer_config")
    nested = raw.mapping("eagle_config")
    found |= {key: value for key, value in nested.items() if key != TAPS}
    return RawConfig(found, raw.source)


def _check_kind(raw: RawConfig, files: HeadFiles, is_third: bool) -> None:
    if not files.is_head:
        raise ValueError(
            f"{files.folder} has no tensor fc.weight, so it is not a head of EAGLE: for a whole "
            "model give --speculative-algorithm STANDALONE"
        )
    if files.is_third != is_third:
        kinds = {False: "EAGLE", True: "EAGLE3"}
        raise ValueError(
            f"{files.folder} is a head of {kinds[files.is_third]} "
            f"({files.layer}.hidden_norm.weight tells): give --speculative-algorithm "
            f"{kinds[files.is_third]}"
        )
    if (layers := raw.integer("num_hidden_layers")) != 1:
        raise ValueError(
            f"{raw.source}: num_hidden_layers is {layers}: only heads of one layer are served"
        )


def _third(made: HeadConfig, target: RawConfig) -> HeadConfig:
    raw, files = made.raw, made.files
    if not raw.flag("use_aux_hidden_state", True):
        raise ValueError(
            f"{raw.source}: use_aux_hidden_state is false: only heads that read hidden states of "
            f"{NUM_TAPS} layers are served"
        )
    if raw.has("target_hidden_size") and raw.integer("target_hidden_size") != made.target_size:
        raise ValueError(
            f"{raw.source}: target_hidden_size is {raw.integer('target_hidden_size')}, and the "
            f"target's hidden_size is {made.target_size}: give a head that was trained for this "
            "target"
        )
    words = raw.integer("vocab_size")
    number, token_map = raw.integer("draft_vocab_size", words), files.token_map()
    if token_map is None and number < words and files.are_random:
        token_map = list(range(number))
    _check_map(made, number, token_map)
    return replace(
        made,
        taps=_taps(raw, target),
        variants=frozenset(key for key in VARIANTS if raw.flag(key, False)),
        token_map=None if token_map is None else tuple(token_map),
        draft_vocab_size=number,
    )


def _check_map(made: HeadConfig, number: int, token_map: Sequence[int] | None) -> None:
    raw, files, words = made.raw, made.files, made.raw.integer("vocab_size")
    if number > words:
        raise ValueError(
            f"{raw.source}: draft_vocab_size is {number}, more than vocab_size {words}: fix it"
        )
    if token_map is None and number < words:
        raise ValueError(
            f"{files.folder} has no tensor d2t, and draft_vocab_size {number} of {raw.source} is "
            f"less than vocab_size {words}: without the map no token can be told; fetch all files"
        )
    if token_map is not None and len(token_map) != number:
        raise ValueError(
            f"tensor d2t in {files.folder} has {len(token_map)} entries, and draft_vocab_size of "
            f"{raw.source} is {number}: fetch both again"
        )
    outside = [token for token in token_map or () if not 0 <= token < words]
    if outside:
        raise ValueError(
            f"tensor d2t in {files.folder} maps to token {outside[0]}, and vocab_size of "
            f"{raw.source} is {words}: fetch both again"
        )


def _check_sizes(made: HeadConfig, is_third: bool) -> None:
    """Of what the head and the target share."""
    size, target = made.raw.integer("hidden_size"), made.target_size
    shared = [] if is_third else ["output"]
    shared += [] if made.own_embedding else ["embedding"]
    shared += [] if made.own_head else ["lm_head"]
    if size != target and shared:
        raise ValueError(
            f"{made.raw.source}: hidden_size is {size}, and the target's is {target}, whose "
            f"{' and '.join(shared)} the head takes: give a head that was trained for this target"
        )
    if not made.own_head and made.draft_vocab_size != made.raw.integer("vocab_size"):
        raise ValueError(
            f"{made.files.folder} has no tensor lm_head.weight, and draft_vocab_size "
            f"{made.draft_vocab_size} of {made.raw.source} is less than vocab_size: fetch all files"
        )


def _taps(raw: RawConfig, target: RawConfig) -> tuple[int, ...]:
    """In `eagle_config` a number stands for the layer whose output is read, beside it for the one
    whose input is read. Without any: the second, the middle one and the last but two."""
    layers = target.integer("num_hidden_layers")
    beside, nested = raw.list_of(TAPS, int), raw.mapping("eagle_config")
    inside = RawConfig(nested, f"{raw.source}: eagle_config").list_of(TAPS, int)
    found = [layer + 1 for layer in inside] or beside or [2, layers // 2, layers - 3]
    if len(set(found)) != NUM_TAPS or not all(0 <= layer <= layers for layer in found):
        raise ValueError(
            f"{raw.source}: {TAPS} {inside or beside or 'is unset'}: the head reads hidden states "
            f"before layers {found} of the target, which must be {NUM_TAPS} different ones from 0 "
            f"to {layers}: give a head that was trained for this target"
        )
    return tuple(sorted(found))


class HeadLayer(Module):
    """Attention over joined rows, and a dense layer. Norms of what is joined are the head's own."""

    def __init__(self, made: HeadConfig, config: ModelConfig, rope: RotaryTable) -> None:
        super().__init__()
        raw, files, is_third = made.raw, made.files, made.files.is_third
        number = config.layers.start
        slides = raw.flag("use_sliding_window", False)
        attention = config.attention(
            raw,
            input_size=2 * config.hidden_size if is_third else None,
            qkv_bias=files.in_layer("self_attn.q_proj.bias"),
            output_bias=files.in_layer("self_attn.o_proj.bias"),
            qk_norm_eps=config.rms_norm_eps if files.in_layer("self_attn.q_norm.weight") else None,
            window=raw.integer("sliding_window", 4096) if slides else None,
        )
        bias, inner = files.in_layer("mlp.gate_proj.bias"), raw.integer("intermediate_size")
        # The original layer of EAGLE has no norm in front of its attention.
        has_norm = is_third or files.in_layer("input_layernorm.weight")
        self.input_layernorm = config.norm() if has_norm else None
        self.hidden_norm = config.norm() if is_third else None
        self.self_attn = Attention(attention, number, rope, config.dtype, config.parallel)
        self.post_attention_layernorm = config.norm()
        self.mlp = dense_mlp(config, number, inner, bias, "mlp of the draft head")

    def store(self, x_TX: Tensor, ctx: ForwardContext) -> None:
        """Only puts the rows' keys and values into the cache."""
        self.self_attn.store(self.self_attn.qkv_proj(x_TX), ctx)

    def forward(self, x_TX: Tensor, residual_TH: Tensor, ctx: ForwardContext) -> Tensor:
        attention = self.self_attn
        mixed_TH = attention(attention.qkv_proj(x_TX), ctx)
        normed_TH, sum_TH = self.post_attention_layernorm.add(mixed_TH, residual_TH)
        found_TH: Tensor = sum_TH + self.mlp(normed_TH, ctx.step)
        return found_TH


class EagleHead(Module):
    """A head on this rank, split as the target's layers."""

    def __init__(self, made: HeadConfig, main: CausalLM) -> None:
        super().__init__()
        self.made = made
        parallel = main.config.parallel
        behind = main.config.num_layers
        parallel = replace(parallel, layers=range(behind, behind + 1))
        context = BuildContext(main.config.positions, main.config.moe, parallel)
        self.config = config = common_config(made.raw, context, eps=1e-6)
        heads = config.attention(made.raw)
        dim, group = heads.head_dim, parallel.attention
        kv_heads = len(Heads.of(heads, group.rank, group.size).kv)
        self.cache = CacheSpec(1, kv_heads, dim, dim)
        self.rope = RotaryTable(made.raw.rope(dim), config.positions)
        # In a tuple, torch does not take them for modules of this one: they are already loaded.
        self._main = main.model.embed_tokens, main.lm_head
        self.embed_tokens = config.embedding() if made.own_embedding else None
        self._make_joins()
        self.layer = HeadLayer(made, config, self.rope)
        self.renamed = {"layer": made.files.layer}
        self.lm_head = self._head()
        self.token_map_V = None if made.token_map is None else torch.tensor(made.token_map)

    def _make_joins(self) -> None:
        size = self.config.hidden_size
        linear = self.config.linear(size, bias=self.made.files.has("fc.bias"))
        self.fc = Linear(replace(linear, inputs=2 * size))

    def _head(self) -> LMHead | None:
        made, main = self.made, self._main[1]
        assert main is not None, "only the last stage predicts"
        if made.own_head:
            return replace(self.config, vocab_size=made.draft_vocab_size).head()
        if made.cuts_target:
            return CutHead(main, made.token_map or ())
        return None

    def of_target(self, rows_TW: Tensor) -> Tensor:
        """What the head joins, from the target's output."""
        return rows_TW[:, : self.made.target_size]

    def forward(
        self,
        next_ids_T: Tensor,
        positions_T: Tensor,
        hidden_TH: Tensor,
        attention: AttentionStep,
        step: Step = PREFILL,
    ) -> Tensor:
        """`next_ids_T`: the token after that of each row, at the row's position. `hidden_TH`: of
        `of_target`, or the head's own output for the row before."""
        ctx = ForwardContext(self.rope.at(positions_T), attention, step)
        found_TH: Tensor = self.layer(*self._joined(next_ids_T, hidden_TH), ctx)
        return found_TH

    def store(
        self, next_ids_T: Tensor, positions_T: Tensor, hidden_TH: Tensor, attention: AttentionStep
    ) -> None:
        """Only puts the rows' entries into the cache."""
        ctx = ForwardContext(self.rope.at(positions_T), attention)
        self.layer.store(self._joined(next_ids_T, hidden_TH)[0], ctx)

    def _joined(self, next_ids_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer's attention takes, and the residual."""
        both_TX = torch.cat((self._embedded(next_ids_T), hidden_TH), dim=-1)
        joined_TH, norm = self.fc(both_TX), self.layer.input_layernorm
        return joined_TH if norm is None else norm(joined_TH), joined_TH

    def _embedded(self, ids_T: Tensor) -> Tensor:
        embedding = self.embed_tokens or self._main[0]
        assert embedding is not None, "the first stage has one"
        found_TH: Tensor = embedding(ids_T)
        return found_TH

    def logits(self, hidden_RH: Tensor, rows: Sequence[int] = ()) -> Tensor:
        """Of the head's tokens; `rows` as in the target's `logits`."""
        head = self.lm_head or self._main[1]
        assert head is not None, "only the last stage predicts"
        found_RV: Tensor = head(hidden_RH, rows)
        return found_RV

    def to_target(self, ids_R: Tensor) -> Tensor:
        """The target's tokens for the head's."""
        return ids_R if self.token_map_V is None else self.token_map_V[ids_R]

    @property
    def nbytes(self) -> int:
        """The bytes of all weights but the target's."""
        mapped = 0 if self.token_map_V is None else self.token_map_V.nbytes
        return sum(parameter.nbytes for parameter in self.parameters()) + mapped

    def checkpoint_slots(self) -> Iterator[TensorSlot | MatrixSlot]:
        for slot in self.slots(""):
            stem = "" if slot.name.startswith("lm_head.") else self.made.files.stem
            yield replace(slot, name=f"{stem}{slot.name}")

    def is_optional(self, name: str) -> bool:
        return name in ("d2t", "t2d") or name.endswith("rotary_emb.inv_freq")


class Eagle3Head(EagleHead):
    def _make_joins(self) -> None:
        config, made = self.config, self.made
        size, joined = config.hidden_size, NUM_TAPS * made.target_size
        linear = config.linear(size, bias=made.files.has("fc.bias"))
        self.fc = Linear(replace(linear, inputs=joined))
        eps, dtype = config.rms_norm_eps, config.dtype
        self.input_norm = self.fc_norm = None
        if "norm_before_fc" in made.variants:
            self.input_norm = RMSNorm(joined, eps, dtype)
        if "fc_norm" in made.variants:
            each = (RMSNorm(made.target_size, eps, dtype) for _ in range(NUM_TAPS))
            self.fc_norm = ModuleList(each)
        self.norm = config.norm()

    def of_target(self, rows_TW: Tensor) -> Tensor:
        tapped_TX = rows_TW[:, self.made.target_size :]
        if self.fc_norm is not None:
            parts = tapped_TX.split(self.made.target_size, dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            tapped_TX = torch.cat(normed, dim=-1)
        if self.input_norm is not None:
            tapped_TX = self.input_norm(tapped_TX.contiguous())
        return self.fc(tapped_TX.contiguous())

    def forward(
        self,
        next_ids_T: Tensor,
        positions_T: Tensor,
        hidden_TH: Tensor,
        attention: AttentionStep,
        step: Step = PREFILL,
    ) -> Tensor:
        found_TH = super().forward(next_ids_T, positions_T, hidden_TH, attention, step)
        return self.norm(found_TH) if self._gives_normed else found_TH

    def _joined(self, next_ids_T: Tensor, hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        assert layer.input_layernorm is not None and layer.hidden_norm is not None
        embedded_TH, normed_TH = self._embedded(next_ids_T), layer.hidden_norm(hidden_TH)
        joined_TX = torch.cat((layer.input_layernorm(embedded_TH), normed_TH), dim=-1)
        is_normed = "norm_before_residual" in self.made.variants
        return joined_TX, normed_TH if is_normed else hidden_TH

    @property
    def _gives_normed(self) -> bool:
        return "norm_output" in self.made.variants

    def logits(self, hidden_RH: Tensor, rows: Sequence[int] = ()) -> Tensor:
        return super().logits(hidden_RH if self._gives_normed else self.norm(hidden_RH), rows)


def build_head(made: HeadConfig, main: CausalLM) -> EagleHead:
    """Weights are not loaded yet. `main`: the whole target, which then also gives the hidden states
    that the head reads."""
    kind = Eagle3Head if made.files.is_third else EagleHead
    try:
        head = kind(made, main).eval()
    except ValueError as error:
        named = made.raw.source in str(error)
        raise error if named else ValueError(f"{made.raw.source}: {error}") from error
    if made.taps:
        main.tap(made.taps)
    return head


def fill_head(head: EagleHead, scheme: Scheme) -> None:
    """Loads the weights; those of the target are loaded."""
    load_weights(head, head.made.files.folder, scheme, lambda raw: head)
    copy_shared(head)


def copy_shared(head: EagleHead) -> None:
    """Copies what the head holds of the target's weights."""
    if isinstance(head.lm_head, CutHead):
        head.lm_head.copy_rows()
