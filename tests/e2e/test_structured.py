"""Structured output from a model that says nothing but noise: whatever it says is valid."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moesaic import Engine, SamplingParams
from moesaic.core.request import FinishReason, Request
from moesaic.engine.frontend.inputs import GenerateInput
from moesaic.engine.runner.matchers import Matchers
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.schedule.request_state import RequestState
from moesaic.engine.text.grammar import Compiler
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import make_tiny_checkpoint
from tests.e2e.schemas import schema_of

# Room for the white space that a model of noise loves.
MODEL = "tiny:qwen3_moe,max_position_embeddings=8192"
EOS = 256
PHONE = r"\+?[0-9]{2,4}( [0-9]{2,3}){1,3}"
SUM = """
# sums of small numbers
root   ::= number (op number)+ "\\n"
op     ::= [-+*]
number ::= [1-9] [0-9]{0,2} | "(" number op number ")"
"""
LIST = 'start: item ("," item){1,3}\nitem: /[a-z]{2,4}/ | "<" NUMBER ">"\nNUMBER: /[0-9]{1,3}/'
SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 10, "maximum": 99},
        "kind": {"enum": ["a", "ß"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["id", "kind", "tags"],
    "additionalProperties": False,
}
MESHES = {
    "attention groups": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
    "pipeline": {"tp_size": 2, "pp_size": 2, "chunked_prefill_size": 16},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=MODEL, page_size=4, max_running_requests=16) as made:
        yield made


def is_sum(text: str) -> bool:
    number = r"([1-9][0-9]{0,2}|\([1-9][0-9]{0,2}[-+*][1-9][0-9]{0,2}\))"
    while (shorter := re.sub(rf"\({number}[-+*]{number}\)", "1", text)) != text:
        text = shorter
    return re.fullmatch(rf"{number}([-+*]{number})+\n", text) is not None


def calls() -> list[dict[str, Any]]:
    """Of every kind, greedy and not, with everything else that may be asked of the sampler."""
    common = {"max_new_tokens": 300}
    return [
        {"regex": PHONE, "seed": 1, **common},
        {"regex": f"^{PHONE}$", "temperature": 0, **common},
        {"regex": PHONE, "seed": 2, "top_k": 3, "presence_penalty": 1.5, **common},
        {"regex": PHONE, "seed": 3, "top_p": 0.5, "repetition_penalty": 1.5, **common},
        {"ebnf": SUM, "seed": 4, **common},
        {"ebnf": SUM, "seed": 5, "temperature": 0.5, "min_p": 0.1, **common},
        {"lark": LIST, "seed": 6, "logit_bias": {5: 50.0, EOS: -50.0}, **common},
        {"json_schema": SCHEMA, "seed": 7, **common},
    ]


def check(call: dict[str, Any], output: dict[str, Any]) -> None:
    text, info = output["text"], output["meta_info"]
    assert info["finish_reason"] == {"type": "stop", "matched": EOS}
    assert output["output_ids"][-1] == EOS and EOS not in output["output_ids"][:-1]
    assert "<|" not in text
    if "regex" in call:
        assert re.fullmatch(PHONE, text)
    elif "ebnf" in call:
        assert is_sum(text), text
    elif "lark" in call:
        item = "([a-z]{2,4}|<[0-9]{1,3}>)"
        assert re.fullmatch(f"{item}(,{item}){{1,3}}", text)
    else:
        validate(call["json_schema"], output)


def validate(schema: dict[str, Any], output: dict[str, Any]) -> None:
    assert output["meta_info"]["finish_reason"]["type"] == "stop"
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    validator.validate(json.loads(output["text"]))


def answers(engine: Engine, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = engine.generate([f"{n} Mosaic" for n in range(len(given))], list(given))
    assert isinstance(found, list)
    return found


def ids(outputs: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [output["output_ids"] for output in outputs]


def test_every_kind_alone_and_together(engine: Engine) -> None:
    given = calls()
    together = answers(engine, given)
    for call, output in zip(given, together, strict=True):
        check(call, output)
    assert ids(answers(engine, given)) == ids(together)  # the same seeds, the same answers
    alone = [engine.generate(f"{n} Mosaic", call) for n, call in enumerate(given)]
    assert ids(alone) == ids(together)


def test_beside_requests_without_a_grammar(engine: Engine) -> None:
    free = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
    mixed = [call for pair in zip(calls(), [free] * 8, strict=True) for call in pair]
    found = answers(engine, mixed)
    for call, output in zip(calls(), found[::2], strict=True):
        check(call, output)
    for number, output in enumerate(found[1::2]):
        expected = engine.generate(f"{2 * number + 1} Mosaic", free)
        assert output["output_ids"] == expected["output_ids"]


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    call = {"regex": "[ab]{4}", "temperature": 0}
    found = engine.generate("Mosaic", call, return_logprob=True)
    ids_so_far = engine.tokenizer.encode("Mosaic") if engine.tokenizer else []
    scored = engine.generate(
        input_ids=ids_so_far + found["output_ids"],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(ids_so_far) - 1,
    )
    expected = [value for value, _, _ in scored["meta_info"]["input_token_logprobs"][1:]]
    values = [value for value, _, _ in found["meta_info"]["output_token_logprobs"]]
    assert values == pytest.approx(expected, abs=1e-4) and len(values) == 5


def test_it_ends_by_length_as_always_and_by_stop_strings(engine: Engine) -> None:
    cut = engine.generate("Mosaic", {"regex": "[0-9]{50}", "max_new_tokens": 20})
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    assert re.fullmatch("[0-9]{20}", cut["text"])
    stopped = engine.generate("Mosaic", {"regex": "[0-9]{4}-[0-9]{50}", "stop": ["-"]})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "-"}
    assert re.fullmatch("[0-9]{4}", stopped["text"])


def test_streams_grow(engine: Engine) -> None:
    pieces = list(engine.generate("Mosaic", {"regex": PHONE, "seed": 9}, stream=True))
    texts = [piece["text"] for piece in pieces]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert re.fullmatch(PHONE, texts[-1])


def test_a_refusal_submits_nothing_and_harms_nobody(engine: Engine) -> None:
    steps = engine.get_server_info()["steps"]
    good = {"regex": "a"}
    with pytest.raises(ValueError, match=r"prompt 1: json_schema .*nothing"):
        engine.generate(["a", "b"], [good, {"json_schema": {"type": "nothing"}}])
    assert engine.get_server_info()["steps"] == steps


def test_checking_does_not_hold_the_event_loop(engine: Engine) -> None:
    """The checking process is kept busy, and the loop goes on meanwhile."""

    async def main() -> tuple[int, str]:
        call = GenerateInput(
            "Mosaic", sampling_params={"regex": "[x-z]{7}", "seed": 1}, stream=True
        )
        turns = 0

        async def last() -> str:
            return [piece async for piece in engine.stream(call)][-1].progress.text

        release = threading.Event()
        engine.limits.grammars.turns.submit("operator", release.wait)
        task = asyncio.create_task(last())
        for _ in range(50):
            await asyncio.sleep(0.002)
            turns += not task.done()
        release.set()
        return turns, await task

    turns, text = asyncio.run(main())
    assert turns == 50 and re.fullmatch("[x-z]{7}", text)


def test_retracted_requests_go_on_where_they_were(engine: Engine) -> None:
    """With too few pages for all, requests lose theirs and are resumed."""
    given = [{"regex": "[a-f]{40}([0-9]{30})", "seed": n, "max_new_tokens": 90} for n in range(6)]
    expected = answers(engine, given)
    flags = {"page_size": 4, "max_total_tokens": 180, "disable_radix_cache": True}
    with Engine(model_path=MODEL, schedule_conservativeness=0.1, **flags) as small:
        found = answers(small, given)
        assert small.get_server_info()["retractions"] > 0
        free = {"max_new_tokens": 1, "ignore_eos": True}
        small.generate("Mosaic", free)
        assert len(small._core.runner.matchers._matchers) == 0  # type: ignore[union-attr]
    assert ids(found) == ids(expected)


class HeldCompiler:
    """A compiler that waits for an event before it compiles; it counts what it is asked for."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler, self.release, self.asked = compiler, threading.Event(), 0

    def make(self) -> Compiler:
        self.asked += 1
        assert self.release.wait(300)
        return self.compiler


