"""The capability matrix: refusals, suggestions and the choices of `auto`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from moesaic.config.args_parallel import A2A_BACKENDS, RUNNER_BACKENDS
from moesaic.moe.backends import load_backends
from moesaic.moe.dispatch.local import LocalDispatcher
from moesaic.moe.matrix_docs import REFUSED, RESOLVED, flags, markdown
from moesaic.moe.permute import POOL
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from moesaic.moe.quant.weights import WEIGHT_FORMATS, int4_format
from moesaic.moe.registry import (
    A2A_REGISTRY,
    FLAGS,
    MODES,
    RUNNER_REGISTRY,
    A2aBackend,
    MoeProblem,
    Provider,
    RunnerBackend,
    combinations_of,
    formats_of,
    modes_of,
    payload_of,
    register_a2a,
    register_runner,
    resolve,
    suggest,
    supports,
)

load_backends()
ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, dict[str, Any]] = {
    "all steps": {},
    "decode": {"phases": ("decode",)},
    "hybrid": {"tp": 4, "ep": 2, "hidden_size": 128, "intermediate_size": 256},
    "bad split": {"tp": 4, "ep": 3},
    "narrow": {"tp": 4, "ep": 1, "hidden_size": 80, "intermediate_size": 96},
}
each_setting = pytest.mark.parametrize("setting", SETTINGS)


def refused(setting: str, dtype: str = "bf16") -> Iterator[tuple[MoeProblem, str]]:
    for problem, support in combinations_of(dtype=dtype, **SETTINGS[setting]):
        if not support.ok:
            yield problem, support.reason


@cache
def anything_works(problem: MoeProblem) -> bool:
    """Tries all choices of backends for these weights and sizes."""
    splits = [n for n in range(1, problem.tp + 1) if problem.tp % n == 0]
    axes = product(A2A_REGISTRY, MODES, RUNNER_REGISTRY, PAYLOAD_FORMATS, splits)
    return any(
        supports(replace(problem, a2a=a, mode=m, runner=r, payload=p, ep=ep)).ok
        for a, m, r, p, ep in axes
    )


def bare(problem: MoeProblem) -> MoeProblem:
    """Removes the settings that a suggestion may change."""
    return replace(problem, a2a="none", mode="auto", runner="auto", payload="auto", ep=1)


@each_setting
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_refusals_have_a_reason_that_names_a_value(setting: str, dtype: str):
    count = 0
    for problem, reason in refused(setting, dtype):
        named = (problem.a2a, problem.runner, problem.payload, problem.weights.name)
        values = (*named, "ep ", "cut in")
        assert any(value in reason for value in values), (problem, reason)
        assert "\n" not in reason and not reason.endswith((".", ";")), reason
        count += 1
    assert count > 4000


def check_suggestion(problem: MoeProblem) -> None:
    nearest = suggest(problem)
    if nearest is None:
        assert not anything_works(bare(problem)), problem
        return
    assert supports(nearest).ok, (problem, nearest)
    kept = [name for name in vars(problem) if name not in FLAGS]
    assert all(getattr(nearest, name) == getattr(problem, name) for name in kept)
    assert resolve(nearest).problem.runner in RUNNER_REGISTRY


@each_setting
def test_suggestions_work(setting: str):
    """Checks every 41st suggestion; the slow test below checks all."""
    for problem, _ in list(refused(setting))[::41]:
        check_suggestion(problem)


@pytest.mark.slow
@pytest.mark.timeout(600)
@each_setting
def test_all_suggestions_work(setting: str):
    for problem, _ in refused(setting):
        check_suggestion(problem)


def test_a_suggestion_changes_as_little_as_possible():
    for problem, _ in list(refused("all steps"))[::29]:
        nearest = suggest(problem)
        if nearest is None:
            continue
        changed = [name for name in FLAGS if getattr(nearest, name) != getattr(problem, name)]
        assert changed
        for name in changed:  # undoing any one of them must not work
            assert not supports(replace(nearest, **{name: getattr(problem, name)})).ok


def test_nothing_helps_only_where_weights_and_sizes_do_not_fit():
    """No flag changes the model's type or its sizes."""
    for problem, _ in list(refused("all steps"))[::7]:
        mismatch = problem.weights.name in ("fp16", "fp32")
        assert (suggest(problem) is None) == mismatch, problem
    assert (
        suggest(MoeProblem(weights=WEIGHT_FORMATS["nvfp4"], hidden_size=72, intermediate_size=64))
        is None
    )
    odd = MoeProblem(tp=4, ep=2, hidden_size=128, intermediate_size=101)
    assert suggest(odd) == replace(odd, ep=4)


