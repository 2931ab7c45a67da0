"""Loads a model from safetensors: lazily, by slice, with every mismatch named."""

from __future__ import annotations

import gc
import logging
import zlib
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Generator, Tensor
from tqdm import tqdm

from moesaic.layers.module import MatrixSlot, Module, TensorSlot
from moesaic.models.blocks import CausalLM
from moesaic.models.checkpoint import EXPERT, LAYER, Checkpoint, TensorSpec, float_spec
from moesaic.models.config import CHECKPOINT_LAYERS, BuildContext, RawConfig
from moesaic.models.pinned_copy import PinnedCopy
from moesaic.models.registry import build_model
from moesaic.models.schemes import Matrix, MatrixReader, Scheme, detect_scheme
from moesaic.models.schemes.scheme import UNQUANTISED
from moesaic.moe.layer import FusedMoE
from moesaic.moe.quant.dummy import fill_planes
from moesaic.moe.quant.weights import WeightFormat

logger = logging.getLogger(__name__)

Slot = TensorSlot | MatrixSlot
# With the reader of a matrix that the checkpoint may have quantised.
FoundSlot = tuple[Slot, MatrixReader | None]
EMBEDDING = "embed_tokens.weight"


class Loadable(Protocol):
    """A model, or a part of one that is loaded separately."""

    def checkpoint_slots(self) -> Iterator[Slot]: ...

    def is_optional(self, name: str) -> bool:
        """Whether the checkpoint may hold this tensor although the model does not need it."""


@dataclass(frozen=True)
class Loader:
    checkpoint: Checkpoint
    scheme: Scheme

    def find_all(self, slots: Iterable[Slot]) -> list[FoundSlot]:
        return [(slot, self._find(slot)) for slot in slots]

    def _find(self, slot: Slot) -> MatrixReader | None:
        """The reader of the slot's matrix if it may be quantised: an expert, or a whole tensor."""
        if isinstance(slot, MatrixSlot):
            experts = self.scheme.num_experts
            matrix = Matrix(slot.name, slot.shape, slot.index, slot.interleaved, experts)
        elif slot.index is None and len(slot.shape) == 2 and slot.name.endswith(".weight"):
            matrix = Matrix(slot.name, (slot.shape[0], slot.shape[1]))
        else:
            return None
        return self.scheme.find(self.checkpoint, matrix)

    def fill(self, slot: Slot, reader: MatrixReader | None) -> None:
        if isinstance(slot, MatrixSlot):
            assert reader is not None
            _fill_planes(slot, reader)
        elif slot.into.numel():  # none if there are more ranks than rows
            tensor = self._read(slot) if reader is None else reader.dense(*slot.cut)
            slot.into.copy_(tensor if slot.arrange is None else slot.arrange(tensor))

    def _read(self, slot: TensorSlot) -> Tensor:
        if slot.index is not None:
            return self.checkpoint.read(slot.name, slot.index, *slot.cut)
        return self.checkpoint.read(slot.name, *slot.cut)


def _fill_planes(slot: MatrixSlot, reader: MatrixReader) -> None:
    assert isinstance(slot.format, WeightFormat)
    _copy(reader.read(slot.format, slot.rows, slot.cols), slot)
    scale = reader.input_scale()
    if scale is not None and slot.set_input_scale is not None:
        slot.set_input_scale(scale)


def _tensors(slot: Slot, reader: MatrixReader | None) -> Mapping[str, TensorSpec]:
    return {slot.name: float_spec(slot.shape)} if reader is None else reader.tensors()


def build_whole(raw: RawConfig) -> CausalLM:
    return build_model(raw, BuildContext.single(torch.float32, positions=1))


def load_weights(
    model: Loadable,
    folder: Path,
    scheme: Scheme | None = None,
    whole: Callable[[RawConfig], Loadable] = build_whole,
) -> None:
    """`whole` builds the same on one rank, to find the tensors of other ranks. Tensors are decoded
    and encoded on the model's device."""
    scheme = scheme or detect_scheme(RawConfig.read(folder), folder)
    with _paused_collector():
        slots = list(model.checkpoint_slots())
        with Checkpoint(folder, _upload_to(slots)) as checkpoint:
            loader = Loader(checkpoint, scheme)
            found = loader.find_all(slots)
            _check_tensors(model, found, loader, whole)
            _check_shared_experts(found, loader)
            if scheme.note:
                logger.warning("%s: %s", folder, scheme.note)
            for slot, reader in tqdm(
                found, desc="Loading weights", unit="tensor", disable=None, leave=False
            ):
                loader.fill(slot, reader)


