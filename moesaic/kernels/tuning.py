"""Configurations of the experts' kernels: measured on the device, or predicted.

Measured configurations are in `tuned/<device>-<format>.json`, one entry for each shape and size:

    {"E=128 H=2048 I=768": {
        "256": {"implementation": "small", "fused": false, "us": 251.3,
                "gate_up": {"block_m": 16, "block_n": 32, …}, "down": {"block_m": 16, …}}}}

`256` stands for 129 to 256 pairs of row and expert; `us` is the measured time, for people.
`gate_up` and `down` have the fields of the implementation's configuration. Entries are written one
by one, so a restarted tuner continues with the missing ones.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

TUNED = Path(__file__).parent / "tuned"
VARIABLE = "MOESAIC_TUNED"
FIX_HINT = "remove it, or replace it by `moesaic tune … --again`"
KIB = 1024
LINE = 128
"""Bytes of a cache line."""
FP8_FORMATS = ("fp8_block", "fp8_channel", "fp8_tensor")
FP8_WEIGHT_ONLY = {name: f"{name}_w8a16" for name in FP8_FORMATS}
"""Names of fp8 matrices whose rows are not quantised."""
BLOCK_SCALED = ("fp8_block", FP8_WEIGHT_ONLY["fp8_block"])
"""Formats with one scale for each block of 128 by 128."""
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, **dict.fromkeys(FP8_FORMATS, 1)}
"""Formats of the implementation `small`; all others use `formats`."""
SCRATCH = 2 * KIB
"""Bytes of a program's shared memory that the pipeline's stages leave free."""
LARGE_FORMATS = ("bf16", "fp16", *FP8_FORMATS)
LARGE_BLOCK = 128
LEAST_BLOCK = 16
MANY_ROWS = 40
MANY_FP8_ROWS = 24
"""Mean rows of an expert from which the implementation `large` pays off. fp8 switches earlier: its
partial sums take the registers of a second program."""
GATE_WIDTHS = ((64, 2), (32, 2))
FP8_GATE_WIDTHS = ((LINE, 3), *GATE_WIDTHS)
"""Tile widths, and the number of programs per processor that each requires. A tile of 128 can
quantise h; with few such tiles, a partial last round costs more than a small separate kernel."""
DOWN_WIDTHS = ((128, 2), (64, 2))


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Configuration of one product of experts_small.py. A tile is `block_m` rows by `block_n`
    columns (of gate and of up), summed `block_k` at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0
    """Cache lines of each row of weights to fetch while the previous kernel still runs. `gate_up`
    uses it only behind the kernel that quantises its rows."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """How a layer's two products are computed. None: the implementation's default."""

    implementation: str
    block: int
    gate_up: Any = None
    down: Any = None
    fused: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    format: str
    experts: int
    hidden: int
    inner: int

    def __str__(self) -> str:
        return f"E={self.experts} H={self.hidden} I={self.inner}"


@dataclass(frozen=True, slots=True)
class DeviceTuning:
    name: str
    processors: int
    shared: int
    """Bytes of a processor's shared memory that programs can use."""


@cache
def device_facts(device: torch.device) -> DeviceTuning:
    """Without a GPU, numbers that make the interpreter choose the same plans."""
    if device.type != "cuda":
        return DeviceTuning(device.type, 8, 224 * KIB)
    facts = torch.cuda.get_device_properties(device)
    shared = getattr(facts, "shared_memory_per_multiprocessor", 100 * KIB)
    return DeviceTuning(facts.name, facts.multi_processor_count, shared - 4 * KIB)


def block_for(
    format: str,
    experts: int,
    hidden: int,
    inner: int,
    num_pairs: int,
    device: torch.device | None = None,
) -> int:
    """Places of a tile, for `sort_pairs` and `blocks`. `device` defaults to the current GPU."""
    if device is None:
        here = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if here else torch.device("cpu")
    return plan_for(device, ExpertsShape(format, experts, hidden, inner), num_pairs).block


