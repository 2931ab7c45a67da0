"""`moesaic tune`: finds the fastest configurations of the expert kernels on this GPU."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, ClassVar

from moesaic.cli.common import set_up_logging
from moesaic.config.flags import flag
from moesaic.config.parser import FlagParser, merge, read_config
from moesaic.core.process import child_environment

if TYPE_CHECKING:
    from moesaic.kernels.tune import TuneCase

DESCRIPTION = """\
Find the fastest configurations of the expert kernels on this GPU, and write them to a file.
SHAPE is E,K,H,I: experts, experts of a token, hidden size, intermediate size; several are allowed.
All candidates of all shapes are compiled first, on all cores. Each is measured briefly, the best
ones longer, then whole layers.
With --a2a: the number of programs of the all-to-all kernels; ranks share this GPU, or have one
each. I is ignored, and without SHAPE those of Qwen3-30B-A3B and DeepSeek-V3 are measured.
Known results are skipped, so a stopped run continues where it was.
The engine reads the files of the folder MOESAIC_TUNED, then those of the package."""
MAX_JOBS = 16
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
USAGE = """\
moesaic tune SHAPE [SHAPE …] [flags]
       moesaic tune [SHAPE …] --a2a [flags]"""
# Flags that apply only without --a2a, and only with it.
ONLY = {False: ("weights", "jobs", "share"), True: ("ranks", "payload")}
WHERE = "run it where there is an NVIDIA GPU, with torch built for CUDA"


@dataclass(frozen=True)
class TuneArgs:
    GROUP: ClassVar[str] = "Tuning"

    weights: str = flag("bf16", "Weight format of the experts: bf16, fp8_block, …")
    tokens: str = flag(
        ",".join(map(str, TOKENS)),
        "Token counts, comma-separated; each represents its power of two.",
    )
    out: str | None = flag(None, "Folder to write to; unset: the package's own.")
    jobs: int | None = flag(
        None,
        "Processes that compile all candidates before any is measured; unset: one for each "
        f"core, at most {MAX_JOBS}.",
        at_least=1,
    )
    again: bool = flag(False, "Measure known results again.")
    a2a: bool = flag(False, "Tune the all-to-all kernels instead of the expert kernels.")
    ranks: str = flag("2,4,8", "With --a2a: numbers of ranks, comma-separated.")
    payload: str = flag("bf16", "With --a2a: payload formats, comma-separated: bf16, fp8, nvfp4, …")
    share: str | None = flag(None, "I/N: only compile every N-th candidate from I on.")


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic tune", USAGE, DESCRIPTION)
    parser.add_argument("shapes", metavar="SHAPE", nargs="*", help="E,K,H,I")
    parser.add_flags(TuneArgs)
    given = parser.parse(argv)
    file = read_config(TuneArgs, given["config"])
    args = merge(TuneArgs, given, file)
    _refuse_unused_flags({**file, **given}, args.a2a)
    set_up_logging("warning")
    sizes = [_shape(text) for text in given["shapes"]]
    tokens = _numbers("--tokens", args.tokens)
    if not sizes and not args.a2a:
        raise ValueError("no SHAPE: give E,K,H,I, like 128,8,2048,768 (Qwen3-30B-A3B)")
    if args.a2a:
        return _tune_a2a(sizes, tokens, args)
    _require_gpu()
    cases = _cases(sizes, tokens, args)
    if args.share is not None:
        _compile(cases, args.share)
    elif cases:
        _require_writable(_folder(args))
        _compile_in_processes([*argv], args.jobs or min(MAX_JOBS, os.cpu_count() or 1))
        _measure(cases, args)
    else:
        print("everything that was asked for has been measured: --again repeats it")
    return 0


def _refuse_unused_flags(given: Mapping[str, Any], a2a: bool) -> None:
    for field in ONLY[not a2a]:
        if field in given:
            raise ValueError(f"--{field} counts only with{'out' * a2a} --a2a: leave it out")


def _tune_a2a(
    sizes: Sequence[tuple[int, int, int, int]], tokens: Sequence[int], args: TuneArgs
) -> int:
    """This process opens no CUDA: ranks may have to share the GPU by MPS, and it would not."""
    from moesaic.cli.tune_a2a import TuneJob, tune
    from moesaic.config.devices import cuda_missing

    job = TuneJob(
        tuple(dict.fromkeys((experts, top_k, hidden) for experts, top_k, hidden, _ in sizes)),
        tuple(_numbers("--ranks", args.ranks)),
        tuple(word.strip() for word in args.payload.split(",")),
        tuple(tokens),
        _folder(args),
        args.again,
    )
    if missing := cuda_missing():
        raise ValueError(f"moesaic tune --a2a measures on a CUDA device, and {missing}: {WHERE}")
    _require_writable(job.folder)
    tune(job)
    return 0


def _shape(text: str) -> tuple[int, int, int, int]:
    numbers = _numbers("SHAPE", text)
    if len(numbers) != 4 or numbers[1] > numbers[0]:
        raise ValueError(
            f"SHAPE {text!r}: give E,K,H,I with K at most E, like 128,8,2048,768 (Qwen3-30B-A3B)"
        )
    experts, top_k, hidden, inner = numbers
    return experts, top_k, hidden, inner


def _numbers(what: str, text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{what} {text!r}: give whole numbers above 0, separated by commas")
    return [int(word) for word in words]


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"moesaic tune measures on a CUDA device, and torch finds none: {WHERE}")


def _folder(args: TuneArgs) -> Path:
    if args.out is not None:
        return Path(args.out).expanduser()
    from moesaic.kernels import tuning

    return tuning.TUNED


def _require_writable(folder: Path) -> None:
    """Fail before minutes are spent on compiling and measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder} ({error.strerror}): give another folder with --out, and "
            "name it in MOESAIC_TUNED where the engine runs"
        ) from error


