"""Draft heads on ranks in any arrangement: the tokens of one rank without drafts, and as many of
the drafts accepted as on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesaic import Engine
from tests.e2e.test_draft_ranks import arguments
from tests.kernels.triton_cases import GPU
from tests.unit.test_eagle import QWEN, prompted, trained

DPA = "--enable-dp-attention --dp"
THIRD, FIRST, MAPPED = "--speculative-algorithm EAGLE3", "--speculative-algorithm EAGLE", "--map"
# A group is idle at times, as it has fewer requests.
ALWAYS = (f"--tp 2 {DPA} 2 --moe-a2a-backend deepep {THIRD}",)
SLOW = (
    f"--tp 2 {FIRST} {MAPPED}",
    f"--tp 2 --ep 2 {THIRD}",
    f"--tp 4 {DPA} 2 --moe-a2a-backend deepep {THIRD}",
    f"--tp 4 {DPA} 4 --moe-a2a-backend mori {FIRST}",
    f"--tp 2 {DPA} 2 --enable-dp-lm-head {FIRST} {MAPPED}",
    f"--tp 4 {DPA} 2 --moe-dense-tp-size 1 {THIRD}",
    f"--tp 4 --ep 2 --enable-deterministic-inference {FIRST} {MAPPED}",
    f"--tp 2 --dp 2 {THIRD}",
    f"--tp 2 {DPA} 2 --moe-a2a-backend deepep --overlap tbo {THIRD}",
)
# On a GPU sums in other orders are told from errors by having none.
GPU_BASE = "--device cuda --enable-deterministic-inference"
ON_GPU = (
    f"{GPU_BASE} {THIRD}",
    f"{GPU_BASE} --tp 2 {DPA} 2 --moe-a2a-backend deepep {THIRD}",
    f"{GPU_BASE} --tp 2 --ep 2 {FIRST} {MAPPED}",
)
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="there is no GPU")]
LINES = [
    *ALWAYS,
    *(pytest.param(line, marks=pytest.mark.slow) for line in SLOW),
    *(pytest.param(line, marks=NEEDS_GPU) for line in ON_GPU),
]


def answers(line: str) -> tuple[list[list[int]], list[float]]:
    """And the accepted tokens of each step with drafts, of greedy ones."""
    given = f"--model-path {QWEN} --dtype float32 --page-size 4 --skip-tokenizer-init {line}"
    sampling: list[dict[str, Any]] = [
        {"max_new_tokens": 40 - 6 * n, "temperature": 0.6 * (n % 2), "sampling_seed": n}
        for n in range(5)
    ]
    with Engine(**vars(arguments(given))) as engine:
        prompts = [prompted(n, 4 + n).prompt_ids for n in range(5)]
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    assert isinstance(outputs, list)
    lengths = [one["meta_info"].get("spec_accept_length", 0) for one in outputs[::2]]
    return [one["output_ids"] for one in outputs], lengths


Served = tuple[list[list[int]], list[float]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """Answers with heads that have learnt those without drafts; once for each line."""
    folder, made = tmp_path_factory.mktemp("heads"), dict[str, Served]()
    made[""] = answers("")
    texts = [prompted(n, 4 + n).prompt_ids + ids for n, ids in enumerate(made[""][0])]
    words = sorted({token for text in texts for token in text})
    (folder / "hot.json").write_text(json.dumps(words))
    for third in (True, False):
        trained(third, texts).write(folder / f"{third}")

    def served(line: str) -> Served:
        if line not in made:
            made[line] = answers(_with_files(line, folder) if FIRST in line else line)
        return made[line]

    return served


def _with_files(line: str, folder: Path) -> str:
    head = folder / f"{THIRD in line}"
    line = line.replace(MAPPED, f"--speculative-token-map {folder / 'hot.json'}")
    return f"{line} --speculative-draft-model-path {head} --disable-speculative-adaptive"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", LINES)
def test_ranks_with_heads_give_the_tokens_of_one_rank_without(
    line: str, serve: Callable[[str], Served]
) -> None:
    base = GPU_BASE if GPU_BASE in line else ""
    found, lengths = serve(line)
    assert found == serve(base)[0]
    alone = line[line.index("--speculative") :]
    assert lengths == pytest.approx(serve(f"{base} {alone}".strip())[1])
    assert sum(lengths) > 3 * 1.4
