"""The doctor's report as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from moesaic.config.gpus import describe_shares

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
RANK_HEAD = (
    *("rank", "node", "stage", "dp", "tp", "ep", "layers", "experts", "heads q/kv"),
    *("dense weights", "expert weights", "KV cache", "a2a buffers", "collectives", "total"),
)


def render(report: dict[str, Any]) -> str:
    lines = [*_machine(report["machine"]), "", *_backends(report["backends"])]
    if report["flags"]:
        rows = [(c["flag"], str(c["value"]), c["reason"]) for c in report["flags"]]
        lines += ["", "Flags that were left open", *table((), rows)]
    if report["layout"] is not None:
        lines += ["", *_layout(report["model"], report["layout"], report["machine"])]
    if report["notes"]:
        lines += ["", "Worth knowing", *(f"  - {note}" for note in report["notes"])]
    lines += ["", *_verdict(report)]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Aligned columns: right-aligned under a head, left-aligned without one."""
    lines = [*([tuple(head)] if head else []), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    align = str.rjust if head else str.ljust
    for line in lines:
        cells = (align(cell, width) for cell, width in zip(line, widths, strict=True))
        yield ("  " + "  ".join(cells)).rstrip()


def size(nbytes: float) -> str:
    """1536 is `1.5 KiB`."""
    unit = 0
    while nbytes >= 1024 and unit < len(UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.0f} {UNITS[unit]}" if unit == 0 else f"{nbytes:.1f} {UNITS[unit]}"


def spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 is `0-2,5`; order is kept."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        runs.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    return ",".join(runs) or "-"


def _machine(machine: dict[str, Any]) -> Iterator[str]:
    cpu, memory, shared = machine["cpu"], machine["memory"], machine["shared_memory"]
    compiler = machine["compiler"]
    gpus = [f"{gpu['name']} ({size(gpu['memory_bytes'])})" for gpu in machine["gpus"]]
    versions = [f"{name} {number or 'missing'}" for name, number in machine["versions"].items()]
    rows = [
        ("cpu", f"{cpu['model']}, {cpu['cores']} cores"),
        ("instructions", " ".join(cpu["instructions"]) or "none that the kernels use"),
        ("memory", f"{size(memory['total_bytes'])}, {size(memory['free_bytes'])} free"),
        ("/dev/shm", "none" if shared is None else f"{size(shared['total_bytes'])}"),
        ("gpus", ", ".join(gpus) or f"none ({machine['cuda_missing']})"),
        ("mps daemon", machine["mps"]),
        ("c compiler", compiler["path"] or f"{compiler['command']} is missing: torch is slower"),
        ("versions", ", ".join(versions[:6])),
        ("", ", ".join(versions[6:])),
    ]
    yield "Machine"
    yield from table((), rows)


def _backends(backends: dict[str, Any]) -> Iterator[str]:
    title = f"{backends['weights']} weights, {backends['dtype']} activations, {backends['device']}"
    for kind, name in (("a2a", "All-to-all backends"), ("runners", "Runner backends")):
        yield f"{name} ({title})"
        yield from table((), (_backend(row, backends["device"]) for row in backends[kind]))
        yield ""
    installed = [row["module"] for row in backends["libraries"] if row["installed"]]
    missing = [row["module"] for row in backends["libraries"] if not row["installed"]]
    yield "Vendors' libraries (this version uses its own providers whether they are there or not)"
    yield from table(
        (),
        [("installed", ", ".join(installed) or "none"), ("missing", ", ".join(missing) or "none")],
    )


def _backend(row: dict[str, Any], device: str) -> tuple[str, str, str]:
    provider = row["providers"].get(device, "no provider")
    return row["name"], provider, "runs" if row["runs"] else f"does not: {row['reason']}"


def _layout(model: str, layout: dict[str, Any], machine: dict[str, Any]) -> Iterator[str]:
    mesh, moe = layout["mesh"], layout["moe"]
    sizes = ", ".join(f"{name} {mesh[name]}" for name in mesh if name != "world")
    yield f"Layout of {model}: {mesh['world']} rank{'s' * (mesh['world'] > 1)}"
    yield f"  {sizes}"
    yield (
        f"  {layout['num_layers']} layers in {layout['dtype']}, experts in {moe['weights']}, "
        f"context of {layout['context_length']} tokens"
    )
    yield (f"  a2a {moe['a2a']} ({moe['mode']}), runner {moe['runner']}, {moe['payload']} sent")
    yield from (f"    {reason}" for reason in moe["reasons"])
    if moe["deterministic"] and mesh["tp"] > 1:
        yield "    deterministic: every rank holds whole the weights whose products would be summed"
    if moe["copies"] > 1:
        yield f"    deterministic: {moe['copies']} ranks hold each expert whole instead of a part"
    yield ""
    yield from table(RANK_HEAD, map(_rank, layout["ranks"]))
    yield ""
    yield from _totals(layout, machine)


def _rank(rank: dict[str, Any]) -> Sequence[str]:
    places = ("rank", "node", "stage", "dp_rank", "tp_rank", "ep_rank")
    sizes = ("dense", "expert", "cache", "a2a", "collective", "total")
    return (
        *(str(rank[name]) for name in places),
        spans(rank["layers"]),
        spans(rank["experts"]),
        f"{rank['query_heads']}/{rank['kv_heads']}",
        *(size(rank[f"{name}_bytes"]) for name in sizes),
    )


def _totals(layout: dict[str, Any], machine: dict[str, Any]) -> Iterator[str]:
    ranks, tokens = layout["ranks"], layout["cache_tokens"]
    each = max(rank["cache_bytes_per_token"] for rank in ranks)
    held = "no KV cache fits" if tokens is None else f"KV cache of {tokens} tokens on every rank"
    yield f"  {held}, at most {size(each)} a token and rank"
    if layout["gpus"]:
        yield f"  {describe_shares([rank['gpu'] for rank in ranks])}"
        fullest = max(layout["gpus"], key=lambda gpu: gpu["total_bytes"])
        yield (
            f"  the fullest GPU takes {size(fullest['total_bytes'])}, about "
            f"{size(fullest['step_bytes'])} in the largest step, and its graphs"
        )
        return
    most, memory = max(layout["node_bytes"]), machine["memory"]
    yield (
        f"  a node takes {size(most)}, buffers counted as if filled; this machine has "
        f"{size(memory['total_bytes'])}, {size(memory['free_bytes'])} free"
    )
    if layout["lasting_weights"]:
        kept = sum(rank["dense_bytes"] + rank["expert_bytes"] for rank in ranks)
        yield f"  {size(kept)} of weights are in memory that outlives ranks, and nowhere else"
    on_node = layout["mesh"]["world"] // layout["mesh"]["nnodes"]
    if on_node > machine["cpu"]["cores"]:
        yield f"  {on_node} ranks of a node share {machine['cpu']['cores']} cores: they take turns"


def _verdict(report: dict[str, Any]) -> Iterator[str]:
    if report["problems"]:
        yield "This cannot work:"
        yield from (f"  - {problem}" for problem in report["problems"])
    elif report["model"] is None:
        yield "No problem found. Name a model to see how it would be laid out."
    else:
        yield "No problem found."