@pytest.mark.parametrize("problem", REFUSED, ids=flags)
def test_message_names_flag_and_value(problem: MoeProblem):
    with pytest.raises(ValueError) as refusal:
        resolve(problem)
    reason, _, advice = str(refusal.value).rpartition("; use ")
    assert reason == supports(problem).reason
    nearest = suggest(problem)
    assert nearest is not None
    for name, flag in FLAGS.items():
        value = getattr(nearest, name)
        said = f"{flag} {value}" in advice.split(", ")
        assert said == (value != getattr(problem, name))


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (
            MoeProblem(a2a="deep_ep"),
            "--moe-a2a-backend 'deep_ep' is not known: choose one of none,",
        ),
        (
            MoeProblem(runner="tritn"),
            "--moe-runner-backend 'tritn' is not known: choose one of auto,",
        ),
        (MoeProblem(payload="fp6"), "payload 'fp6' is not known"),
        (
            MoeProblem(a2a="mooncake", mode="normal"),
            "mooncake has no normal mode, only low_latency",
        ),
        (MoeProblem(ep=3, tp=4), "ep 3 does not divide tp 4; use --ep-size 4"),
        (MoeProblem(ep=8, tp=4), "ep 8 does not divide tp 4"),
        (
            MoeProblem(device="tpu"),
            "none has no provider for tpu, only for cpu, cuda; no choice of backends would help",
        ),
        (
            MoeProblem(runner="triton", payload="fp8", weights=WEIGHT_FORMATS["int8_w8a8"]),
            "payload fp8 would be rounded again: int8_w8a8 weights are multiplied with int8",
        ),
        (
            MoeProblem(
                payload="nvfp4",
                weights=WEIGHT_FORMATS["nvfp4"],
                hidden_size=72,
                intermediate_size=64,
            ),
            "72 columns do not fit weight format nvfp4: they must be a multiple of 16",
        ),
        (
            MoeProblem(payload="mxfp4", hidden_size=48),
            "hidden size 48 does not fit payload mxfp4: it must be a multiple of 32",
        ),
        (
            MoeProblem(
                weights=WEIGHT_FORMATS["fp8_block"],
                tp=4,
                ep=1,
                hidden_size=128,
                intermediate_size=256,
            ),
            "shards of 64 cut blocks of weight format fp8_block",
        ),
        (
            MoeProblem(tp=4, ep=1, hidden_size=128, intermediate_size=102),
            "an intermediate size of 102 cannot be cut in 4 (tp 4 / ep 1); use --ep-size",
        ),
        (
            MoeProblem(weights=WEIGHT_FORMATS["fp16"]),
            "fp16 weights cannot be multiplied with bf16 activations",
        ),
    ],
)
def test_messages(problem: MoeProblem, words: str):
    with pytest.raises(ValueError) as refusal:
        resolve(problem)
    assert words in str(refusal.value)


def test_no_reason_is_given_twice():
    reason = supports(MoeProblem(weights=WEIGHT_FORMATS["fp16"])).reason
    assert reason.startswith("no runner fits: ")
    reasons = reason.removeprefix("no runner fits: ").split("; ")
    assert len(reasons) > 1 and len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("a2a", A2A_REGISTRY)
