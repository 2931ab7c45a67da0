"""The syntax trees show that nothing runs code from data or opens a shell."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("moesaic", "bench", "examples")
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "dill", "shelve", "cloudpickle", "joblib"}
MODULES |= {"multiprocessing.managers", "multiprocessing.shared_memory"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "multiprocessing.Queue",
    "multiprocessing.JoinableQueue",
    "multiprocessing.SimpleQueue",
    "multiprocessing.Pool",
    "multiprocessing.Manager",
}
# Methods and functions with these names, of any object.
NAMES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "send_pyobj",
    "recv_pyobj",
}
# Keyword arguments that must not have this value.
KEYWORDS = {("shell", True), ("allow_pickle", True), ("trust_remote_code", True)}
KEYWORDS |= {("weights_only", False)}
ALLOWED = {
    (
        "moesaic/comm/launch/local_ranks.py",
        "pickle",
    ): "functions of the caller's own program, over pipes to its own children",
    (
        "moesaic/balance/files.py",
        "torch.load",
    ): "recorded experts, which the user of moesaic balance or the operator of a server (with "
    "--init-expert-location, in every rank) names; weights_only, as the test below says",
    ("moesaic/balance/files.py", "torch.save"): "recorded experts, as SGLang's tools read them",
}


def names_of(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """The full names of what a module imports."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return "?"


def banned_imports(node: ast.AST) -> Iterator[str]:
    found: list[str] = []
    if isinstance(node, ast.Import):
        found = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    for name in found:
        if name in MODULES or name.split(".")[0] in MODULES or name in CALLS:
            yield name


def banned_calls(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute | ast.Name):
        name = dotted(node, names)
        if name in CALLS or name.rpartition(".")[2] in NAMES:
            yield name
    if not isinstance(node, ast.Call):
        return
    name = dotted(node.func, names)
    if name.removeprefix("builtins.") in BUILTINS:
        yield name
    for keyword in node.keywords:
        if isinstance(keyword.value, ast.Constant):
            pair = (keyword.arg, keyword.value.value)
            if pair in KEYWORDS:
                yield f"{keyword.arg}={keyword.value.value}"


def banned(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = names_of(nodes)
    return {word for node in nodes for word in (*banned_imports(node), *banned_calls(node, names))}


def test_nothing_banned_is_used() -> None:
    problems, used = [], set()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        home = str(path.relative_to(ROOT))
        for word in banned(path.read_text("utf-8")):
            if (home, word) in ALLOWED:
                used.add((home, word))
            else:
                problems.append(f"{home}: {word}")
    assert problems == []
    assert used == ALLOWED.keys(), "an exception that nothing needs"


def test_the_one_reader_of_pickles_makes_nothing_but_tensors_of_them() -> None:
    tree = ast.parse((ROOT / "moesaic/balance/files.py").read_text("utf-8"))
    named = [node for node in ast.walk(tree) if ast.unparse(node) == "torch.load"]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func in named]
    assert len(named) == len(calls) == 1
    given = {word.arg: ast.unparse(word.value) for word in calls[0].keywords}
    assert given["weights_only"] == "True" and given["mmap"] == "False"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p", "pickle"),
        ("def f():\n    from pickle import loads", "pickle"),
        ("import marshal", "marshal"),
        ("import dill", "dill"),
        ("import shelve", "shelve"),
        ("import cloudpickle", "cloudpickle"),
        ("from multiprocessing import managers", "multiprocessing.managers"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ("import torch as t\nload = t.load", "torch.load"),
        ("from torch import load", "torch.load"),
        ("import yaml\nyaml.load(x, Loader=yaml.Loader)", "yaml.load"),
        ("import yaml\nyaml.unsafe_load(x)", "yaml.unsafe_load"),
        ("eval('1')", "eval"),
        ("exec('1')", "exec"),
        ("compile('1', '', 'exec')", "compile"),
        ("import builtins\nbuiltins.eval('1')", "builtins.eval"),
        ("import os\nos.system('ls')", "os.system"),
        ("import os\nos.popen('ls')", "os.popen"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell=True"),
        ("import numpy as np\nnp.load('x', allow_pickle=True)", "allow_pickle=True"),
        ("f(trust_remote_code=True)", "trust_remote_code=True"),
        ("import multiprocessing as mp\nmp.Queue()", "multiprocessing.Queue"),
        ("from multiprocessing import Pool", "multiprocessing.Pool"),
        ("import multiprocessing as mp\nmp.Manager()", "multiprocessing.Manager"),
        ("import torch.distributed as dist\ndist.all_gather_object(a, b)", "all_gather_object"),
        ("dist.broadcast_object_list(a)", "broadcast_object_list"),
        ("socket.send_pyobj(x)", "send_pyobj"),
        ("socket.recv_pyobj()", "recv_pyobj"),
    ],
)
def test_each_ban_catches_its_example(source: str, word: str) -> None:
    assert any(found.endswith(word) for found in banned(source))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "model.eval()",
        "import yaml\nyaml.safe_load(x)",
        "import numpy as np\nnp.load('x')",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import queue\nqueue.SimpleQueue()",
        "def f(trust_remote_code: bool = False): ...",
    ],
)
def test_what_is_no_danger_is_let_through(source: str) -> None:
    assert banned(source) == set()