def load_some_weights(
    model: Loadable, folder: Path, scheme: Scheme, tensors: Sequence[Tensor]
) -> Iterator[None]:
    """Reads only those weights of a loaded model that are in `tensors`, parts of its own, one for
    each item."""
    slots = slots_within(model, tensors)
    with Checkpoint(folder, _upload_to(slots)) as checkpoint:
        loader = Loader(checkpoint, scheme)
        for slot, reader in loader.find_all(slots):
            loader.fill(slot, reader)
            yield


def _upload_to(slots: Sequence[Slot]) -> PinnedCopy | None:
    """How tensors come to the device of the slots; None: they stay on the host."""
    device = _device(slots[0]) if slots else torch.device("cpu")
    return None if device.type == "cpu" else PinnedCopy(device)


def fill_some_randomly(model: Loadable, seed: int, tensors: Sequence[Tensor]) -> Iterator[None]:
    """As `load_some_weights`, with what `fill_randomly` gives these tensors."""
    slots = slots_within(model, tensors)
    direct = _is_direct(slots)
    for slot in slots:
        _fill_slot(slot, seed, direct)
        yield


def slots_within(model: Loadable, tensors: Sequence[Tensor]) -> list[Slot]:
    """The slots that fill a part of one of these tensors."""
    begins = sorted(tensor.data_ptr() for tensor in tensors if tensor.nbytes)
    ends = sorted(tensor.data_ptr() + tensor.nbytes for tensor in tensors if tensor.nbytes)
    # More tensors begin before a place that is within one than end there: they do not overlap.
    return [
        slot
        for slot in model.checkpoint_slots()
        if bisect(begins, place := _place(slot)) > bisect(ends, place)
    ]


def _place(slot: Slot) -> int:
    return (slot.into if isinstance(slot, TensorSlot) else slot.into["values"]).data_ptr()


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Each tensor leaves several objects until all are loaded; looking through them again and again
    takes the garbage collector as long as the loading itself."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def sync_input_scales(model: Module, folder: Path) -> None:
    """Agrees with the other ranks on the scales of activations, after all have loaded."""
    layers = [module for module in model.modules() if isinstance(module, FusedMoE)]
    for layer in layers:
        layer.sync_input_scales()
    if any(layer.is_uncalibrated for layer in layers):
        logger.warning(
            "%s has no calibrated scales of activations: in nvfp4 they take a global scale of 1, "
            "which is coarse where they are far from 1",
            folder,
        )


def _check_tensors(
    model: Loadable,
    found: Sequence[FoundSlot],
    loader: Loader,
    whole: Callable[[RawConfig], Loadable],
) -> None:
    """Checks names, shapes and types without reading tensors."""
    checkpoint, scheme = loader.checkpoint, loader.scheme
    specs = [_tensors(slot, reader) for slot, reader in found]
    wanted = {name for spec in specs for name in spec}
    missing = sorted(wanted - checkpoint.location.keys())
    others = checkpoint.location.keys() - wanted
    if others:
        known = wanted | _optional_names(found, scheme)
        others -= known | _names_of_other_experts(others, known, scheme.num_experts)
    others = {
        name for name in others if not model.is_optional(name) and not scheme.is_optional(name)
    }
    if others:
        others -= _names_of_left_out_layers(others, RawConfig.read(checkpoint.folder))
    if others:
        others -= _all_names(loader, whole)
    extra = sorted(name for name in others if not checkpoint.is_empty(name))
    if missing or extra:
        problems = [f"missing {_abbreviated(missing)}"] * bool(missing)
        problems += [f"not in the model {_abbreviated(extra)}"] * bool(extra)
        raise ValueError(
            f"the tensors in {checkpoint.folder} do not fit config.json: {'; '.join(problems)}"
        )
    for spec in specs:
        for name, allowed in spec.items():
            checkpoint.check(name, allowed)


def _check_shared_experts(found: Iterable[FoundSlot], loader: Loader) -> None:
    """Shared experts among the routed ones have their format, and keep their numbers."""
    if loader.scheme.method == "none":
        return
    for slot, reader in found:
        if not isinstance(slot, MatrixSlot) or reader is None or "shared_expert" not in slot.name:
            continue
        assert isinstance(slot.format, WeightFormat)
        if slot.format.quantised and reader.storage is UNQUANTISED:
            raise ValueError(
                f"--enable-waterfill: {slot.name} is not quantised, but routed experts are "
                f"{slot.format.name}: leave it out, as shared experts keep their numbers"
            )