def test_auto_is_resolved_with_reasons(a2a: str, weights: str):
    dtype = weights if weights in ("fp16", "fp32") else "bf16"
    format = WEIGHT_FORMATS[weights]
    asked = MoeProblem(a2a=a2a, weights=format, dtype=dtype, phases=("decode",))
    choice = resolve(asked)
    chosen = choice.problem
    assert supports(chosen).ok and "auto" not in (chosen.runner, chosen.payload)
    assert chosen.mode in modes_of(chosen) or (a2a != "mori" and chosen.mode == "auto")
    wanted = [f"runner {chosen.runner}: ", f"payload {chosen.payload}: "]
    if len(A2A_REGISTRY[a2a].formats) == 1:
        wanted.append(f"mode {chosen.mode}: the only one of {a2a}")
    assert [r.startswith(w) for r, w in zip(choice.reasons, wanted, strict=True)] == [
        True for _ in wanted
    ]
    preferring = [r for r, b in RUNNER_REGISTRY.items() if weights in b.preferred]
    assert not preferring or chosen.runner in preferring
    assert resolve(chosen) == type(choice)(chosen, ())  # nothing is left open


def test_payload_follows_weights_where_all_agree():
    assert payload_of(MoeProblem(weights=WEIGHT_FORMATS["fp8_block"]))[0] == "fp8"
    assert payload_of(MoeProblem(weights=WEIGHT_FORMATS["bf16"]))[0] == "bf16"
    assert payload_of(MoeProblem(weights=WEIGHT_FORMATS["int8_w8a16"], dtype="fp16"))[0] == "fp16"
    assert payload_of(MoeProblem(a2a="mori", weights=WEIGHT_FORMATS["nvfp4"])) == (
        "bf16",
        "mori does not take nvfp4",
    )
    payload, why = payload_of(MoeProblem(weights=WEIGHT_FORMATS["nvfp4"], hidden_size=72))
    assert payload == "bf16" and "multiple of 16" in why
    assert payload_of(MoeProblem(payload="int8")) == ("int8", "as asked")


def test_weights_are_the_format_at_hand():
    """The matrix judges the given format, not the usual one of the same name."""
    for name in ("fp8_block", "fp8_channel", "fp8_tensor", "nvfp4"):
        alone = MoeProblem(weights=replace(WEIGHT_FORMATS[name], activation=None), ep=2, tp=2)
        for a2a, device in product(A2A_REGISTRY, ("cpu", "cuda")):
            asked = replace(alone, a2a=a2a, device=device, phases=("decode",))
            choice = resolve(asked)
            assert choice.problem.payload == "bf16" and choice.problem.weights.activation is None
            assert f"payload bf16: {name} weights take activations as they are" in choice.reasons
    sizes = {"hidden_size": 96, "intermediate_size": 64, "experts": 8, "ep": 2, "tp": 4}
    assert supports(MoeProblem(weights=int4_format(32), **sizes)).ok
    usual = supports(MoeProblem(weights=WEIGHT_FORMATS["int4_w4a16"], **sizes))
    assert "must be a multiple of 128" in usual.reason
    with pytest.raises(ValueError, match=r"64 columns do not fit .* int4_w4a16.* multiple of 48"):
        resolve(MoeProblem(weights=int4_format(48), **sizes | {"tp": 2}))


