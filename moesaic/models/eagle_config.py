"""What a head of EAGLE or EAGLE-3 is like, from its config.json and the names of its tensors, and
whether it fits its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import RawConfig

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
    draft_vocab_size: int = 0

    @property
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
    raw = _flat(RawConfig.read(folder, "--speculative-draft-model-path"))
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
