"""Writes a checkpoint with quantised matrices. N rows · K columns · E experts."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from moesaic.models.checkpoint import FLOATS, INDEX, Checkpoint
from moesaic.models.config import RawConfig
from moesaic.models.registry import ARCHITECTURES
from moesaic.models.schemes import detect_scheme
from moesaic.models.schemes.quantize_formats import (
    NO_GROUP,
    QUANTIZE_FORMATS,
    STACKED_FORMATS,
    QuantizeFormat,
)
from moesaic.models.schemes.storage import Matrix, Storage

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30
PROJECTION = re.compile(
    r"model\.layers\.\d+\..*\."
    r"((q|k|v|o|q_a|q_b|kv_b|gate|up|down)_proj|kv_a_proj_with_mqa|w[123])\.weight"
)
STACK = re.compile(r"model\.layers\.\d+\..*\.experts\.(gate_up|down)_proj")
# Other engines run these as one matrix, with the first one's global scale.
FUSED = (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"))
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


@dataclass(frozen=True)
class QuantizeJob:
    """What to write; without `group_size` the format's default."""

    form: str
    group_size: int | None = None
    experts_only: bool = False
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class QuantizeReport:
    matrices: int
    bytes_before: int
    bytes_after: int


@dataclass
class ShardWriter:
    """Writes tensors into files of about `limit` bytes, and their index."""

    folder: Path
    limit: int
    written: int = 0
    _shard: dict[str, Tensor] = field(default_factory=dict)
    _pending: int = 0
    _names: list[list[str]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        if self._shard and self._pending + tensor.nbytes > self.limit:
            self._flush()
        # A copy: views of a mapped file would keep all of it, and safetensors needs whole storages.
        self._shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._pending += tensor.nbytes
        self.written += tensor.nbytes

    def _flush(self) -> None:
        save_file(self._shard, self._path(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._shard))
        self._shard, self._pending = {}, 0

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number}"

    def finish(self) -> None:
        """Names the files, now that their number is known, and writes the index."""
        self._flush()
        count = len(self._names)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._names):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            if count == 1:
                file = "model.safetensors"
            self._path(number).rename(self.folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.written}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2))


@dataclass(frozen=True)
class Quantizer:
    source: Checkpoint
    raw: RawConfig
    form: QuantizeFormat
    storage: Storage
    group: int
    targets: frozenset[str]
    """Names of the tensors that are quantised."""

    def convert(self, name: str) -> Iterator[tuple[str, Tensor]]:
        if name not in self.targets:
            yield name, self.source.read(name)
        elif self.form.stacked:
            yield from self._convert_stack(name)
        else:
            w_NK = self._finite(name)
            matrix = Matrix(name, (w_NK.shape[0], w_NK.shape[1]))
            for suffix, tensor in self.storage.write(w_NK, self._amax(name, w_NK)).items():
                yield matrix.tensor(suffix), tensor

    def _convert_stack(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """[E, K, N] with inputs first; rows stay interleaved."""
        experts, size_K, size_N = self.source.shape(name)
        matrix = Matrix(name, (size_N, size_K), index=0)
        parts: dict[str, list[Tensor]] = {}
        for expert in range(experts):
            w_NK = self._finite(name, expert).t()
            for suffix, tensor in self.storage.write(w_NK, w_NK.abs().amax()).items():
                parts.setdefault(suffix, []).append(tensor)
        for suffix, tensors in parts.items():
            yield matrix.tensor(suffix), torch.stack(tensors)

    def _finite(self, name: str, *cut: int) -> Tensor:
        tensor = self.source.read(name, *cut).float()
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"tensor {name} holds NaN or infinity: there is no scale for it")
        return tensor

    def _amax(self, name: str, w_NK: Tensor) -> Tensor:
        amax = w_NK.abs().amax()
        if self.storage.shares_amax:
            for other in _fused_with(name):
                if other in self.source:
                    amax = torch.maximum(amax, self._finite(other).abs().amax())
        return amax

    def config(self) -> dict[str, Any]:
        return self.form.config(self.group, self._ignored())

    def _ignored(self) -> list[str]:
        """Linear modules that stay unquantised, by full name, which every convention accepts."""
        return sorted(
            name.removesuffix(".weight")
            for name in self.source.location
            if name.endswith(".weight")
            and name not in self.targets
            and len(self.source.shape(name)) == 2
            and "embed_tokens" not in name
        )


def quantize(source: Path, target: Path, job: QuantizeJob) -> QuantizeReport:
    """Creates `target` only when all of it is written."""
    raw = RawConfig.read(source)
    form = _form(raw, source, job)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists and is not an empty folder: name a new one")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = target.parent / f".{target.name}.part"
    if work.exists():
        logger.warning("removing %s, which an interrupted run has left", work)
        shutil.rmtree(work)
    work.mkdir()
    try:
        with Checkpoint(source) as checkpoint:
            written = _write(_quantizer(checkpoint, raw, form, job), source, work, job)
        if target.exists():
            target.rmdir()
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return written