def _optional_names(found: Iterable[FoundSlot], scheme: Scheme) -> set[str]:
    """Tensors that the checkpoint may hold beside those of the slots."""
    matrices = [reader.source.matrix for _, reader in found if reader is not None]
    return {name for matrix in matrices for name in scheme.optional_tensors(matrix)}


def _names_of_other_experts(names: Iterable[str], known: Iterable[str], experts: int) -> set[str]:
    """Those of `names` that an expert of this rank has, too, but for the expert's number. The rank
    that holds the expert checks them; most tensors of a large model are such."""
    numbers = {str(number) for number in range(experts)}
    forms = {EXPERT.sub("", name, 1) for name in known if EXPERT.search(name)}
    return {
        name
        for name in names
        if (found := EXPERT.search(name))
        and found[1] in numbers
        and name[: found.start()] + name[found.end() :] in forms
    }


def _names_of_left_out_layers(names: Iterable[str], raw: RawConfig) -> set[str]:
    """Those of `names` in layers that --json-model-override-args left out."""
    layers = raw.integer("num_hidden_layers")
    if layers >= raw.integer(CHECKPOINT_LAYERS, layers):
        return set()
    return {name for name in names if (found := LAYER.search(name)) and int(found[1]) >= layers}


def _all_names(loader: Loader, whole: Callable[[RawConfig], Loadable]) -> set[str]:
    """Tensors of the whole model, on any rank."""
    with torch.device("meta"):
        model = whole(RawConfig.read(loader.checkpoint.folder))
        found = loader.find_all(model.checkpoint_slots())
    names = {name for slot, reader in found for name in _tensors(slot, reader)}
    return names | _optional_names(found, loader.scheme)


def _abbreviated(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _copy(planes: dict[str, Tensor], slot: MatrixSlot) -> None:
    for name, plane in planes.items():
        into = slot.into[name]
        assert into.shape == plane.shape, f"{slot.name}: {name} {into.shape}, {plane.shape}"
        into.copy_(plane)


def fill_randomly(model: Loadable, seed: int, *, direct: bool | None = None) -> None:
    """`--load-format dummy`: random weights of a realistic magnitude.

    They depend on the seed and the name only, so ranks agree. `direct`, the default on a GPU, draws
    numbers on the weights' device and in their format, which takes seconds for a large model;
    otherwise whole tensors are drawn and encoded.
    """
    slots = list(model.checkpoint_slots())
    _fill_slots(slots, seed, _is_direct(slots) if direct is None else direct)


def _is_direct(slots: Sequence[Slot]) -> bool:
    return any(_device(slot).type == "cuda" for slot in slots)


def _fill_slots(slots: Sequence[Slot], seed: int, direct: bool) -> None:
    for slot in tqdm(slots, desc="Making weights", unit="tensor", disable=None, leave=False):
        _fill_slot(slot, seed, direct)


def _fill_slot(slot: Slot, seed: int, direct: bool) -> None:
    if isinstance(slot, TensorSlot) and slot.into.dim() == 1:
        slot.into.fill_(0.0 if "bias" in slot.name else 1.0)
    elif direct:
        _fill_directly(slot, seed)
    else:
        _fill_whole(slot, seed)


def _fill_whole(slot: Slot, seed: int) -> None:
    noise = Generator().manual_seed(_key(slot, seed))
    whole = torch.empty(slot.shape).normal_(0.0, slot.shape[-1] ** -0.5, generator=noise)
    if isinstance(slot, TensorSlot):
        slot.into.copy_(whole[slot.cut])
        return
    assert isinstance(slot.format, WeightFormat)
    _copy(slot.format.slice(slot.format.encode(whole), slot.rows, slot.cols), slot)


def _fill_directly(slot: Slot, seed: int) -> None:
    """Embeddings are as large as the layers' outputs: tokens stay distinct through all layers."""
    noise = Generator(_device(slot)).manual_seed(_key(slot, seed))
    spread = 1.0 if slot.name.endswith(EMBEDDING) else slot.shape[-1] ** -0.5
    if isinstance(slot, TensorSlot):
        slot.into.normal_(0.0, spread, generator=noise)
        return
    assert isinstance(slot.format, WeightFormat)
    fill_planes(slot.format, slot.into, spread, noise)


def _device(slot: Slot) -> torch.device:
    return slot.into.device if isinstance(slot, TensorSlot) else slot.into["values"].device


def _key(slot: Slot, seed: int) -> int:
    part = slot.interleaved if isinstance(slot, MatrixSlot) else None
    return zlib.crc32(f"{seed} {slot.name} {slot.index} {part}".encode())
