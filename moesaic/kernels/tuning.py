"""With what configuration the experts' kernels run: what was measured on the device, or a guess.

Measured configurations are in `tuned/<device>-<format>.json`, one entry a shape and size:

    {"E=128 H=2048 I=768": {
        "256": {"implementation": "small", "fused": false, "us": 251.3,
                "gate_up": {"block_m": 16, "block_n": 32, …}, "down": {"block_m": 16, …}}}}

`256` stands for 129 to 256 pairs of row and expert; `us` is what was measured, for people. Fields
of `gate_up` and `down` are those of the implementation's configuration. Entries are written one by
one, so a tuner that was stopped goes on with those that are missing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

TUNED = Path(__file__).parent / "tuned"
VARIABLE = "MOESAIC_TUNED"
MEND = "remove it, or replace it by `moesaic tune … --again`"
KIB = 1024
LINE = 128
"""Bytes of a cache line."""
FP8_FORMATS = ("fp8_block", "fp8_channel", "fp8_tensor")
FP8_WEIGHT_ONLY = {name: f"{name}_w8a16" for name in FP8_FORMATS}
"""What fp8 matrices are called whose rows are not quantised."""
BLOCK_SCALED = ("fp8_block", FP8_WEIGHT_ONLY["fp8_block"])
"""Formats with a scale for each block of 128 by 128."""
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, **dict.fromkeys(FP8_FORMATS, 1)}
"""Formats of `small`; those that are not here are `formats`."""
SCRATCH = 2 * KIB
"""Of a program's shared memory, for all but what is on its way."""
LARGE_FORMATS = ("bf16", "fp16", *FP8_FORMATS)
LARGE_BLOCK = 128
LEAST_BLOCK = 16
MANY_ROWS = 40
MANY_FP8_ROWS = 24
"""Rows of an expert, on average, from which the matrix units are worth being filled; of fp8 sooner,
as partial sums take the registers of a second program."""
GATE_WIDTHS = ((64, 2), (32, 2))
FP8_GATE_WIDTHS = ((LINE, 3), *GATE_WIDTHS)
"""Widths of tiles, and the programs of each processor from which on they are taken. A tile of 128
can quantise h; where those are few, a last round of them costs more than a small kernel behind."""
DOWN_WIDTHS = ((128, 2), (64, 2))


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Of one product of experts_small.py. A tile is `block_m` rows by `block_n` columns (of gate
    and of up), summed `block_k` at a time; `prefetch`: lines of each row of weights that are
    fetched before the kernel before has ended: of gate_up where that one quantises its rows."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    prefetch: int = 0


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """How a layer's two products are computed. None: the implementation's own default."""

    implementation: str
    block: int
    gate_up: Any = None
    down: Any = None
    fused: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A layer's experts: `format`, E, H, I."""

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
    """Bytes of a processor's shared memory that programs can have."""


@cache
def device_facts(device: torch.device) -> DeviceTuning:
    """Of what is not a GPU: numbers that make the interpreter take the same ways."""
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
    """Places of a tile, for `sort_pairs` and `blocks`; without a device, of the current GPU."""
    if device is None:
        here = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if here else torch.device("cpu")
    return plan_for(device, ExpertsShape(format, experts, hidden, inner), num_pairs).block


def quantises_inner(
    format: str, experts: int, hidden: int, inner: int, num_pairs: int, device: torch.device
) -> bool:
    """Whether `gate_up` should be given h with scales; else h is quantised between the products,
    which lets the tiles of `gate_up` be narrow where there are few."""
    if format not in FP8_FORMATS or inner % LINE:
        return False
    plan = plan_for(device, ExpertsShape(format, experts, hidden, inner), num_pairs)
    return plan.implementation != "small" or plan.gate_up.block_n == LINE


def bucket(num_pairs: int) -> int:
    """The power of two that stands for a number of pairs: 129..256 -> 256."""
    return 1 << max(0, num_pairs - 1).bit_length()


def plan_for(device: torch.device, shape: ExpertsShape, num_pairs: int) -> ExpertsPlan:
    return _tried.get(shape) or _plan(device, shape, bucket(num_pairs))


def plan_for_block(
    device: torch.device, shape: ExpertsShape, num_pairs: int, block: int
) -> ExpertsPlan:
    """As `block_for` had it; for tiles of another size, one that depends on that size alone, so
    that rows give the same bits whatever comes with them."""
    plan = plan_for(device, shape, num_pairs)
    return plan if plan.block == block else plan_of_block(device, shape, block)


