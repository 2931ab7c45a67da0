"""Draft models of instances that share requests: the tokens of one instance without drafts, and as
many of the drafts accepted as on one instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from bench.http_server import free_port
from moesaic import Engine
from tests.e2e.test_disaggregation import SAME, Pair
from tests.e2e.test_eagle_ranks import QWEN, prompted, trained
from tests.unit.test_draft_model import HOUSE, prompts

Flags = dict[str, Any]
SERVED: Flags = SAME | {"dtype": "float32", "skip_tokenizer_init": True}
DPA: Flags = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "moe_a2a_backend": "deepep"}
SAMPLING: list[Flags] = [
    {"max_new_tokens": 14 + 6 * n, "temperature": 0.6 * (n % 2), "sampling_seed": n}
    for n in range(5)
]
CHUNKS: Flags = {"tp_size": 2, "page_size": 4, "chunked_prefill_size": 16}


def drafts(algorithm: str, path: Path | str | None = None) -> Flags:
    return {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": 2,
        "speculative_draft_model_path": None if path is None else str(path),
        "disable_speculative_adaptive": True,
    }


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Makes two instances, and asks them; the decode instance computes no prompt."""
    with ExitStack() as stack:

        def served(model: Path | str, call: Flags, prefill: Flags, decode: Flags) -> Any:
            port, flags = free_port(), SERVED | {"model_path": str(model), "apart": True}
            there = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}
            first = stack.enter_context(Engine(**flags, **there, **prefill))
            here = {"disaggregation_mode": "decode"}
            second = stack.enter_context(Engine(**flags, **here, **decode))
            pair = Pair(first, second, port)
            found = [pair.generate(**call), pair.generate(**call)]
            assert pair.counts()[:2] == (2 * len(SAMPLING), 0)
            pair.check_idle()
            return found

        yield served


def one_instance(model: Path | str, call: Flags, flags: Flags) -> list[Any]:
    with Engine(**SERVED, model_path=str(model), **flags) as engine:
        found = engine.generate(**call)
    assert isinstance(found, list)
    return found


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


def accepted(outputs: list[Any]) -> float:
    """The share of the drafts. The first step of an instance that continues has none to verify."""
    told = [output["meta_info"] for output in outputs]
    right = sum(one.get("spec_accept_token_num", 0) for one in told)
    return right / sum(one.get("spec_draft_token_num", 0) for one in told)


NEXTN = drafts("NEXTN")
STANDALONE = drafts("STANDALONE", HOUSE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("speculation", "prefill", "decode"),
    [
        (NEXTN, CHUNKS, {"page_size": 16, "disaggregation_decode_enable_radix_cache": True}),
        pytest.param(NEXTN, {"page_size": 3}, DPA, marks=pytest.mark.slow),
        pytest.param(NEXTN, DPA, {"tp_size": 4}, marks=pytest.mark.slow),
        pytest.param(
            NEXTN | {"disaggregation_transfer_backend": "tcp"},
            {"tp_size": 4},
            {"tp_size": 2, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_drafts_of_the_checkpoints_layer(
    serve: Callable[..., Any], speculation: Flags, prefill: Flags, decode: Flags
) -> None:
    """Without its cache of the prompts 0.45 of them are right."""
    call = {"input_ids": prompts()[:5], "sampling_params": SAMPLING}
    expected = tokens(one_instance(HOUSE, call, {}))
    alone = one_instance(HOUSE, call, NEXTN)
    assert tokens(alone) == expected and accepted(alone) > 0.7
    for found in serve(HOUSE, call, speculation | prefill, speculation | decode):
        assert tokens(found) == expected
        if "speculative_eagle_topk" not in decode:  # most tokens of a tree are on other branches
            assert accepted(found) == pytest.approx(accepted(alone), abs=0.08)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefill", [{}, {"tp_size": 2, "pp_size": 2}, STANDALONE])
def test_what_is_made_of_tokens_is_computed_again(
    serve: Callable[..., Any], prefill: Flags
) -> None:
    """A draft model that is the target itself: all of its drafts are right."""
    call = {"input_ids": prompts()[:5], "sampling_params": SAMPLING}
    expected = tokens(one_instance(HOUSE, call, {}))
    for found in serve(HOUSE, call, prefill, STANDALONE | {"page_size": 8}):
        assert tokens(found) == expected
        greedy = found[::2]
        assert accepted(greedy) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("third", [True, False], ids=["eagle3", "eagle"])
def test_drafts_of_heads(serve: Callable[..., Any], third: bool, tmp_path: Path) -> None:
    asked = [prompted(n, 4 + n).prompt_ids for n in range(5)]
    sampling = [one | {"max_new_tokens": 40, "temperature": 0} for one in SAMPLING]
    call = {"input_ids": asked, "sampling_params": sampling}
    expected = tokens(one_instance(QWEN, call, {}))
    texts = [prompt + ids for prompt, ids in zip(asked, expected, strict=True)]
    trained(third, texts).write(tmp_path)
    speculation = drafts("EAGLE3" if third else "EAGLE", tmp_path)
    alone = one_instance(QWEN, call, speculation)
    assert tokens(alone) == expected and accepted(alone) > 0.3
    for found in serve(QWEN, call, speculation | CHUNKS, speculation | DPA):
        assert tokens(found) == expected
        assert accepted(found) == pytest.approx(accepted(alone), abs=0.1)