def test_declared_formats_have_their_functions():
    """Every pair that the matrix allows has permutes or a fused function."""
    for a2a, device in product(A2A_REGISTRY.values(), ("cpu", "cuda")):
        for format in a2a.formats_for(device).values():
            for runner in RUNNER_REGISTRY.values():
                if format not in runner.layouts:
                    continue
                if format == "fused":
                    assert POOL.fused_func(a2a.name, runner.name, device) is not None
                else:
                    assert format in POOL.formats_of(runner.name, device)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (A2aBackend("none", "", {"normal": "standard"}, ("bf16",)), "registered twice"),
        (A2aBackend("auto", "", {"normal": "standard"}, ("bf16",)), "give a name like"),
        (A2aBackend("mine", "", {}, ("bf16",)), "mode missing"),
        (A2aBackend("mine", "", {"fast": "standard"}, ("bf16",)), "fast"),
        (A2aBackend("mine", "", {"normal": "standard"}, ("fp6",)), "fp6"),
        (RunnerBackend("triton", "", {}, ("bf16",), ("bf16",)), "registered twice"),
        (RunnerBackend("mine", "", {}, ("int3",), ("bf16",)), "int3"),
        (RunnerBackend("mine", "", {}, ("bf16",), ("fp6",)), "fp6"),
    ],
)
def test_bad_declarations_are_refused(backend: A2aBackend | RunnerBackend, words: str):
    with pytest.raises(ValueError, match=words):
        if isinstance(backend, A2aBackend):
            register_a2a(backend)
        else:
            register_runner(backend)
    assert "mine" not in A2A_REGISTRY and "mine" not in RUNNER_REGISTRY


def test_docs_are_current():
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    assert page == markdown(), "run `make docs`"


def test_docs_show_the_matrix():
    """Reads every tick of the page and compares it with the matrix."""
    page = markdown()
    tables = [table.split("\n\n")[1] for table in page.split("\n## ")[-3:-1]]
    for table, registry, field in zip(
        tables, (RUNNER_REGISTRY, A2A_REGISTRY), ("weights", "payloads"), strict=True
    ):
        head, _, *rows = [[c.strip(" `") for c in r.split("|")[1:-1]] for r in table.splitlines()]
        assert [row[0] for row in rows] == list(registry)
        for name, *ticks in rows:
            ticked = {column for column, tick in zip(head[1:], ticks, strict=True) if tick}
            assert ticked == set(getattr(registry[name], field))
    assert all(flags(problem) in page for problem in (*RESOLVED, *REFUSED))


@pytest.mark.parametrize("tp", [1, 4])
def test_every_backend_serves_ranks_on_cuda(tp: int):
    """Its low-latency rows come as `standard` there; one rank sends what it has."""
    for name, backend in A2A_REGISTRY.items():
        for mode, format in backend.formats_for("cuda").items():
            problem = MoeProblem(
                a2a=name,
                mode=mode,
                weights=WEIGHT_FORMATS["fp8_block"],
                device="cuda",
                tp=tp,
                ep=tp,
            )
            choice = resolve(problem).problem
            assert formats_of(choice) == (format,) and format != "deepep_ll"
            sent = "fp8" if tp > 1 and "fp8" in backend.payloads else "bf16"
            assert (choice.payload, name) == (sent, name)


@pytest.mark.parametrize(
    "formats", [{"normal": "standard"}, {"normal": "standard", "low_latency": "blocks"}]
)
def test_formats_of_a_device_are_checked(formats: dict[str, str]):
    both = {"normal": "standard", "low_latency": "standard"}
    providers = {"cuda": Provider(LocalDispatcher, formats=formats)}
    strange = A2aBackend("strange", "", both, ("bf16",), providers=providers)
    with pytest.raises(ValueError, match=r"'strange': formats .* on cuda: give one of .*standard"):
        register_a2a(strange)
    assert "strange" not in A2A_REGISTRY


def test_the_order_of_backends_is_ours_whoever_was_imported_first():
    code = (
        "import moesaic.moe.dispatch.ascend_fuseep, moesaic.moe.dispatch.mori\n"
        "import moesaic.moe.runner.deep_gemm\n"
        "from moesaic.moe.backends import load_backends\n"
        "from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY\n"
        "load_backends()\n"
        "print(*A2A_REGISTRY, *RUNNER_REGISTRY)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    runners = [name for name in RUNNER_BACKENDS if name != "auto"]
    assert done.stdout.split() == [*A2A_BACKENDS, *runners]
