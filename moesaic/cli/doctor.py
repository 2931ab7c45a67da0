"""`moesaic doctor [MODEL] …`: describes this machine, its backends, and how a command line would
place a model on ranks. Loads and starts nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.common import add_model, read_args
from moesaic.config.args import ServerArgs
from moesaic.config.deepep import read_deepep_config
from moesaic.config.devices import gpus_of
from moesaic.config.flags import specs
from moesaic.config.gpus import crowding_warning, is_shared
from moesaic.config.parser import FlagParser
from moesaic.config.resolve import FlagChange, flag_changes, master_address, problems, resolve

if TYPE_CHECKING:
    from moesaic.engine.setup.memory_plan import MemoryPlan, RankShare
    from moesaic.moe.registry import A2aBackend, MoeProblem, RunnerBackend

DESCRIPTION = """\
Describe this machine, and which backends run here and why the others do not.
With MODEL: the layers, experts and heads of every rank, and the bytes of its weights, KV cache and
buffers. Accepts all flags of the server; loads and starts nothing.
With --cluster: whether the nodes of a service can work together.
The exit status is 1 if the command line cannot work."""
MESH = "world nnodes replicas pp tp dp attention_tp ep moe_tp dense_tp vocab_tp"
UNKNOWN_ADDRESS = "unknown:1"
RANKS = "replica stage tp_rank dp_rank attention_rank ep_rank moe_tp_rank"


def run(argv: Sequence[str]) -> int:
    parser = FlagParser("moesaic doctor", "moesaic doctor [MODEL] [flags]", DESCRIPTION)
    add_model(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="the same as JSON; flags that do not parse give an error and status 2",
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="run on all nodes at once: whether they meet, have the same versions, flags and "
        "model, and how fast each pair is connected",
    )
    parser.flags += ["--json", "--cluster"]
    parser.add_flags(ServerArgs)
    given = parser.parse(argv)
    args = read_args(given)
    if given["cluster"]:
        from moesaic.cli.doctor_cluster import run as check_nodes

        return check_nodes(args, given["json"])
    report = examine(args)
    if given["json"]:
        print(json.dumps(report, indent=2))
    else:
        from moesaic.cli.doctor_text import render

        print(render(report))
    return 0 if report["ok"] else 1


@dataclass(frozen=True)
class Findings:
    """What is known about a command line."""

    flags: list[FlagChange]
    problems: list[str]
    resolved: ServerArgs | None = None
    devices: tuple[int, ...] = ()  # the GPU of each rank, if any
    layout: MemoryPlan | None = None  # None if a problem rules it out
    cache_tokens: int | None = None


def examine(args: ServerArgs) -> dict[str, Any]:
    """The whole report as plain data; its keys are stable."""
    from moesaic.cli.machine import describe_libraries, describe_machine

    machine = describe_machine()
    found = _check(args)
    layout = None if found.layout is None else _describe_layout(found.layout, found)
    problem = None if found.layout is None else found.layout.model.moe.resolved
    return {
        "ok": not found.problems,
        "problems": found.problems,
        "notes": list(_notes(found, machine["gpus"])),
        "machine": machine,
        "backends": {**_describe_backends(problem), "libraries": describe_libraries()},
        "model": args.model_path or None,
        "flags": [_describe_flag(change) for change in found.flags],
        "layout": layout,
    }


def _check(args: ServerArgs) -> Findings:
    if args.nnodes > 1 and not (args.dist_init_addr or master_address()):
        args = replace(args, dist_init_addr=UNKNOWN_ADDRESS)  # a plan needs none
    named = args if args.model_path else replace(args, model_path="MODEL")
    if wrong := list(problems(named)):
        return Findings([], wrong)
    resolved = resolve(named)
    devices = gpus_of(resolved) if resolved.device == "cuda" else ()
    found = Findings([], list(_mps_missing(devices)), resolved, devices)
    return _check_model(args, resolved, found) if args.model_path else found


def _check_model(args: ServerArgs, resolved: ServerArgs, found: Findings) -> Findings:
    from moesaic.engine.setup.device_memory import compute_device
    from moesaic.engine.setup.memory_plan import free_room

    found = replace(found, flags=flag_changes(args))
    try:
        compute_device(resolved)  # selects the GPU whose free memory counts, as a server does
        layout = _lay_out(resolved)
    except ValueError as error:
        return replace(found, problems=[*found.problems, str(error)])
    found = replace(found, layout=layout)
    try:
        return replace(found, cache_tokens=layout.cache_tokens(free_room(resolved)))
    except ValueError as error:
        return replace(found, problems=[*found.problems, str(error)])


def _mps_missing(devices: Sequence[int]) -> Iterator[str]:
    from moesaic.comm.launch.mps import find_program

    try:
        if is_shared(devices):
            find_program()
    except RuntimeError as error:
        yield str(error)


def _notes(found: Findings, gpus: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What works, but may surprise."""
    if crowd := crowding_warning(found.devices):
        yield crowd
    if found.resolved is not None and found.resolved.dist_init_addr == UNKNOWN_ADDRESS:
        yield "a server of several nodes needs --dist-init-addr, unless a launcher tells it"
    if found.resolved is not None and found.resolved.deepep_config is not None:
        known = [gpus[device]["processors"] for device in found.devices if device < len(gpus)]
        yield from read_deepep_config(found.resolved.deepep_config).notes(min(known, default=0))


