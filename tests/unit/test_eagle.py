"""Draft heads of EAGLE and EAGLE-3: they draft what plain torch computes from transformers' hidden
states, and change no answer."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.core.draft_shape import chains
from moesaic.core.request import Request
from moesaic.core.sampling import SamplingParams
from moesaic.engine.runner import model_runner
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.setup.memory_plan import plan_memory
from moesaic.engine.speculate.token_map import hot_tokens
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.config import RawConfig
from moesaic.models.eagle_config import read_head
from moesaic.models.tiny import materialise
from tests.e2e.test_ngram import Moody
from tests.eagle_heads import Head, Reference
from tests.kernels.triton_cases import GPU
from tests.unit.test_draft_branches import likeliest, paths_of, search
from tests.unit.test_draft_model import (
    TIGHT,
    arguments,
    check_equal,
    count_accepted,
    requests,
    serve,
)

QWEN = "tiny:qwen3_moe,num_hidden_layers=4"
STEPS = 3


@cache
def target(model: str) -> tuple[Path, dict[str, Any]]:
    folder = Path(materialise(model))
    return folder, json.loads((folder / "config.json").read_text())


def flags_of(folder: Path, third: bool = True, **flags: Any) -> dict[str, Any]:
    return {
        "speculative_algorithm": "EAGLE3" if third else "EAGLE",
        "speculative_draft_model_path": str(folder),
        "speculative_num_steps": STEPS,
        "disable_speculative_adaptive": True,
    } | flags


def make_core(model: str, asynchronous: bool, **flags: Any) -> LocalCore:
    args = arguments(model, **flags)
    return LocalCore(args, ModelRunner(args, asynchronous=asynchronous))


def prompted(number: int, length: int, new_tokens: int = 24) -> Request:
    chance = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 256, (length,), generator=chance).tolist()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    return Request(str(number), ids, params, 0, new_tokens, number, frozenset())


def drafts_of(core: LocalCore, request: Request) -> dict[int, list[int]]:
    """What follows as many tokens of the request."""
    return {length: drafts for length, (drafts, _) in trees_of(core, request).items()}


def trees_of(core: LocalCore, request: Request) -> dict[int, tuple[list[int], list[int]]]:
    """The same, and the parents of the drafts."""
    found: dict[int, tuple[list[int], list[int]]] = {}

    def note(_: int) -> None:
        if request.drafts:
            found[len(request.token_ids)] = list(request.drafts), list(request.draft_parents)

    serve(core, [request], note)
    return found


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": (QWEN, {}),
    "no taps named": (
        "tiny:qwen3_moe,num_hidden_layers=8",
        {"taps": (2, 4, 5), "changes": {"eagle_config": {}}},
    ),
    "layers.0, all own, end tapped": (
        QWEN,
        {
            "names": ("layers.0", "model."),
            "taps": (1, 3, 4),
            "own": ("embed_tokens", "lm_head"),
            "biases": True,
        },
    ),
    "gpt-oss": ("tiny:gpt_oss,num_hidden_layers=4", {"taps": (0, 2, 3)}),
    "deepseek": ("tiny:deepseek_v3,num_hidden_layers=4", {"changes": {"draft_vocab_size": None}}),
    "norms": (
        QWEN,
        {
            "changes": {
                "norm_before_residual": True,
                "norm_before_fc": True,
                "fc_norm": True,
                "norm_output": True,
            }
        },
    ),
    "narrow": (QWEN, {"changes": {"hidden_size": 48}, "own": ("embed_tokens",)}),
    "eagle": (QWEN, {"third": False, "names": ("layers.0", "")}),
    "eagle, own embedding": (
        "tiny:mixtral,num_hidden_layers=3",
        {"third": False, "names": ("layers.0", ""), "own": ("embed_tokens",), "biases": True},
    ),
}


HEADS = [
    pytest.param(True, True, id="eagle3 asynchronous"),
    pytest.param(False, False, id="eagle synchronous", marks=pytest.mark.slow),
    pytest.param(True, False, id="eagle3 synchronous", marks=pytest.mark.slow),
    pytest.param(False, True, id="eagle asynchronous", marks=pytest.mark.slow),
]
MODES = [
    *((name, number % 2 == 0) for number, name in enumerate(CASES)),
    ("qwen", False),
    pytest.param("gpt-oss", True, marks=pytest.mark.slow),
    pytest.param("deepseek", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "asynchronous"), MODES)
def test_drafts_are_those_of_the_reference(name: str, asynchronous: bool, tmp_path: Path) -> None:
    model, options = CASES[name]
    folder, config = target(model)
    head = Head(config, **options)
    head.write(tmp_path)
    core = make_core(model, asynchronous, page_size=4, **flags_of(tmp_path, head.third))
    for part in (core.runner.draft.cache.keys, core.runner.draft.cache.values):
        part.fill_(math.nan)  # no entry is read that was not written
    reference = Reference(head, folder)
    for request in (prompted(1, 1, 10), *(prompted(2, 37, 12) for _ in range(2))):  # cached
        found = drafts_of(core, request)
        assert len(found) >= 3
        for length, drafts in found.items():
            assert drafts == reference.drafts(request.token_ids, length, STEPS), length
    assert core.planner.scheduler.num_cached_tokens >= 32


@pytest.mark.parametrize(("third", "asynchronous"), HEADS)
def test_drafts_behind_steps_without_any(third: bool, asynchronous: bool, tmp_path: Path) -> None:
    """Those of the reference, too: the head's cache has what it needs of all rows."""
    folder, config = target(QWEN)
    head = Head(config, third=third)
    head.write(tmp_path)
    core = make_core(QWEN, asynchronous, page_size=4, **flags_of(tmp_path, third))
    core.planner.drafts.controller = Moody(chains(STEPS))
    reference, total = Reference(head, folder), 0
    for request in (prompted(n, 21 + n, 60) for n in range(2)):
        found = drafts_of(core, request)
        total += len(found)
        for length, drafts in found.items():
            assert drafts == reference.drafts(request.token_ids, length, len(drafts))
    assert 20 < total < core.planner.num_steps - 20


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="")])],
)
@pytest.mark.parametrize("name", ["qwen", "gpt-oss", "deepseek", "eagle"])
def test_drafts_by_the_code_of_a_gpu(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU by its kernels' twins."""
    model, options = CASES[name]
    folder, config = target(model)
    head, reference = Head(config, **options), Reference(Head(config, **options), folder)
    head.write(tmp_path)
    if device == "cpu":
        monkeypatch.setattr(model_runner, "compute_device", lambda *_: torch.device("cpu"))
    given = {"max_total_tokens": 256, "max_running_requests": 4, "cuda_graph_bs": (2, 4)}
    args = arguments(model, **given, **flags_of(tmp_path, head.third))
    core = LocalCore(args, ModelRunner(replace(args, device="cuda")))
    wrong = total = 0
    for request in (prompted(1, 1, 10), prompted(2, 37, 14)):
        for length, drafts in drafts_of(core, request).items():
            total += 1
            wrong += drafts != reference.drafts(request.token_ids, length, STEPS)
    # Matrix units of a GPU round float32 to fewer bits.
    assert total > 15 and wrong <= (0 if device == "cpu" else 0.1 * total)


TREES = [(2, 3, 6, True), (3, 3, 9, False), (4, 2, 14, True)]
"""Branches, levels and tokens of drafts, and whether the head is one of EAGLE-3."""


@pytest.mark.parametrize(("topk", "steps", "tokens", "third"), TREES)
def test_trees_are_those_of_the_reference(
    topk: int, steps: int, tokens: int, third: bool, tmp_path: Path
) -> None:
    """Which searches all paths, each over the whole text; also behind steps that accepted another
    branch than the first. The answers are those without drafts."""
    folder, config = target(QWEN)
    head = Head(config, third=third, changes={"draft_vocab_size": 12} if third else {})
    head.write(tmp_path)
    counts = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": tokens}
    flags = flags_of(tmp_path, third, **counts | {"speculative_num_steps": steps})
    core, plain = make_core(QWEN, topk == 2, page_size=4, **flags), make_core(QWEN, False)
    for part in (core.runner.draft.cache.keys, core.runner.draft.cache.values):
        part[:, 1:].fill_(math.nan)  # no entry is read that was not written; page 0 is padding
    moved, move = list[Any](), core.runner.move
    core.runner.move = lambda slots: (moved.extend(slots), move(slots))
    # Of the few tokens that the head knows one is often right, on any branch.
    bias = {} if head.token_map is None else dict.fromkeys(head.token_map.tolist(), 40.0)
    reference, checked = Reference(head, folder), 0
    for number, length in enumerate((1, 22, 22)):
        served, expected = prompted(length, length, 24), prompted(length, length, 24)
        if number:
            served.params = expected.params = SamplingParams(logit_bias=bias, ignore_eos=True)
        found = trees_of(core, served)
        serve(plain, [expected])
        assert served.token_ids == expected.token_ids
        for start, (drafts, parents) in [*found.items()][::4]:

            def behind(path: tuple[int, ...], start: int = start) -> dict[int, float]:
                return reference.likely(served.token_ids, start, path, topk)  # noqa: B023

            pool = search(behind, topk, steps)
            paths, want = paths_of(drafts, parents), likeliest(pool, tokens - 1)
            assert [pool[path] for path in paths] == pytest.approx(
                [pool[path] for path in want], abs=1e-3
            )
            checked += 1
    assert checked >= 10 and bool(moved) == third
    assert core.planner.metrics.counts.failed_steps == 0


@cache
def without_drafts(model: str) -> list[Request]:
    return serve(make_core(model, False, **TIGHT), requests(model))


@pytest.mark.parametrize(("third", "asynchronous"), HEADS)
def test_heads_change_no_answer(third: bool, asynchronous: bool, tmp_path: Path) -> None:
    """Of greedy and seeded requests with penalties, in chunks, retracted, and from the cache."""
    Head(target(QWEN)[1], third=third).write(tmp_path)
    core = make_core(QWEN, asynchronous, **TIGHT, **flags_of(tmp_path, third))
    counts = count_accepted(core)
    for _ in range(2):
        check_equal(serve(core, requests(QWEN)), without_drafts(QWEN))
    assert counts[0] > 200 and core.planner.scheduler.num_retractions > 0
    assert core.planner.metrics.counts.failed_steps == 0


def texts_of(model: str) -> list[list[int]]:
    """The target's greedy answers to short prompts."""
    served = serve(make_core(model, False), [prompted(n, 4 + n, 40) for n in range(4)])
    return [request.token_ids for request in served]


def trained(third: bool, texts: list[list[int]]) -> Head:
    """A head that has learnt these answers."""
    folder, config = target(QWEN)
    words = sorted({token for text in texts for token in text})
    head = Head(config, third=third, changes={"draft_vocab_size": len(words)} if third else {})
    if third:
        head.token_map = torch.tensor(words)
    Reference(head, folder).train(texts, *((2, 3e-3) if third else (1, 1e-3)))
    return head


@pytest.mark.parametrize("third", [True, False], ids=["eagle3", "eagle"])
def test_a_trained_head_is_mostly_right(third: bool, tmp_path: Path) -> None:
    served = [prompted(n, 4 + n, 40) for n in range(4)]
    texts = [one.token_ids for one in serve(make_core(QWEN, False), served)]
    trained(third, texts).write(tmp_path)
    core = make_core(QWEN, True, **flags_of(tmp_path, third))
    counts, before = count_accepted(core), core.planner.num_steps
    served = [prompted(n, 4 + n, 40) for n in range(4)]
    assert [one.token_ids for one in serve(core, served)] == texts
    # 156 tokens are drafted for, and of 4 x 40 tokens each step without drafts gives 4.
    assert counts[1] > (90 if third else 65)
    assert core.planner.num_steps - before < (20 if third else 28)


HOT = [3, 5, 8, *range(40, 130, 2), 255]


@pytest.mark.parametrize("kind", ["json", "pt"])
def test_only_tokens_of_the_map_are_proposed(kind: str, tmp_path: Path) -> None:
    folder, config = target(QWEN)
    head = Head(config, third=False, names=("layers.0", ""))
    head.write(tmp_path / "head")
    path = tmp_path / f"hot.{kind}"
    if kind == "json":
        path.write_text(json.dumps(HOT[::-1]))
    else:
        torch.save(torch.tensor([*HOT, 5]), path)
    flags = flags_of(tmp_path / "head", False, speculative_token_map=str(path))
    core = make_core(QWEN, kind == "pt", **flags)
    reference, request = Reference(head, folder, HOT), prompted(3, 9)
    found = drafts_of(core, request)
    assert len(found) > 15
    for length, drafts in found.items():
        assert drafts == reference.drafts(request.token_ids, length, STEPS)


def test_the_layer_of_the_checkpoint_proposes_tokens_of_the_map(tmp_path: Path) -> None:
    """The best of them: those that it proposes of all tokens, where they are in the map."""
    path, found = tmp_path / "hot.json", []
    path.write_text(json.dumps(HOT))
    for tokens in (None, str(path)):
        flags = {"speculative_token_map": tokens, "disable_speculative_adaptive": True}
        model = "tiny:deepseek_v3,num_nextn_predict_layers=1"
        core = make_core(model, True, speculative_algorithm="NEXTN", **flags)
        request = prompted(5, 20, 60)
        found.append((drafts_of(core, request), request.output_ids))
    (every, answer), (mapped, same) = found
    assert answer == same
    firsts = {n: (drafts[0], mapped[n][0]) for n, drafts in every.items() if n in mapped}
    assert {token for drafts in mapped.values() for token in drafts} <= set(HOT)
    hits = [(best, token) for best, token in firsts.values() if best in HOT]
    assert len(hits) > 3 and all(best == token for best, token in hits)


def test_nested_configs(tmp_path: Path) -> None:
    """As speculators writes them: with the layer's sizes apart, and with the layers whose input is
    read."""
    config = target(QWEN)[1]
    head = Head(config, changes={"norm_before_residual": True})
    head.write(tmp_path)
    target_config = RawConfig(config, "target")
    flat = read_head(tmp_path, target_config, is_third=True)
    own = {key: head.config[key] for key in ("draft_vocab_size", "norm_before_residual")}
    layer = {key: value for key, value in head.config.items() if key not in own}
    del layer["eagle_config"]
    nested = own | {
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    found = read_head(tmp_path, target_config, is_third=True)
    assert found.taps == flat.taps == (1, 2, 3)
    assert found.variants == flat.variants == {"norm_before_residual"}
    assert found.token_map == flat.token_map is not None
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "rope_theta"):
        assert found.raw.data[key] == head.config[key]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another target's width": (
        {"changes": {"target_hidden_size": 128}},
        "target_hidden_size is 128, and the target's hidden_size is 64: give a head that was",
    ),
    "another hidden size": (
        {"changes": {"hidden_size": 48}},
        "hidden_size is 48, and the target's is 64, whose embedding the head takes",
    ),
    "another vocabulary": (
        {"changes": {"vocab_size": 300}},
        "vocab_size is 300, and the target's is 258: give a head that was trained for this",
    ),
    "no map": ({"without": ("d2t",)}, "has no tensor d2t, and draft_vocab_size 100 of .*config"),
    "a short map": (
        {"late": {"draft_vocab_size": 99}},
        "tensor d2t in .* has 100 entries, and draft_vocab_size of .*config.json is 99",
    ),
    "no head": ({"without": ("fc.weight",)}, "has no tensor fc.weight, so it is not a head"),
    "two layers": (
        {"changes": {"num_hidden_layers": 2}},
        "num_hidden_layers is 2: only heads of one layer are served",
    ),
    "layers that are not there": (
        {"changes": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 23, 44]}}},
        r"eagle_aux_hidden_state_layer_ids \[1, 23, 44\]: .* must be 3 different ones from 0 to 4",
    ),
    "a head of the other kind": (
        {"third": False},
        "is a head of EAGLE .*: give --speculative-algorithm EAGLE$",
    ),
    "a missing matrix": (
        {"without": ("midlayer.mlp.up_proj.weight",)},
        "do not fit config.json: missing midlayer.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    options, message = dict(WRONG[name][0]), WRONG[name][1]
    without, late = options.pop("without", ()), options.pop("late", {})
    head = Head(target(QWEN)[1], **options)
    head.write(tmp_path, without)
    if late:
        (tmp_path / "config.json").write_text(json.dumps(head.config | late))
    with pytest.raises(ValueError, match=message):
        make_core(QWEN, False, **flags_of(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 258]", "has token 258, and the target's vocab_size is 258"),
        ("{}", "has no list of token ids"),
        ("[1,", "cannot be read: .*: give a file of torch.save or JSON"),
    ],
)
def test_a_token_map_that_does_not_fit_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    Head(target(QWEN)[1], third=False).write(tmp_path)
    path = tmp_path / "hot.json"
    path.write_text(content)
    flags = flags_of(tmp_path, False, speculative_token_map=str(path))
    with pytest.raises(ValueError, match=f"--speculative-token-map .*hot.json {message}"):
        plan_memory(arguments(QWEN, **flags))