@cache
def plan_of_block(device: torch.device, shape: ExpertsShape, block: int) -> ExpertsPlan:
    return guess(device_facts(device), shape, shape.experts * block, block)


_tried: dict[ExpertsShape, ExpertsPlan] = {}


@contextmanager
def trying(shape: ExpertsShape, plan: ExpertsPlan) -> Iterator[None]:
    """Everything of that shape goes by this plan meanwhile; for the tuner."""
    _tried[shape] = plan
    try:
        yield
    finally:
        del _tried[shape]


@cache
def _plan(device: torch.device, shape: ExpertsShape, pairs: int) -> ExpertsPlan:
    facts = device_facts(device)
    own, *_ = searched = folders()
    if own != TUNED and shape.format in LARGE_FORMATS:
        _tell_if_missing(own / file_name(facts.name, shape.format))
    for folder in searched:
        measured = load(facts.name, shape.format, folder).get((str(shape), pairs))
        if measured is not None:
            return measured
    return guess(facts, shape, pairs)


@cache
def _tell_if_missing(path: Path) -> None:
    """Once: files for another GPU or format would else do nothing without a word."""
    if not path.is_file():
        logger.warning(
            "%s has no %s: for such weights nothing in that folder is used on this GPU; "
            "`moesaic tune … --out %s` makes the file",
            VARIABLE,
            path,
            path.parent,
        )


def folders() -> list[Path]:
    """Of measured configurations: the user's, then the package's."""
    own = os.environ.get(VARIABLE)
    if not own:
        return [TUNED]
    folder = Path(own).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"{VARIABLE} is {own!r} and that is no folder: unset it, or make one with "
            f"`moesaic tune … --out {own}`"
        )
    return [folder, TUNED]


def guess(
    device: DeviceTuning, shape: ExpertsShape, pairs: int, block: int | None = None
) -> ExpertsPlan:
    """What to take where nothing was measured; with `block`, for tiles of that many places."""
    mean = pairs / shape.experts
    if block is None:
        # Most experts then are one tile: weights are read once.
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
    """Of gate_up and down.

    A step is 128 bytes of a row of weights. Tiles are as wide as leaves every processor some
    programs, but never so narrow that Hopper's products of 64 lines do not fit: of one kind of
    product, rows get the same bits whatever comes with them. Programs of a processor share its
    memory for what is on its way to them: 40 KiB would do while all of them run, more keeps the
    memory busy when few are left.
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
    """The first width that gives every processor enough programs, and how many it gives."""
    for width, enough in widths:
        programs = tiles * -(-total // width) / device.processors
        if programs >= enough:
            break
    return width, programs


def _staged(
    device: DeviceTuning, config: TileConfig, item: int, lines: int, programs: float
) -> TileConfig:
    """`item` bytes of a weight, `lines` of them in a tile; `programs` that each processor gets."""
    stage = _stage_bytes(item, lines, config.block_m, config.block_k)
    wide = _is_wide(lines, config.block_m)
    # Wide tiles of fp8, whose partial sums are scaled one by one, take the registers of all.
    most = 1 if wide else 3 if 4 * stage <= device.shared // 3 else 2
    resident = max(1, min(most, math.ceil(programs)))
    stages = (device.shared // resident - SCRATCH) // stage
    return replace(config, num_stages=max(2, min(10, stages)), num_warps=8 if wide else 4)


def _prefetch(row: int, width: int) -> int:
    """Lines of a row of so many bytes: 32 KiB a program, of all that run a quarter of Hopper's L2
    cache."""
    lines = -(-row // LINE)
    return min(256 // width, 1 << (lines.bit_length() - 1))


def _prefetch_gate(shape: ExpertsShape, width: int) -> int:
    return _prefetch(shape.hidden, 2 * width) if shape.format in FP8_FORMATS else 0


def _stage_bytes(item: int, lines: int, rows: int, step: int) -> int:
    """Of weights and of rows."""
    return (lines + rows) * item * step


def _is_wide(lines: int, rows: int) -> bool:
    """Sums of a tile that need eight warps."""
    return lines * rows >= 256 * 64


def candidates(
    device: DeviceTuning, shape: ExpertsShape, block: int
) -> tuple[list[TileConfig], list[TileConfig]]:
    """Configurations of gate_up and of down that are worth being measured; each product's by
    itself, as neither depends on the other's. None is too narrow for Hopper's products of 64 lines.
    What `prefetch` gives only shows behind the other product: it is as `guess` has it."""
    item, quantised = ITEM_BYTES[shape.format], shape.format in FP8_FORMATS
    steps = (LINE,) if quantised else (LINE // item, 2 * LINE // item)

    def fitting(lines: int, step: int) -> Iterator[tuple[int, int]]:
        """Warps and stages that leave room for one, two, three or four programs a processor."""
        stage = _stage_bytes(item, lines, block, step)
        counts = {
            min(10, (device.shared // programs - SCRATCH) // stage) for programs in (1, 2, 3, 4)
        }
        warps = 8 if _is_wide(lines, block) else 4
        return ((warps, count) for count in sorted(counts) if count >= 2)

    gates = [
        TileConfig(block, width, step, warps, stages, _prefetch_gate(shape, width))
        for width, step in product((128, 64, 32), steps)
        for warps, stages in fitting(2 * width, step)
    ]
    downs = [
        TileConfig(block, width, step, warps, stages, _prefetch(shape.inner * item, width))
        for width, step in product((128, 64), steps)
        for warps, stages in fitting(width, step)
    ]
    return gates, downs


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
    """What was measured, by shape ("E=… H=… I=…") and number of pairs."""
    path = folder / file_name(device, format)
    return {
        (shape, int(pairs)): _decode(entry, path)
        for shape, sizes in read(path).items()
        for pairs, entry in sizes.items()
    }


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of a file by shape and pairs, as they are; none where there is no file."""
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