def quantises_inner(
    format: str, experts: int, hidden: int, inner: int, num_pairs: int, device: torch.device
) -> bool:
    """Whether `gate_up` should get h with scales. Otherwise h is quantised between the products,
    and `gate_up` can use narrow tiles if there are few."""
    if format not in FP8_FORMATS or inner % LINE:
        return False
    plan = plan_for(device, ExpertsShape(format, experts, hidden, inner), num_pairs)
    return plan.implementation != "small" or plan.gate_up.block_n == LINE


def bucket(num_pairs: int) -> int:
    """Rounds a number of pairs up to a power of two: 129..256 -> 256."""
    return 1 << max(0, num_pairs - 1).bit_length()


def plan_for(device: torch.device, shape: ExpertsShape, num_pairs: int) -> ExpertsPlan:
    return _overrides.get(shape) or _plan(device, shape, bucket(num_pairs))


def plan_for_block(
    device: torch.device, shape: ExpertsShape, num_pairs: int, block: int
) -> ExpertsPlan:
    """The plan that `block_for` used. For another block, a plan that depends on the block alone: a
    row's bits then do not depend on the other rows."""
    plan = plan_for(device, shape, num_pairs)
    return plan if plan.block == block else plan_of_block(device, shape, block)


@cache
def plan_of_block(device: torch.device, shape: ExpertsShape, block: int) -> ExpertsPlan:
    return guess(device_facts(device), shape, shape.experts * block, block)


_overrides: dict[ExpertsShape, ExpertsPlan] = {}


@contextmanager
def override_plan(shape: ExpertsShape, plan: ExpertsPlan) -> Iterator[None]:
    """Overrides the plan of that shape; for the tuner."""
    _overrides[shape] = plan
    try:
        yield
    finally:
        del _overrides[shape]


@cache
def _plan(device: torch.device, shape: ExpertsShape, pairs: int) -> ExpertsPlan:
    facts = device_facts(device)
    own, *_ = searched = folders()
    if own != TUNED and shape.format in LARGE_FORMATS:
        _warn_if_missing(own / file_name(facts.name, shape.format))
    for folder in searched:
        measured = load(facts.name, shape.format, folder).get((str(shape), pairs))
        if measured is not None:
            return measured
    return guess(facts, shape, pairs)


@cache
def _warn_if_missing(path: Path) -> None:
    """Warns once: files for another GPU or format would otherwise be ignored silently."""
    if not path.is_file():
        logger.warning(
            "%s has no %s: such weights do not use that folder on this GPU; "
            "`moesaic tune … --out %s` writes the file",
            VARIABLE,
            path,
            path.parent,
        )


def folders() -> list[Path]:
    """Folders of measured configurations: the user's, then the package's."""
    own = os.environ.get(VARIABLE)
    if not own:
        return [TUNED]
    folder = Path(own).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"{VARIABLE} is {own!r}, which is no folder: unset it, or create one with "
            f"`moesaic tune … --out {own}`"
        )
    return [folder, TUNED]


def guess(
    device: DeviceTuning, shape: ExpertsShape, pairs: int, block: int | None = None
) -> ExpertsPlan:
    """The plan without measurements; `block`: for tiles of that many places."""
    mean = pairs / shape.experts
    if block is None:
        # Most experts fit one tile: their weights are read once.
        enough = (size for size in (16, 32, 64) if size >= 1.5 * mean)
        many = MANY_FP8_ROWS if shape.format in FP8_FORMATS else MANY_ROWS
        block = LARGE_BLOCK if mean > many else next(enough)
    if shape.format not in ITEM_BYTES:
        return ExpertsPlan("formats", block)
    if block >= LARGE_BLOCK and shape.format in LARGE_FORMATS:
        return ExpertsPlan("large", block)
    touched = shape.experts * (1 - (1 - 1 / shape.experts) ** pairs)
    tiles = max(touched, pairs / block)
    return ExpertsPlan("small", block, *guess_small(device, shape, block, tiles))