def test_a_token_map_has_a_token_for_each_branch(tmp_path: Path) -> None:
    path = tmp_path / "hot.json"
    path.write_text("[4, 1, 4]")
    args = replace(arguments(QWEN), speculative_token_map=str(path), speculative_eagle_topk=2)
    assert hot_tokens(args, 258) == [1, 4]
    with pytest.raises(ValueError, match="has 2 tokens, fewer than --speculative-eagle-topk 3"):
        hot_tokens(replace(args, speculative_eagle_topk=3), 258)


def test_a_head_has_a_token_for_each_branch(tmp_path: Path) -> None:
    Head(target(QWEN)[1]).write(tmp_path)
    flags = flags_of(tmp_path) | {
        "speculative_eagle_topk": 101,
        "speculative_num_steps": 1,
        "speculative_num_draft_tokens": 102,
    }
    args = replace(arguments(QWEN), **flags)
    with pytest.raises(ValueError, match=r"topk is 101, and .* proposes among 100 tokens"):
        plan_memory(args)


@pytest.mark.parametrize("third", [True, False], ids=["eagle3", "eagle"])
def test_the_memory_plan_counts_the_head(third: bool, tmp_path: Path) -> None:
    Head(target(QWEN)[1], third=third).write(tmp_path)
    sizes = {"max_total_tokens": 256, "page_size": 4}
    (plain,) = plan_memory(arguments(QWEN, **sizes)).ranks
    (drafting,) = plan_memory(arguments(QWEN, **sizes, **flags_of(tmp_path, third))).ranks
    draft = make_core(QWEN, False, **sizes, **flags_of(tmp_path, third)).runner.draft
    assert draft is not None
    assert drafting.draft_bytes == draft.model.nbytes > 0
    per_page = draft.cache.num_bytes / draft.cache.keys.shape[1]
    assert per_page == 4 * (drafting.cache_bytes_per_token - plain.cache_bytes_per_token)
    # Three hidden states of a token, twice; and the rotations of a head of 16 channels.
    assert third == (drafting.step.dense - plain.step.dense > 6 * 64 * 4 * 2048)
    assert drafting.table_bytes - plain.table_bytes == 2048 * 2 * 8 * 4


@pytest.mark.parametrize("third", [True, False], ids=["eagle3", "eagle"])
def test_a_head_of_random_weights_needs_no_files(third: bool, tmp_path: Path) -> None:
    config = Head(target(QWEN)[1], third=third).config
    (tmp_path / "config.json").write_text(json.dumps(config))
    served = []
    for flags in ({}, flags_of(tmp_path, third)):
        core = make_core(QWEN, True, load_format="dummy", **flags)
        counts = count_accepted(core)
        served.append([one.output_ids for one in serve(core, [prompted(n, 9) for n in range(3)])])
        assert (counts[0] > 40) == bool(flags)
    assert served[0] == served[1]
    with pytest.raises(ValueError, match=r"holds no \*.safetensors file: convert the checkpoint"):
        make_core(QWEN, True, **flags_of(tmp_path, third))