def _decode(entry: dict[str, Any], path: Path) -> ExpertsPlan:
    try:
        kind = config_class(entry["implementation"])
        gate_up, down = (kind(**entry[which]) for which in ("gate_up", "down"))
        check_config(gate_up)
        check_config(down)
        if gate_up.block_m != down.block_m:
            raise ValueError("gate_up and down have different block_m")
        fused = entry.get("fused", False)
        if type(fused) is not bool or (fused and kind is not TileConfig):
            raise ValueError(f"fused is {fused!r}: only 'small' can be, and it is true or false")
    except KeyError as error:
        raise ValueError(f"{path}: no {error} in entry {entry}: {MEND}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error} in entry {entry}: {MEND}") from error
    return ExpertsPlan(entry["implementation"], gate_up.block_m, gate_up, down, fused)


def check_config(config: Any) -> None:
    """ValueError for what would end in a message of Triton's that names no file."""
    for field in fields(config):
        name, value = field.name, getattr(config, field.name)
        if isinstance(field.default, bool):
            if type(value) is not bool:
                raise ValueError(f"{name} is {value!r}, which is neither true nor false")
            continue
        if type(value) is not int:
            raise ValueError(f"{name} is {value!r}, which is no whole number")
        least = LEAST_BLOCK if name.startswith("block") else 0 if name == "prefetch" else 1
        power = name.startswith("block") or name.endswith("warps")
        if value < least or (power and value & (value - 1)):
            kind = "power of two" if power else "number"
            raise ValueError(f"{name} is {value}, which is no {kind} from {least} on")


def save(
    device: str, shape: ExpertsShape, pairs: int, plan: ExpertsPlan, us: float, folder: Path = TUNED
) -> None:
    """Adds an entry or replaces it; a reader sees the file before or after, never between."""
    path = folder / file_name(device, shape.format)
    shapes = read(path)
    shapes.setdefault(str(shape), {})[str(bucket(pairs))] = {
        "implementation": plan.implementation,
        "fused": plan.fused,
        "us": round(us, 2),
        "gate_up": asdict(plan.gate_up),
        "down": asdict(plan.down),
    }
    write(path, shapes)
    _plan.cache_clear()


def write(path: Path, shapes: dict[str, dict[str, Any]]) -> None:
    """Entries as `read` gives them, in place of the file's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(_text(shapes))
    written.replace(path)


def _text(shapes: dict[str, dict[str, Any]]) -> str:
    """A line for each entry, in the order of shapes and sizes."""
    parts = []
    for shape in sorted(shapes):
        sizes = sorted(shapes[shape].items(), key=lambda item: int(item[0]))
        lines = ",\n".join(f"    {json.dumps(size)}: {json.dumps(plan)}" for size, plan in sizes)
        parts.append(f"  {json.dumps(shape)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