def _lay_out(args: ServerArgs) -> MemoryPlan:
    from moesaic.engine.setup.memory_plan import plan_memory
    from moesaic.models.locate import model_folder, with_local_folders

    folder = model_folder(args)
    _check_files(args, folder)
    return plan_memory(with_local_folders(args, folder))


def _check_files(args: ServerArgs, folder: str) -> None:
    """Raise ValueError for files that a server would refuse; tensors and tokenizer may still be
    missing."""
    from moesaic.engine.text.tokenizer import load_tokenizer
    from moesaic.models.checkpoint import check_folder

    has_tensors = any(Path(folder).glob("*.safetensors*"))
    check_folder(folder, has_tensors=has_tensors and args.load_format != "dummy")
    tokenizer = folder if args.tokenizer_path == args.model_path else args.tokenizer_path
    if tokenizer is not None and (Path(tokenizer) / "tokenizer.json").is_file():
        load_tokenizer(tokenizer, args.chat_template)


def _describe_flag(change: FlagChange) -> dict[str, Any]:
    name = specs(ServerArgs)[change.field].name
    return {"flag": name, "value": change.value, "reason": change.reason}


def _describe_backends(asked: MoeProblem | None) -> dict[str, Any]:
    """Each backend, with all other choices on auto."""
    from moesaic.moe.backends import load_backends
    from moesaic.moe.registry import (
        A2A_REGISTRY,
        RUNNER_REGISTRY,
        MoeProblem,
        provider_name,
        supports,
    )

    load_backends()
    base = asked or MoeProblem()
    base = replace(base, a2a="none", mode="auto", runner="auto", payload="auto")

    def row(backend: A2aBackend | RunnerBackend, **choice: str) -> dict[str, Any]:
        support = supports(replace(base, **choice))  # type: ignore[arg-type]
        return {
            "name": backend.name,
            "summary": backend.summary,
            "providers": {
                device: provider_name(make) for device, make in backend.providers.items()
            },
            "runs": support.ok,
            "reason": support.reason,
        }

    return {
        "device": base.device,
        "weights": base.weights.name,
        "dtype": base.dtype,
        "a2a": [row(backend, a2a=name) for name, backend in A2A_REGISTRY.items()],
        "runners": [row(backend, runner=name) for name, backend in RUNNER_REGISTRY.items()],
    }


def _describe_layout(layout: MemoryPlan, found: Findings) -> dict[str, Any]:
    mesh, model, tokens = layout.mesh, layout.model, found.cache_tokens
    choice = model.moe.resolved
    devices = found.devices or (None,) * mesh.world
    ranks = [
        {**_describe_rank(share, tokens or 0), "gpu": gpu}
        for share, gpu in zip(layout.ranks, devices, strict=True)
    ]
    return {
        "mesh": _attributes(mesh, MESH),
        "moe": {
            **_attributes(choice, "a2a mode runner payload"),
            "weights": choice.weights.name,
            "copies": model.moe.copies,
            "deterministic": model.moe.deterministic,
            "reasons": list(model.moe.reasons),
        },
        "device": choice.device,
        "dtype": str(model.moe.dtype).removeprefix("torch."),
        "num_layers": model.num_layers,
        "context_length": model.context_length,
        "cache_tokens": tokens,
        "ranks": ranks,
        "lasting_weights": layout.args.weight_cache_mode != "off",
        "node_bytes": [
            sum(rank["total_bytes"] for rank in ranks if rank["node"] == node)
            for node in range(mesh.nnodes)
        ],
        "gpus": [_describe_gpu(gpu, ranks) for gpu in sorted(set(found.devices))],
    }


def _attributes(source: object, names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names.split()}


def _describe_gpu(gpu: int, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    held = [rank for rank in ranks if rank["gpu"] == gpu]
    return {
        "gpu": gpu,
        "ranks": [rank["rank"] for rank in held],
        "total_bytes": sum(rank["total_bytes"] for rank in held),
        "step_bytes": sum(rank["step_bytes"] for rank in held),
    }


def _describe_rank(share: RankShare, tokens: int) -> dict[str, Any]:
    position = share.place
    cache_bytes = share.cache_bytes_per_token * tokens
    return {
        "rank": position.rank,
        "node": share.node,
        **_attributes(position, RANKS),
        "layers": list(share.layers),
        "moe_layers": list(share.moe_layers),
        "first_slot": share.first_slot,
        "experts": list(share.experts),
        **_attributes(share, "query_heads kv_heads dense_bytes expert_bytes cache_bytes_per_token"),
        "cache_bytes": cache_bytes,
        **_attributes(share, "a2a_bytes collective_bytes moving_bytes table_bytes outlet_bytes"),
        "total_bytes": share.fixed_bytes + cache_bytes,
        "step_bytes": share.step.total,
    }