def _form(raw: RawConfig, source: Path, job: QuantizeJob) -> QuantizeFormat:
    if job.form not in QUANTIZE_FORMATS:
        raise ValueError(
            f"unknown format {job.form!r}: choose one of {', '.join(QUANTIZE_FORMATS)}"
        )
    form = QUANTIZE_FORMATS[job.form]
    if job.group_size is not None and form.group_size == NO_GROUP:
        grouped = [name for name, form in QUANTIZE_FORMATS.items() if form.group_size]
        raise ValueError(
            f"--group-size {job.group_size}: format {job.form} has no groups to choose, only "
            f"{', '.join(grouped)} have"
        )
    names = raw.list_of("architectures", str)
    if not any(name in ARCHITECTURES for name in names):
        raise ValueError(
            f"{raw.source}: architectures {names} are not known, only {', '.join(ARCHITECTURES)}"
        )
    forms = STACKED_FORMATS if "GptOssForCausalLM" in names else QUANTIZE_FORMATS
    if job.form not in forms:
        raise ValueError(
            f"format {job.form} has no standard form for {names[0]}: choose {', '.join(forms)}"
        )
    method = detect_scheme(raw, source).method
    if method != "none":
        raise ValueError(
            f"{source} is quantised already ({method}): start from its bfloat16 or float32 original"
        )
    return forms[job.form]


def _quantizer(
    checkpoint: Checkpoint, raw: RawConfig, form: QuantizeFormat, job: QuantizeJob
) -> Quantizer:
    pattern = STACK if form.stacked else PROJECTION
    targets = frozenset(
        name
        for name in checkpoint.location
        if pattern.fullmatch(name)
        and checkpoint.dtype(name) in FLOATS
        and len(checkpoint.shape(name)) == (3 if form.stacked else 2)
        and not checkpoint.is_empty(name)
        and (".experts." in name or not job.experts_only)
    )
    if not targets:
        raise ValueError(f"{checkpoint.folder} holds no matrices of experts or of attention")
    group = job.group_size or form.group_size
    quantizer = Quantizer(checkpoint, raw, form, form.storage(group), group, targets)
    _check_fit(quantizer, job.form)
    return quantizer


def _check_fit(quantizer: Quantizer, format_name: str) -> None:
    form, storage = quantizer.form, quantizer.storage
    assert storage.format is not None
    if storage.format.ragged:
        return
    rows, cols = storage.multiple
    sizes = {name: quantizer.source.shape(name)[-2:] for name in sorted(quantizer.targets)}
    if form.stacked:
        sizes = {name: size[::-1] for name, size in sizes.items()}
    for name, (size_N, size_K) in sizes.items():
        if size_N % rows or size_K % cols:
            advice = "choose another format"
            if ".experts." not in name:
                advice = f"quantise the experts alone with --experts-only, or {advice}"
            common = gcd(*(size[1] for size in sizes.values()))
            if form.group_size and common % 8 == 0:
                advice = f"choose --group-size {gcd(common, 128)}"
            raise ValueError(
                f"{name} [{size_N}, {size_K}] does not fit format {format_name}: rows must be a "
                f"multiple of {rows} and columns of {cols}; {advice}"
            )


def _write(quantizer: Quantizer, source: Path, work: Path, job: QuantizeJob) -> QuantizeReport:
    location = quantizer.source.location
    writer = ShardWriter(work, job.shard_bytes)
    # In file order, so each file is read sequentially.
    names = sorted(location, key=lambda name: (location[name], name))
    for name in tqdm(names, desc="Quantising", unit="tensor", disable=None, leave=False):
        for written, tensor in quantizer.convert(name):
            writer.add(written, tensor)
    writer.finish()
    _copy_files(source, work)
    config = quantizer.config()
    data = {**quantizer.raw.data, "quantization_config": config}
    (work / "config.json").write_text(json.dumps(data, indent=2))
    if config["quant_method"] == "modelopt":
        (work / "hf_quant_config.json").write_text(json.dumps(_modelopt_file(config), indent=2))
    before = sum((source / file).stat().st_size for file in set(location.values()))
    return QuantizeReport(len(quantizer.targets), before, writer.written)


def _copy_files(source: Path, work: Path) -> None:
    """Copies tokenizer, templates and licence: all but weights and rewritten files."""
    for path in source.iterdir():
        if path.is_file() and path.suffix not in WEIGHT_FILES and not path.name.endswith(INDEX):
            shutil.copy(path, work / path.name)


def _modelopt_file(config: dict[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json, for older readers."""
    group = config["config_groups"]["group_0"]["weights"]["group_size"]
    return {
        "producer": config["producer"],
        "quantization": {
            "quant_algo": config["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": group,
            "exclude_modules": config["ignore"],
        },
    }


def _fused_with(name: str) -> list[str]:
    stem, module = name.removesuffix(".weight").rsplit(".", 1)
    family = next((names for names in FUSED if module in names), ())
    return [f"{stem}.{other}.weight" for other in family if other != module]