def _cases(
    sizes: Sequence[tuple[int, int, int, int]], tokens: Sequence[int], args: TuneArgs
) -> "list[TuneCase]":
    """The cases without a known result."""
    import torch

    from moesaic.kernels import tuning
    from moesaic.kernels.tune import FORMATS, TuneCase

    if args.weights not in FORMATS:
        raise ValueError(
            f"--weights {args.weights}: only {', '.join(FORMATS)} have configurations to choose"
        )
    device = tuning.device_facts(torch.device("cuda", torch.cuda.current_device()))
    folder = _folder(args)
    tuning.read(folder / tuning.file_name(device.name, args.weights))  # fails early
    known = {} if args.again else tuning.load(device.name, args.weights, folder)
    cases: dict[tuple[str, int], TuneCase] = {}
    for (experts, top_k, hidden, inner), count in product(sizes, tokens):
        case = TuneCase(tuning.ExpertsShape(args.weights, experts, hidden, inner), top_k, count)
        key = str(case.shape), tuning.bucket(case.pairs)
        if key not in known:
            cases.setdefault(key, case)
    return list(cases.values())


def _compile(cases: "Sequence[TuneCase]", share: str) -> None:
    import torch

    from moesaic.kernels.tune import compile_all

    words = share.split("/")
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        raise ValueError(f"--share {share!r}: give I/N, like 0/8")
    part = int(words[0]), int(words[1])
    if part[0] >= part[1]:
        raise ValueError(f"--share {share!r}: I must be less than N")
    compile_all(cases, torch.device("cuda", torch.cuda.current_device()), part)


def _compile_in_processes(argv: list[str], jobs: int) -> None:
    """In child processes: Triton compiles on one core."""
    print(f"compiling candidates in {jobs} processes …", file=sys.stderr)
    command = [sys.executable, "-m", "moesaic.cli.main", "tune", *argv]
    children = [
        subprocess.Popen([*command, f"--share={number}/{jobs}"], env=child_environment())
        for number in range(jobs)
    ]
    try:
        failed = [child.args for child in children if child.wait() != 0]
    finally:
        for child in children:
            child.kill()
    if failed:
        raise RuntimeError(f"{len(failed)} of {jobs} processes failed; their messages are above")


def _measure(cases: "Sequence[TuneCase]", args: TuneArgs) -> None:
    import torch
    from tqdm import tqdm

    from moesaic.kernels import tuning
    from moesaic.kernels.tune import candidates, search

    device = torch.device("cuda", torch.cuda.current_device())
    facts = tuning.device_facts(device)
    folder = _folder(args)
    total = sum(len(list(candidates(case, facts))) for case in cases)
    with tqdm(total=total, desc="configurations", disable=None) as bar, torch.inference_mode():
        for case in cases:
            plan, us = search(case, device, bar.update)
            tuning.save(facts.name, case.shape, case.pairs, plan, us, folder)
            how = "fused" if plan.fused else plan.implementation
            bar.write(f"{case.shape} {case.tokens} tokens: {us:.1f} us, {how}, block {plan.block}")
    print(f"wrote {folder / tuning.file_name(facts.name, args.weights)}")
