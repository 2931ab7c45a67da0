"""Whether two nodes were started alike: the same version, the same flags, the same mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from moesaic import __version__
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.flags import specs

# Nodes may differ in these: where they meet, they have met, and the HTTP server is node 0's alone.
OWN_FLAGS: Final = frozenset(
    {
        *(field.name for field in fields(ServeArgs)),
        "node_rank",
        "dist_init_addr",
        "log_level",
        "model_path",
        "tokenizer_path",
        "num_threads",
    }
)
MISSING: Final = "unknown"


def facts_of(spec: ServiceSpec) -> dict[str, Any]:
    """What nodes must have in common; nothing secret."""
    secret = {flag.field for flag in specs(ServerArgs).values() if flag.flag.secret}
    flags = {name: value for name, value in spec.config.items() if name not in OWN_FLAGS | secret}
    return {"version": __version__, "flags": flags, "mesh": asdict(spec.mesh)}


def differences(first: Mapping[str, Any], other: Mapping[str, Any], node: int) -> str:
    """What is not the same on node 0 and on another; empty if all is."""
    shown = {name: flag.name for name, flag in specs(ServerArgs).items()}
    # The mesh follows from the flags, and those from the version: the cause is enough.
    for mine, its in (
        ({"moesaic": first.get("version")}, {"moesaic": other.get("version")}),
        (first.get("flags", {}), other.get("flags", {})),
        (first.get("mesh", {}), other.get("mesh", {})),
    ):
        told = [
            f"{shown.get(name, name)} is {here} on node 0 and {there} on node {node}"
            for name, here, there in _unlike(mine, its)
        ]
        if told:
            return "; ".join(told)
    return ""


def _unlike(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    names = dict.fromkeys([*first, *other])
    pairs = [(name, first.get(name, MISSING), other.get(name, MISSING)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]
