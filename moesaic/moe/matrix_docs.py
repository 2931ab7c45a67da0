"""docs/backends.md from the declarations: `python -m moesaic.moe.matrix_docs docs/backends.md`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moesaic.moe.backends import load_builtin
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import (
    A2A_REGISTRY,
    RUNNER_REGISTRY,
    UNQUANTIZED,
    A2aBackend,
    MoeProblem,
    RunnerBackend,
    provider_name,
    resolve,
    supports,
)

HEAD = """\
# Backends

Written by `make docs` from what the backends declare; a test compares the two.

A MoE layer is put together from an a2a backend, which carries tokens to their experts and results
back (`--moe-a2a-backend`, `--deepep-mode`), a runner backend, which computes the experts
(`--moe-runner-backend`), a payload, in which rows travel (`--deepep-dispatch-output-dtype`), and
the format of the weights, which the checkpoint decides. This page shows what goes with what.
"""

AUTO = """\

## How `auto` is resolved

Once, at start, and every choice is logged with its reason. The runner is the first that works and
prefers the weights, else the first that works. The payload is what the weights are multiplied with,
if both backends take it and the hidden size fits; else activations travel in the type of the model.
The mode of a backend that has one is that one; `deepep` with both uses normal in steps in which any
rank prefills and low_latency in the others.

"""

REFUSAL = """\

## What refusal looks like

A combination that cannot work is refused at start, with the reason and the fewest flags that must
change. Each of these suggestions is itself accepted.

"""

RUNNER_LAYOUTS = """\
Layouts are those on CPU. On CUDA there is one for all formats: pairs of row and expert are sorted
by expert on the device and stay where they are, and the rows of a block are used as they lie.