def guess_small(
    device: DeviceTuning, shape: ExpertsShape, block: int, tiles: float
) -> tuple[TileConfig, TileConfig]:
    """Configurations of gate_up and down.

    A step is 128 bytes of a row of weights. Tiles are as wide as the required number of programs
    per processor allows, but not too narrow for Hopper's products of 64 lines: with one kind of
    product, a row's bits do not depend on the other rows. The programs of a processor share its
    memory for loads in flight: 40 KiB suffice while all of them run, more keep the memory busy when
    few are left.
    """
    item = ITEM_BYTES[shape.format]
    step = LINE // item
    widths = FP8_GATE_WIDTHS if shape.format in FP8_FORMATS else GATE_WIDTHS
    gate_n, gates = _widest(device, tiles, shape.inner, widths)
    down_n, downs = _widest(device, tiles, shape.hidden, DOWN_WIDTHS)
    gate = TileConfig(block, gate_n, step, prefetch=_prefetch_gate(shape, gate_n))
    down = TileConfig(block, down_n, step, prefetch=_prefetch(shape.inner * item, down_n))
    return (
        _staged(device, gate, item, 2 * gate_n, gates),
        _staged(device, down, item, down_n, downs),
    )


def _widest(
    device: DeviceTuning, tiles: float, total: int, widths: tuple[tuple[int, int], ...]
) -> tuple[int, float]:
    """The first width with enough programs per processor, and that number of programs."""
    for width, enough in widths:
        programs = tiles * -(-total // width) / device.processors
        if programs >= enough:
            break
    return width, programs


def _staged(
    device: DeviceTuning, config: TileConfig, item: int, lines: int, programs: float
) -> TileConfig:
    """Adds stages and warps. `item`: bytes of a weight; `lines`: rows of weights in a tile;
    `programs`: per processor."""
    stage = _stage_bytes(item, lines, config.block_m, config.block_k)
    wide = _is_wide(lines, config.block_m)
    # Wide fp8 tiles scale each partial sum, which takes all registers.
    most = 1 if wide else 3 if 4 * stage <= device.shared // 3 else 2
    resident = max(1, min(most, math.ceil(programs)))
    stages = (device.shared // resident - SCRATCH) // stage
    return replace(config, num_stages=max(2, min(10, stages)), num_warps=8 if wide else 4)


def _prefetch(row: int, width: int) -> int:
    """Cache lines of a row of `row` bytes: 32 KiB a program, a quarter of Hopper's L2 in all."""
    lines = -(-row // LINE)
    return min(256 // width, 1 << (lines.bit_length() - 1))


def _prefetch_gate(shape: ExpertsShape, width: int) -> int:
    return _prefetch(shape.hidden, 2 * width) if shape.format in FP8_FORMATS else 0


def _stage_bytes(item: int, lines: int, rows: int, step: int) -> int:
    """Shared memory of one stage: weights and rows."""
    return (lines + rows) * item * step


def _is_wide(lines: int, rows: int) -> bool:
    """Whether a tile's sums need eight warps."""
    return lines * rows >= 256 * 64


def candidates(
    device: DeviceTuning, shape: ExpertsShape, block: int
) -> tuple[list[TileConfig], list[TileConfig]]:
    """Configurations of gate_up and of down worth measuring. The products are measured separately,
    as they are independent. No tile is too narrow for Hopper's products of 64 lines. `prefetch` is
    as predicted: its effect shows only in a whole layer."""
    item, quantised = ITEM_BYTES[shape.format], shape.format in FP8_FORMATS
    steps = (LINE,) if quantised else (LINE // item, 2 * LINE // item)

    def fitting(width: int, parts: int, prefetch: int) -> Iterator[TileConfig]:
        """Stages that leave room for one to four programs per processor."""
        warps = 8 if _is_wide(parts * width, block) else 4
        for step in steps:
            stage = _stage_bytes(item, parts * width, block, step)
            rooms = (device.shared // programs - SCRATCH for programs in (1, 2, 3, 4))
            counts = {min(10, room // stage) for room in rooms}
            for count in sorted(counts):
                if count >= 2:
                    yield TileConfig(block, width, step, warps, count, prefetch)

    gates = (fitting(width, 2, _prefetch_gate(shape, width)) for width in (128, 64, 32))
    downs = (fitting(width, 1, _prefetch(shape.inner * item, width)) for width in (128, 64))
    return [*chain(*gates)], [*chain(*downs)]


def config_class(implementation: str) -> type:
    if implementation == "small":
        return TileConfig
    if implementation == "large":
        return import_module("moesaic.kernels.triton.experts_product").LargeConfig
    raise ValueError(
        f"implementation {implementation!r} has no configurations: expected 'small' or 'large'"
    )


def file_name(device: str, format: str) -> str:
    return f"{re.sub('[^A-Za-z0-9]+', '_', device).strip('_')}-{format}.json"


def load(device: str, format: str, folder: Path = TUNED) -> dict[tuple[str, int], ExpertsPlan]:
    """Measured plans by shape ("E=… H=… I=…") and number of pairs."""
    return decode_entries(folder / file_name(device, format), _decode)


def decode_entries(path: Path, decode: Callable[[Any], T]) -> dict[tuple[str, int], T]:
    """The decoded entries of a file by name and number of pairs or rows."""
    found = {}
    for name, sizes in read(path).items():
        for size, entry in sizes.items():
            try:
                found[name, int(size)] = decode(entry)
            except KeyError as error:
                raise ValueError(f"{path}: no {error} in entry {entry}: {FIX_HINT}") from error
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: {error} in entry {entry}: {FIX_HINT}") from error
    return found


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The undecoded entries of a file by shape and pairs; empty without a file."""
    try:
        shapes = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): remove it and tune again") from error
    tables = [shapes, *shapes.values()] if isinstance(shapes, dict) else [shapes]
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path} has no entries by shape and pairs: remove it and tune again")
    for shape in shapes:
        for pairs in shapes[shape]:
            if not pairs.isdecimal():
                raise ValueError(f"{path}: {pairs!r} of {shape} is no number of pairs: remove it")
    return shapes


def _decode(entry: dict[str, Any]) -> ExpertsPlan:
    kind = config_class(entry["implementation"])
    gate_up, down = (kind(**entry[which]) for which in ("gate_up", "down"))
    check_config(gate_up)
    check_config(down)
    if gate_up.block_m != down.block_m:
        raise ValueError("gate_up and down have different block_m")
    fused = entry.get("fused", False)
    if type(fused) is not bool or (fused and kind is not TileConfig):
        raise ValueError(
            f"fused is {fused!r}: it must be true or false, and only 'small' can be fused"
        )
    return ExpertsPlan(entry["implementation"], gate_up.block_m, gate_up, down, fused)


def check_config(config: Any) -> None:
    """Raises ValueError for values that would fail inside Triton, whose message names no file."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if isinstance(field.default, bool):
            if type(value) is not bool:
                raise ValueError(f"{name} is {value!r}, which is not true or false")
            continue
        if type(value) is not int:
            raise ValueError(f"{name} is {value!r}, which is not an integer")
        least = LEAST_BLOCK if name.startswith("block") else 0 if name == "prefetch" else 1
        power = name.startswith("block") or name.endswith("warps")
        if value < least or (power and value & (value - 1)):
            kind = "power of two" if power else "number"
            raise ValueError(f"{name} is {value}, which is no {kind} from {least} on")


def save(
    device: str, shape: ExpertsShape, pairs: int, plan: ExpertsPlan, us: float, folder: Path = TUNED
) -> None:
    """Adds or replaces an entry, atomically for readers."""
    entry = {
        "implementation": plan.implementation,
        "fused": plan.fused,
        "us": round(us, 2),
        "gate_up": asdict(plan.gate_up),
        "down": asdict(plan.down),
    }
    write_entry(folder / file_name(device, shape.format), str(shape), pairs, entry)
    _plan.cache_clear()


def write_entry(path: Path, name: str, size: int, entry: dict[str, Any]) -> None:
    """`size`: a number of pairs or rows, which is rounded up to its bucket."""
    shapes = read(path)
    shapes.setdefault(name, {})[str(bucket(size))] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(_text(shapes))
    written.replace(path)


def _text(shapes: dict[str, dict[str, Any]]) -> str:
    """One line for each entry, sorted by shape and size."""
    parts = []
    for shape in sorted(shapes):
        sizes = sorted(shapes[shape].items(), key=lambda item: int(item[0]))
        lines = ",\n".join(f"    {json.dumps(size)}: {json.dumps(plan)}" for size, plan in sizes)
        parts.append(f"  {json.dumps(shape)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
