"""`moesaic quantize SRC DST --format F`: writes a quantised copy of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from moesaic.cli.common import set_up_logging
from moesaic.config.flags import flag
from moesaic.config.parser import FlagParser, merge, read_config

DESCRIPTION = """\
Write a copy of a checkpoint with its matrices rounded to fewer bits, in a standard format.
SRC is a Hugging Face folder in bfloat16, float16 or float32 (or tiny:FAMILY), DST a new folder.
Rounds to nearest, without calibration: awq and gptq name the file format, not the method."""
FORMATS = tuple(
    "fp8 fp8_channel fp8_tensor int8_w8a8 int8_w8a16 int4_w4a16 awq gptq gptq_int8 nvfp4 "
    "mxfp4".split()
)
MIB = 1 << 20


@dataclass(frozen=True)
class QuantizeArgs:
    GROUP: ClassVar[str] = "Quantisation"

    format: str | None = flag(None, "Format to write.", choices=FORMATS)
    group_size: int | None = flag(
        None, "Columns per scale of int4_w4a16, awq and gptq; unset: 128.", at_least=8
    )
    experts_only: bool = flag(False, "Quantise only the routed experts.")


def run(argv: Sequence[str]) -> int:
    usage = "moesaic quantize SRC DST --format FORMAT [flags]"
    parser = FlagParser("moesaic quantize", usage, DESCRIPTION)
    parser.add_argument("source", metavar="SRC", help="folder to read")
    parser.add_argument("target", metavar="DST", help="folder to write; must be empty or missing")
    parser.add_flags(QuantizeArgs)
    given = parser.parse(argv)
    args = merge(QuantizeArgs, given, read_config(QuantizeArgs, given["config"]))
    if args.format is None:
        raise ValueError(f"--format is missing: choose one of {', '.join(FORMATS)}")
    set_up_logging("warning")
    _quantize(given["source"], Path(given["target"]), args, args.format)
    return 0


def _quantize(source: str, target: Path, args: QuantizeArgs, format: str) -> None:
    from moesaic.models.quantize import QuantizeJob, quantize
    from moesaic.models.tiny import materialise

    job = QuantizeJob(format, args.group_size, args.experts_only)
    written = quantize(Path(materialise(source)), target, job)
    print(
        f"wrote {target}: {written.matrices} matrices as {format}, "
        f"{written.bytes_before / MIB:.2f} MiB -> {written.bytes_after / MIB:.2f} MiB"
    )
