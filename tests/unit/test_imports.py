"""Imports go one way: a package knows those below it and never those above it."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PACKAGE = Path(__file__).parents[2] / "moesaic"
LEVELS = (
    ("core",),
    ("config", "observe"),
    ("comm", "kernels"),
    ("moe", "layers", "balance", "overlap", "disagg"),
    ("models",),
    ("engine",),
    ("server", "loadgen", "evals", "router", "cli"),
)
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
# Modules of the package's root that belong to a command, and so have its level.
ROOT_MODULES = {"__main__": "cli", "launch_server": "cli", "launch_router": "cli"}
ENGINE_MAY_IMPORT = {
    "nixl",  # where it is installed
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "msgspec",
    "zmq",
    "yaml",
    "tqdm",
    "cryptography",  # only inside of functions, for several nodes: test_node_secret.py
    "llguidance",  # only inside of functions: test_grammar.py
}


def imports_of(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names of all imports in a module of `package`, wherever they stand in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violation(importer: str, imported: str) -> str:
    """Why one subpackage may not import another; empty if it may."""
    if importer == imported:
        return ""
    if imported not in LEVEL:
        return f"{imported} has no level: add it to LEVELS"
    if LEVEL[imported] > LEVEL[importer]:
        return f"{importer} imports {imported}, which stands above it"
    if importer == "config" and imported != "core":
        return "config imports nothing but core"
    return ""


@cache
def modules() -> list[tuple[str, Path, set[str]]]:
    """(subpackage, file, imported names) of every module except the package's own __init__."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            home = ROOT_MODULES.get(parts[0], parts[0])
            names = imports_of(path.read_text(encoding="utf-8"), ("moesaic", *parts[:-1]))
            found.append((home, path.relative_to(PACKAGE.parent), set(names)))
    return found


def subpackage(name: str) -> str:
    """The subpackage of a dotted name below moesaic, or nothing for other names."""
    parts = name.split(".")
    known = len(parts) > 1 and parts[0] == "moesaic" and parts[1] != "__version__"
    return ROOT_MODULES.get(parts[1], parts[1]) if known else ""


def test_imports_go_one_way():
    problems = [
        f"{path}: {why}"
        for home, path, names in modules()
        for imported in sorted({subpackage(name) for name in names} - {""})
        if (why := violation(home, imported))
    ]
    assert problems == []


def test_neighbours_do_not_import_each_other():
    edges = {
        (home, imported)
        for home, _, names in modules()
        for imported in {subpackage(name) for name in names} - {"", home}
    }
    assert sorted(edge for edge in edges if edge[::-1] in edges) == []


def test_engine_needs_no_more_than_its_dependencies():
    foreign = {
        f"{path}: {top}"
        for home, path, names in modules()
        if LEVEL[home] <= LEVEL["engine"]
        for top in {name.split(".")[0] for name in names} - {"moesaic"}
        if top not in sys.stdlib_module_names and top not in ENGINE_MAY_IMPORT
    }
    assert sorted(foreign) == []


@pytest.mark.parametrize(
    ("importer", "imported", "message"),
    [
        ("engine", "models", ""),
        ("models", "moe", ""),
        ("moe", "kernels", ""),
        ("moe", "balance", ""),
        ("kernels", "observe", ""),
        ("engine", "config", ""),
        ("models", "engine", "models imports engine, which stands above it"),
        ("core", "moe", "core imports moe, which stands above it"),
        ("core", "config", "core imports config, which stands above it"),
        ("config", "comm", "config imports comm, which stands above it"),
        ("config", "observe", "config imports nothing but core"),
        ("engine", "cli", "engine imports cli, which stands above it"),
        ("engine", "extras", "extras has no level: add it to LEVELS"),
    ],
)
def test_rule(importer: str, imported: str, message: str):
    assert violation(importer, imported) == message


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import moesaic.core.request as r", ["moesaic.core.request"]),
        ("def f():\n    from moesaic.engine import engine", ["moesaic.engine.engine"]),
        ("from . import topk", ["moesaic.moe.topk"]),
        ("from ..core.request import Request", ["moesaic.core.request.Request"]),
    ],
)
def test_imports_are_found(source: str, names: list[str]):
    assert list(imports_of(source, ("moesaic", "moe"))) == names


def test_every_dependency_has_a_lower_bound() -> None:
    """The bound is a tested version: with older ones tests fail or security holes are open."""
    with (PACKAGE.parent / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    needed = [Requirement(text) for group in groups for text in group]
    assert len(needed) > 30
    for one in needed:
        assert {part.operator for part in one.specifier} & {">=", "==", "~="}, str(one)
    bounds = {one.name: one.specifier for one in needed}
    assert "3.1.5" not in bounds["jinja2"] and "3.1.6" in bounds["jinja2"]
    installed = metadata.version("uvicorn")
    assert installed in bounds["uvicorn"] and "99" not in bounds["uvicorn"]
