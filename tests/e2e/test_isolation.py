"""What goes wrong in one request stays there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import Engine
from moesaic.core.request import Request
from moesaic.engine.model_runner import ModelRunner
from moesaic.models.tiny import FAMILIES, make_tiny_checkpoint

POISON = 5
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "logit_bias": {POISON: -100}}


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that turns one token into NaN."""
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("poisoned"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def engine(poisoned: Path) -> Iterator[Engine]:
    with Engine(model_path=str(poisoned), max_total_tokens=256, page_size=4) as engine:
        yield engine


def prompts() -> list[list[int]]:
    return [[7 + i, 20, 30 + i, 40] * (3 + i) for i in range(6)]


def ids(outputs: Any) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


def test_numbers_that_are_not_finite_fail_their_request_alone(engine: Engine) -> None:
    alone = [engine.generate(input_ids=prompt, sampling_params=GREEDY) for prompt in prompts()]
    engine.flush_cache()
    bad = [10, 11, 12, 13, POISON, 14, 15, 16, 17]
    for _ in range(3):
        streams = [
            engine.generate(input_ids=p, sampling_params=GREEDY, stream=True) for p in prompts()
        ]
        with pytest.raises(RuntimeError, match="not finite"):
            engine.generate(input_ids=bad, sampling_params=GREEDY)
        with pytest.raises(RuntimeError, match="not finite"):
            score = {"max_new_tokens": 0}
            engine.generate(
                input_ids=bad, sampling_params=score, return_logprob=True, logprob_start_len=0
            )
        assert ids([list(stream)[-1] for stream in streams]) == ids(alone)
    info = engine.get_server_info()
    assert info["pages_used"] == 0 and info["running"] == info["waiting"] == 0
    # The clean first page of the bad prompt must not have been shared, nor any page after it.
    again = engine.generate(input_ids=[*bad[:4], 20, 21], sampling_params=GREEDY)
    assert again["meta_info"]["cached_tokens"] == 0


def test_a_step_that_raises_ends_its_requests_and_no_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(input_ids=prompts()[0], sampling_params=GREEDY)
    step = ModelRunner.step

    def fail_on_99(self: ModelRunner, work: Any) -> Any:
        if any(item.request.prompt_ids[0] == 99 for item in work):
            raise ZeroDivisionError("made up")
        return step(self, work)

    monkeypatch.setattr(ModelRunner, "step", fail_on_99)
    with pytest.raises(RuntimeError, match="made up"):
        engine.generate(input_ids=[99, 1, 2], sampling_params=GREEDY)
    assert (
        engine.generate(input_ids=prompts()[0], sampling_params=GREEDY)["output_ids"]
        == (expected["output_ids"])
    )
    assert engine.get_server_info()["pages_used"] == 0


def test_pages_of_others_leave_no_trace(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come back full of NaN before every use: what was in them must not matter."""
    expected = engine.generate(input_ids=prompts(), sampling_params=GREEDY)
    engine.flush_cache()
    engine._core.runner.cache.keys[:, 1:].fill_(torch.nan)
    engine._core.runner.cache.values[:, 1:].fill_(torch.nan)
    assert ids(engine.generate(input_ids=prompts(), sampling_params=GREEDY)) == ids(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_runs(family: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(family, tmp_path)
    answers = {}
    for dtype in ("float32", "float16"):
        with Engine(model_path=str(folder), dtype=dtype, page_size=4) as engine:
            answers[dtype] = engine.generate(
                input_ids=prompts(),
                sampling_params=GREEDY,
                return_logprob=True,
                logprob_start_len=0,
            )
    for full, half in zip(answers["float32"], answers["float16"], strict=True):
        pairs = zip(
            full["meta_info"]["input_token_logprobs"][1:],
            half["meta_info"]["input_token_logprobs"][1:],
            strict=True,
        )
        assert max(abs(a[0] - b[0]) for a, b in pairs) < 0.15


def test_request_properties() -> None:
    request = Request("r", [1, 2, 3], None, 0, 4, 0)  # type: ignore[arg-type]
    assert not request.is_decoding and request.remaining_tokens == 4
    request.num_computed = 3
    request.token_ids.append(9)
    assert request.is_decoding and request.output_ids == [9] and request.remaining_tokens == 3
