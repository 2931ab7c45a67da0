"""Backends from outside the package: examples/backends against the oracle, the matrix, the engine.

The conformance part takes any module that registers backends:

    export MOESAIC_BACKEND_MODULE=my.module
    pytest tests/distributed/test_external_backend.py -k conformance

Registrations belong to a process, so modules are imported in child processes only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic import Engine
from moesaic.comm.collectives.group import RankGroup
from moesaic.comm.errors import RankFailed
from moesaic.comm.launch.local_ranks import LocalRanks
from moesaic.core.step import Step
from moesaic.moe.backends import load_backends
from moesaic.moe.dispatch.base import BaseDispatcher
from moesaic.moe.formats import NormalDispatchOutput, TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.permute import POOL
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import (
    A2A_REGISTRY,
    RUNNER_REGISTRY,
    MoeProblem,
    combinations_of,
    resolve,
    supports,
)
from tests.distributed.conformance import Verdict, allowed, check_all, covering
from tests.distributed.moe_ranks import HIDDEN, TOP_K, Combination, Pools, rank_pools
from tests.moe_oracle import random_topk

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples.backends.my_backends"
MODULE = os.environ.get("MOESAIC_BACKEND_MODULE", EXAMPLE)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    """Ranks of our own: those of other tests must not know these backends."""
    yield from rank_pools()


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    before = set(A2A_REGISTRY) | set(RUNNER_REGISTRY)
    yield
    assert not {"ring", "gloo", "loop"} & (set(A2A_REGISTRY) | set(RUNNER_REGISTRY)) - before


def brought(group: RankGroup, module: str) -> list[Combination]:
    """What covers every pair of a backend of the module with anything that it works with."""
    load_backends()
    known = {*A2A_REGISTRY, *RUNNER_REGISTRY}
    load_backends([module])
    new = {*A2A_REGISTRY, *RUNNER_REGISTRY} - known
    return [c for c in covering() if {c.a2a, c.runner} & new and allowed(c)]


def check_brought(group: RankGroup, module: str, chosen: list[Combination]) -> list[Verdict]:
    load_backends([module])
    return check_all(group, chosen)


def complaints(pool: LocalRanks, module: str, chosen: list[Combination]) -> list[str]:
    by_rank = pool.run(check_brought, module, chosen)
    return [
        f"{combination}, rank {rank}: {text}"
        for rank, verdicts in enumerate(by_rank)
        for combination, verdict in zip(chosen, verdicts, strict=True)
        for text in verdict.complaints
    ]


@pytest.fixture(scope="module")
def covered() -> list[Combination]:
    with LocalRanks(1) as one:
        (chosen,) = one.run(brought, MODULE)
        return chosen


@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.slow) for tp in (1, 3, 4))])
def test_conformance(tp: int, covered: list[Combination], pools: Pools):
    assert covered, f"{MODULE} registers no backend that works with anything"
    told = complaints(pools(tp), MODULE, [c for c in covered if c.tp == tp])
    assert not told, "\n".join(told)


PAIRS = (
    ("ring", "loop"),
    ("gloo", "loop"),
    ("ring", "triton"),
    ("ring", "deep_gemm"),
    ("gloo", "cutlass"),
    ("deepep", "loop"),
    ("mori", "loop"),
    ("none", "loop"),
    ("flashinfer", "loop"),
)
SPLITS = {1: (1,), 3: (3, 1), 4: (4, 2, 1)}


@pytest.mark.parametrize("tp", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_alone_and_with_built_in_ones(tp: int, pools: Pools):
    """Deterministic or not in turn, and on four ranks both."""
    chosen = [
        Combination(a2a, "normal", runner, "fp32", "fp32", "fp32", tp, ep, deterministic)
        for number, (a2a, runner) in enumerate(PAIRS)
        for ep in SPLITS[tp]
        for deterministic in ((False, True) if tp == 4 else ((number + ep) % 4 < 2,))
    ]
    told = complaints(pools(tp), EXAMPLE, chosen)
    assert not told, "\n".join(told)


def share(group: RankGroup, tokens: int, dtype: torch.dtype) -> tuple[Tensor, TopKOutput]:
    """This rank's part of one batch that is the same for every number of ranks."""
    x_TH = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    topk = random_topk(tokens, 12, TOP_K, seed=8)
    topk.ids_TK[3, 1] = -1
    part = slice(group.rank * tokens // group.size, (group.rank + 1) * tokens // group.size)
    return x_TH[part], TopKOutput(topk.ids_TK[part], topk.weights_TK[part])


def results(group: RankGroup, pairs: list[tuple[str, str]]) -> list[Tensor]:
    load_backends([EXAMPLE])
    found = []
    for a2a, runner in pairs:
        combination = Combination(
            a2a, "normal", runner, "bf16", "bf16", "bf16", group.size, group.size, True
        )
        layer = combination.layer(group)
        found.append(layer(*share(group, 96, torch.bfloat16)))
    return found


def test_deterministic_bits_do_not_depend_on_ranks_or_dispatcher(pools: Pools):
    """`none` on one rank is what all others are compared with, for each runner."""
    for runner in ("loop", "triton"):
        (wanted,) = (only for (only,) in pools(1).run(results, [("none", runner)]))
        pairs = [(a2a, runner) for a2a in ("ring", "gloo", "deepep", "none")]
        for tp in SPLITS:
            for number, by_rank in enumerate(zip(*pools(tp).run(results, pairs), strict=True)):
                assert torch.equal(torch.cat(by_rank), wanted), (pairs[number], tp)


def layer_of(group: RankGroup, a2a: str) -> FusedMoE:
    load_backends([EXAMPLE])
    size = group.size
    return Combination(a2a, "normal", "loop", "fp32", "fp32", "fp32", size, size).layer(group)


def both_lanes(group: RankGroup, a2a: str) -> bool:
    """Two micro-batches under way at once give what they give one after the other."""
    layer = layer_of(group, a2a)
    x_TH, topk = share(group, 48, torch.float32)
    none = TopKOutput(topk.ids_TK[:0], topk.weights_TK[:0])
    batches = [(x_TH, topk), (x_TH[:0], none) if group.rank == 0 else (x_TH.neg(), topk)]
    alone = [layer(*batch) for batch in batches]

    dispatcher, run = layer.dispatcher, layer.runner.run
    begun = [dispatcher.dispatch_a(*batch, Step(True, i)) for i, batch in enumerate(batches)]
    rows = [dispatcher.dispatch_b(pending) for pending in begun]
    given = [run(one, layer.weights, layer.context.workspace) for one in reversed(rows)]
    back = [dispatcher.combine_a(result) for result in reversed(given)]
    together = [dispatcher.combine_b(pending) for pending in back]
    return all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("a2a", ["ring", "gloo"])
def test_two_micro_batches_at_once(a2a: str, pools: Pools):
    assert pools(3).run(both_lanes, a2a) == [True] * 3


def traffic_and_hooks(group: RankGroup, a2a: str) -> tuple[int, int, int, list[str]]:
    """Rows that came from others and went back, by the counters and by what a hook sees."""
    layer = layer_of(group, a2a)
    seen: list[str] = []
    rows = 0

    def after_dispatch(dispatcher: Any, output: NormalDispatchOutput) -> None:
        nonlocal rows
        rows += len(output.x)
        assert sum(output.rows_e) == int((output.ids_RK >= 0).sum())

    for point in layer.dispatcher.HOOKS:
        layer.dispatcher.register_hook(point, lambda *_, point=point: seen.append(point))
    layer.dispatcher.register_hook("post_dispatch", after_dispatch)
    x_TH, topk = share(group, 40, torch.float32)
    layer(x_TH, topk)
    own = int((layer.layout.local(topk.ids_TK) >= 0).any(1).sum())
    traffic = layer.dispatcher.traffic
    assert traffic.dispatch_bytes == traffic.dispatch_rows * HIDDEN * 4
    assert traffic.combine_bytes == traffic.combine_rows * HIDDEN * 4
    return rows - own, traffic.dispatch_rows, traffic.combine_rows, seen


@pytest.mark.parametrize("a2a", ["ring", "gloo"])
def test_traffic_is_counted_and_hooks_are_called(a2a: str, pools: Pools):
    told = pools(4).run(traffic_and_hooks, a2a)
    assert all(came == counted > 0 for came, counted, _, _ in told)
    assert sum(counted for _, counted, _, _ in told) == sum(back for _, _, back, _ in told)
    order = list(BaseDispatcher.HOOKS)
    assert all(seen == order for *_, seen in told)


def stay_away(group: RankGroup, a2a: str) -> None:
    layer = layer_of(group, a2a)
    if group.rank != 1:
        layer(*share(group, 12, torch.float32))


@pytest.mark.parametrize("a2a", ["ring", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_missing_rank_and_the_operation_are_named(a2a: str):
    with (
        LocalRanks(3, timeout=60, peer_timeout=3.0) as ranks,
        pytest.raises(RankFailed, match=rf"(?s)rank 1.*{a2a} dispatch, layer 0"),
    ):
        ranks.run(stay_away, a2a)


def matrix(group: RankGroup, problems: list[MoeProblem]) -> list[tuple[bool, str]]:
    """Whether each works, and what was filled in or what is wrong and what to do."""
    load_backends([EXAMPLE])
    told = []
    for problem in problems:
        try:
            told.append((supports(problem).ok, "; ".join(resolve(problem).reasons)))
        except ValueError as error:
            told.append((supports(problem).ok, str(error)))
    return told


BF16 = "bf16 weights take activations as they are"
LOOP_WEIGHTS = "bf16, fp16, fp32, int8_w8a16, int4_w4a16, mxfp4"
TOLD = (
    (MoeProblem("ring", runner="loop"), f"payload bf16: {BF16}; mode normal: the only one of ring"),
    (
        MoeProblem("ring"),
        f"runner triton: preferred for bf16 weights; payload bf16: {BF16}; "
        "mode normal: the only one of ring",
    ),
    (
        MoeProblem("gloo", runner="deep_gemm", weights=WEIGHT_FORMATS["fp8_block"], ep=2, tp=4),
        "payload fp8: fp8_block weights are multiplied with fp8 activations; "
        "mode normal: the only one of gloo",
    ),
    (MoeProblem("deepep", "normal", "loop"), f"payload bf16: {BF16}"),
)
REFUSED = (
    (
        MoeProblem("deepep", runner="loop"),
        "loop does not take the format 'deepep_ll' of deepep, only standard, deepep_normal; "
        "use --moe-runner-backend auto",
    ),
    (
        MoeProblem("ring", "low_latency"),
        "ring has no low_latency mode, only normal; use --deepep-mode auto",
    ),
    (
        MoeProblem("none", runner="loop", weights=WEIGHT_FORMATS["fp8_block"]),
        f"loop does not compute with fp8_block weights, only with {LOOP_WEIGHTS}; "
        "use --moe-runner-backend auto",
    ),
    (
        MoeProblem("ascend_fuseep", runner="loop", phases=("decode",)),
        "loop does not take the format 'fused' of ascend_fuseep, only standard, deepep_normal; "
        "use --moe-runner-backend auto",
    ),
    (
        MoeProblem("ring", device="cuda"),
        "ring has no provider for cuda, only for cpu; use --moe-a2a-backend none",
    ),
    (MoeProblem("rign"), "--moe-a2a-backend 'rign' is not known: choose one of none, deepep, "),
)


def test_the_matrix_knows_them(pools: Pools):
    (told,) = pools(1).run(matrix, [problem for problem, _ in TOLD])
    assert told == [(True, text) for _, text in TOLD]
    (told,) = pools(1).run(matrix, [problem for problem, _ in REFUSED])
    for (ok, message), (_, wanted) in zip(told, REFUSED, strict=True):
        assert not ok and message.startswith(wanted)


def listed(group: RankGroup) -> dict[str, Any]:
    load_backends([EXAMPLE])
    ok = {(p.a2a, p.runner) for p, support in combinations_of() if support.ok}
    return {
        "a2a of loop": sorted(a2a for a2a, runner in ok if runner == "loop"),
        "runners of ring": sorted(runner for a2a, runner in ok if a2a == "ring"),
        "formats of loop": POOL.formats_of("loop"),
        "fused": POOL.fused_func("none", "loop") is not None,
    }


def test_the_table_lists_them(pools: Pools):
    (told,) = pools(1).run(listed)
    assert told["a2a of loop"] == ["deepep", "flashinfer", "gloo", "mori", "none", "ring"]
    assert {"loop", "triton", "deep_gemm"} <= set(told["runners of ring"])
    assert sorted(told["formats of loop"]) == ["deepep_normal", "standard"]
    assert told["fused"]


def load_missing(group: RankGroup, name: str) -> str:
    try:
        load_backends([name])
    except ValueError as error:
        return str(error)
    return "loaded"


def test_a_module_that_is_not_there_is_named(pools: Pools):
    (told,) = pools(1).run(load_missing, "examples.backends.yours")
    assert told == (
        "--moe-backend-module 'examples.backends.yours' cannot be imported from here: "
        "ModuleNotFoundError: No module named 'examples.backends.yours'"
    )
    (told,) = pools(1).run(load_missing, "json")
    assert told.startswith("--moe-backend-module 'json' registers no backend")
    assert pools(1).run(load_missing, EXAMPLE) == ["loaded"]
    assert pools(1).run(load_missing, EXAMPLE) == ["loaded"]


FIELDS = {"moe_a2a_backend": "ring", "moe_runner_backend": "loop"}


def generated(group: RankGroup, kwargs: dict[str, str]) -> dict[str, Any]:
    with Engine(model_path="tiny:qwen3_moe", dtype="float32", random_seed=0, **kwargs) as engine:
        return engine.generate(
            input_ids=[5, 6, 7, 8],
            sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
            return_logprob=True,
        )


def logprobs(answer: dict[str, Any]) -> Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


def test_the_engine_takes_them(pools: Pools):
    (usual,) = pools(1).run(generated, {})
    (ours,) = pools(1).run(generated, FIELDS | {"moe_backend_module": EXAMPLE})
    assert ours["output_ids"] == usual["output_ids"]
    torch.testing.assert_close(logprobs(ours), logprobs(usual), atol=1e-4, rtol=0)


def test_the_engine_refuses_what_does_not_fit(pools: Pools):
    with pytest.raises(RankFailed, match="loop does not take the format 'deepep_ll' of deepep"):
        pools(1).run(
            generated, FIELDS | {"moe_backend_module": EXAMPLE, "moe_a2a_backend": "deepep"}
        )


SCRIPT = """
import json
from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY
from tests.distributed.test_external_backend import FIELDS, generated
answer = generated(None, FIELDS)
print(json.dumps([answer["output_ids"], sorted(A2A_REGISTRY), "loop" in RUNNER_REGISTRY]))
"""


def install(folder: Path, value: str) -> dict[str, str]:
    """A package that brings backends, as pip leaves it; the environment in which it is found."""
    info = folder / "my_backends-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-backends\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[moesaic.moe_backends]\nmine = {value}\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_an_installed_package_brings_them(tmp_path: Path, pools: Pools):
    environment = install(tmp_path, EXAMPLE)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    ids, a2a, loop = json.loads(done.stdout.splitlines()[-1])
    (usual,) = pools(1).run(generated, {})
    assert ids == usual["output_ids"] and {"ring", "gloo"} < set(a2a) and loop


def test_the_command_line_takes_them():
    command = (
        "-m moesaic.cli.main generate --model-path tiny:qwen3_moe --prompt Hi --max-new-tokens 2 "
        f"--moe-backend-module {EXAMPLE} --moe-a2a-backend ring --moe-runner-backend loop"
    )
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "a2a ring (normal, examples.backends.ring), runner loop (examples.backends.loop)" in (
        done.stderr
    )


def test_the_page_shows_the_code_as_it_is():
    """Code of docs/add_a_backend.md that defines or registers something stands in the examples."""
    files = sorted((ROOT / "examples" / "backends").glob("*.py"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    page = (ROOT / "docs" / "add_a_backend.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    shown = [block for block in blocks if not block.startswith(("Engine(", "from "))]
    assert len(shown) == 9
    assert [block for block in shown if block not in code] == []


def number(group: RankGroup) -> list[list[int]]:
    from examples.backends.ring import numbered

    return numbered(torch.tensor([[True, False, True], [False, True, False]])).tolist()


def test_numbers_of_the_docstring(pools: Pools):
    assert pools(1).run(number) == [[[0, -1, 1], [-1, 2, -1]]]