@pytest.mark.parametrize("length", [7, 8], ids=["within a page", "at its end"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_others_go_on_while_a_grammar_is_compiled(
    engine: Engine, asynchronous: bool, length: int
) -> None:
    """Of requests that share a prompt of two pages of 4 tokens, one waits for its grammar, and the
    event is only set once another has got all its tokens."""
    prompt = list(range(1, length + 1))
    free = {"max_new_tokens": 20, "ignore_eos": True, "temperature": 0}
    given = {"regex": PHONE, "temperature": 0, "max_new_tokens": 300}
    expected = engine.generate(input_ids=[prompt, prompt], sampling_params=[given, free])
    args = engine.server_args
    runner = ModelRunner(args, asynchronous=asynchronous)
    held = HeldCompiler(runner.matchers._compiler)
    runner.matchers = Matchers(held.make, 32, patience=0.0)
    core = LocalCore(args, runner)
    requests = []
    for number, params in enumerate([given, free, given]):
        sampling = SamplingParams(**params)
        made = Request("r", prompt, sampling, 0, sampling.max_new_tokens, number)
        made.eos_ids = frozenset((EOS,))
        made.return_logprob = number == 2
        requests.append(made)
        core.add(RequestState(made, None, lambda progress: None))
    first, other, aborted = requests
    while other.finish_reason is None:
        core.step()
    assert held.asked == 1 and core.planner.num_steps >= 20
    assert first.output_ids == aborted.output_ids == []
    assert first.finish_reason is None and first.is_decoding
    assert core.planner.metrics.counts.prompt_tokens <= 3 * length
    core.abort(2)
    held.release.set()
    while core.has_work:
        core.step()
    assert [first.output_ids, other.output_ids] == ids(expected)
    assert first.finish_reason == FinishReason("stop", matched=EOS)
    assert aborted.output_ids == [] and core.planner.kv.num_used == 0


def test_without_end_tokens_it_ends_by_itself(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        file = folder / name
        content = json.loads(file.read_text())
        del content[key]
        file.write_text(json.dumps(content))
    with Engine(model_path=str(folder)) as endless:
        found = endless.generate("Mosaic", {"regex": "[ab]{5}", "max_new_tokens": 50})
    assert found["meta_info"]["finish_reason"] == {"type": "stop"}
    assert re.fullmatch("[ab]{5}", found["text"]) and len(found["output_ids"]) == 5


def test_without_llguidance_all_else_works(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="llguidance is not installed"):
        engine.generate("Mosaic", {"regex": "never seen"})
    plain = engine.generate("Mosaic", {"max_new_tokens": 3, "ignore_eos": True})
    assert len(plain["output_ids"]) == 3


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mesh", ["pipeline", pytest.param("attention groups", marks=pytest.mark.slow)]
)
def test_ranks_say_what_one_rank_says(engine: Engine, mesh: str) -> None:
    # One that is compiled for so long that steps go on without it; its numbers have no end.
    slow = {"type": "integer", "multipleOf": 9973}
    given = [*calls(), {"json_schema": slow, "seed": 8, "max_new_tokens": 8}]
    expected = answers(engine, given)
    with Engine(model_path=MODEL, page_size=4, **MESHES[mesh]) as ranks:
        found = answers(ranks, given)
        again = answers(ranks, given)
        broken = [{"regex": PHONE, "seed": 1}, {"regex": "a{"}]
        with pytest.raises(ValueError, match="prompt 1: regex"):
            answers(ranks, broken)
    for call, output in zip(given[:-1], found[:-1], strict=True):
        check(call, output)
    assert ids(found) == ids(again) == ids(expected)


def run_schemas(engine: Engine, numbers: range) -> None:
    given = [
        {"json_schema": schema_of(n), "seed": n, "temperature": 1.0, "max_new_tokens": 8000}
        for n in numbers
    ]
    outputs = answers(engine, given)
    for call, output in zip(given, outputs, strict=True):
        validate(call["json_schema"], output)


def test_some_schemas(engine: Engine) -> None:
    run_schemas(engine, range(6))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_schemas(engine: Engine) -> None:
    run_schemas(engine, range(200))


def test_the_schemas_have_everything() -> None:
    """What the two hundred are said to hold, counted."""
    text = " ".join(json.dumps(schema_of(n)) for n in range(200))
    for keyword in (
        "anyOf oneOf enum const $ref $defs pattern format minItems maxItems prefixItems minimum "
        "exclusiveMinimum multipleOf additionalProperties patternProperties maxProperties minLength"
    ).split():
        assert text.count(f'"{keyword}"') >= 10, keyword
    for schema in map(schema_of, range(0, 200, 10)):
        Draft202012Validator.check_schema(schema)