"""

WEIGHTS_APPLIED_BY = {
    "standard": "the runner",
    "deepep_normal": "post-permute",
    "deepep_ll": "combine, at the token's rank",
    "fused": "the fused function",
}
RESOLVED = (
    MoeProblem(a2a="deepep", weights=WEIGHT_FORMATS["fp8_block"], ep=4, tp=4),
    MoeProblem(a2a="mori", weights=WEIGHT_FORMATS["nvfp4"], ep=2, tp=4),
    MoeProblem(a2a="mooncake", weights=WEIGHT_FORMATS["int8_w8a8"], ep=4, tp=4, hidden_size=2048),
)
REFUSED = (
    MoeProblem(a2a="mooncake", mode="normal", ep=4, tp=4),
    MoeProblem(runner="flashinfer_mxfp4"),
    MoeProblem(runner="triton", payload="fp8", weights=WEIGHT_FORMATS["int8_w8a8"]),
    MoeProblem(a2a="deepep", ep=3, tp=4),
)


def markdown() -> str:
    """The whole page."""
    load_builtin()
    parts = [HEAD, AUTO, *_code(_resolved()), REFUSAL, *_code(_refused())]
    parts += ["\n## A2a backends\n\n", *_a2a_table()]
    parts += ["\n## Runner backends\n\n", RUNNER_LAYOUTS, *_runner_table()]
    parts += ["\n## Runners and weights\n\n", *_runners_and_weights()]
    parts += ["\n## A2a backends and payloads\n\n", *_a2a_and_payloads()]
    parts += [
        "\n## Weights and payloads\n\n",
        "With weights that are multiplied with activations of a format of their own, another\n",
        "quantised payload would round twice and is refused. Unquantised payloads go with all.\n\n",
        *_weights_and_payloads(),
    ]
    return "".join(parts)


def _code(lines: Iterator[str]) -> Iterator[str]:
    yield "```text\n"
    for line in lines:
        yield f"{line}\n"
    yield "```\n"


def flags(problem: MoeProblem) -> str:
    """A problem as it is asked for on the command line; weights in front."""
    default = MoeProblem()
    asked = [
        ("--device", problem.device, default.device),
        ("--tp", problem.tp, default.tp),
        ("--ep", problem.ep, default.ep),
        ("--moe-a2a-backend", problem.a2a, default.a2a),
        ("--deepep-mode", problem.mode, default.mode),
        ("--moe-runner-backend", problem.runner, default.runner),
        ("--deepep-dispatch-output-dtype", problem.payload, default.payload),
    ]
    chosen = [f"{flag} {value}" for flag, value, usual in asked if value != usual]
    return f"[{problem.weights.name} weights] {' '.join(chosen)}"


def _resolved() -> Iterator[str]:
    for problem in RESOLVED:
        yield flags(problem)
        for reason in resolve(problem).reasons:
            yield f"    {reason}"


def _refused() -> Iterator[str]:
    for problem in REFUSED:
        yield flags(problem)
        try:
            resolve(problem)
        except ValueError as error:
            yield f"    {error}"


def _table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _devices(backend: A2aBackend | RunnerBackend) -> str:
    """Where it runs, and by whose provider if not by ours."""
    found = []
    for device, make in backend.providers.items():
        name = provider_name(make)
        found.append(device if name == "native" else f"{device} ({name})")
    return ", ".join(found)


def _format_of(backend: A2aBackend, mode: str) -> str:
    """And what it is on devices that differ."""
    format = backend.formats[mode]
    others = (
        f"{device}: `{backend.formats_for(device)[mode]}`"
        for device in backend.providers
        if backend.formats_for(device)[mode] != format
    )
    return "; ".join((f"`{format}`", *others))


def _a2a_table() -> Iterator[str]:
    applied = "top-k weights applied by"
    head = ("backend", "mode", "format", "payloads", "steps", applied, "devices", "how")

    def rows(backend: A2aBackend) -> Iterator[Sequence[str]]:
        for mode, format in backend.formats.items():
            yield (
                f"`{backend.name}`",
                mode,
                _format_of(backend, mode),
                _names(backend.payloads),
                ", ".join(backend.phases),
                WEIGHTS_APPLIED_BY[format],
                _devices(backend),
                backend.summary,
            )

    yield from _table(head, (row for backend in A2A_REGISTRY.values() for row in rows(backend)))


def _runner_table() -> Iterator[str]:
    formats = list(WEIGHTS_APPLIED_BY)
    of_formats = (f"layout of `{format}`" for format in formats)
    head = ("runner", *of_formats, "payloads", "devices", "auto for")

    def row(backend: RunnerBackend) -> Sequence[str]:
        layouts = [backend.layouts.get(format, "") for format in formats]
        payloads, devices = _names(backend.payloads), _devices(backend)
        return f"`{backend.name}`", *layouts, payloads, devices, _names(backend.preferred)

    yield from _table(head, map(row, RUNNER_REGISTRY.values()))


def _ticks(
    kind: str, rows: Sequence[str], columns: Sequence[str], works: Callable[[str, str], bool]
) -> Iterator[str]:
    head = (kind, *(f"`{column}`" for column in columns))
    yield from _table(
        head,
        ((f"`{row}`", *("✓" if works(row, column) else "" for column in columns)) for row in rows),
    )


def _decode_problem(weights: str, **choices: str) -> MoeProblem:
    """Steps of decode only, which all backends serve; activations that fit the weights."""
    dtype = weights if weights in UNQUANTIZED else "bf16"
    return MoeProblem(weights=WEIGHT_FORMATS[weights], dtype=dtype, phases=("decode",), **choices)  # type: ignore[arg-type]


def _runners_and_weights() -> Iterator[str]:
    def works(runner: str, weights: str) -> bool:
        return supports(_decode_problem(weights, runner=runner)).ok

    yield from _ticks("runner", [*RUNNER_REGISTRY], [*WEIGHT_FORMATS], works)


def _a2a_and_payloads() -> Iterator[str]:
    def works(a2a: str, payload: str) -> bool:
        return any(
            supports(_decode_problem(w, a2a=a2a, payload=payload)).ok for w in WEIGHT_FORMATS
        )

    yield from _ticks("a2a backend", [*A2A_REGISTRY], [*PAYLOAD_FORMATS], works)


def _weights_and_payloads() -> Iterator[str]:
    def works(weights: str, payload: str) -> bool:
        return supports(_decode_problem(weights, payload=payload)).ok

    yield from _ticks("weights", [*WEIGHT_FORMATS], [*PAYLOAD_FORMATS], works)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
