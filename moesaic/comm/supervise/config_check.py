"""Checks that two nodes have the same version, flags, mesh and model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from moesaic import __version__
from moesaic.comm.supervise.service_spec import ServiceSpec
from moesaic.config.args import ServerArgs
from moesaic.config.args_engine import ServeArgs
from moesaic.config.flags import specs

# Nodes may differ in these; the HTTP server runs on node 0 only.
OWN_FLAGS: Final = frozenset(
    {
        *(field.name for field in fields(ServeArgs)),
        "node_rank",
        "dist_init_addr",
        "node_secret_file",
        "log_level",
        "model_path",
        "tokenizer_path",
        "download_dir",
        "crash_dump_folder",
        "num_threads",
    }
)
MISSING: Final = "unknown"
# What tools write into a config.json that says nothing of the model.
OF_TOOLS: Final = frozenset({"_name_or_path", "transformers_version"})


def shared_flags(config: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that all nodes must have in common, without secrets."""
    secret = {flag.field for flag in specs(ServerArgs).values() if flag.flag.secret}
    return {name: value for name, value in config.items() if name not in OWN_FLAGS | secret}


def facts_of(spec: ServiceSpec) -> dict[str, Any]:
    """What all nodes must have in common, without secrets."""
    flags, path = shared_flags(spec.config), spec.config.get("model_path") or ""
    mesh = asdict(spec.mesh)
    return {"version": __version__, "flags": flags, "mesh": mesh, "model": _model(Path(path))}


def _model(folder: Path) -> str:
    """Its family and a digest of its config.json: paths may differ, so they tell nothing."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        told = {name: value for name, value in config.items() if name not in OF_TOOLS}
    except (OSError, ValueError, AttributeError):
        return MISSING  # what is wrong with it the ranks of that node say
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return f"{told.get('model_type', MISSING)} {digest[:8]}"


def differences(first: Mapping[str, Any], other: Mapping[str, Any], node: int) -> str:
    """The differences between node 0 and another; empty if there are none."""
    shown = {name: flag.name for name, flag in specs(ServerArgs).items()}
    # Flags depend on the version and the mesh on the flags, so only the first difference is shown.
    for mine, its in (
        ({"moesaic": first.get("version")}, {"moesaic": other.get("version")}),
        (first.get("flags", {}), other.get("flags", {})),
        (first.get("mesh", {}), other.get("mesh", {})),
        (
            {"the model's config.json": first.get("model")},
            {"the model's config.json": other.get("model")},
        ),
    ):
        names = dict.fromkeys([*mine, *its])
        pairs = [(name, mine.get(name, MISSING), its.get(name, MISSING)) for name in names]
        found = [
            f"{shown.get(name, name)} is {here} on node 0 and {there} on node {node}"
            for name, here, there in pairs
            if here != there
        ]
        if found:
            return "; ".join(found)
    return ""
