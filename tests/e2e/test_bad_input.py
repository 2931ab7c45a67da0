"""Bad input: an error that names the value and the fix, and service goes on for everybody else."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic import Engine
from tests.oracle import CASES, Oracle, build, load, make_prompts

GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
CONTEXT = 256
CACHE = 192
GOOD_PROMPT = [5, 17, 33, 101, 250]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CASES["mixtral"], tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    """An engine sets their number for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_engine(folder: Path, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_total_tokens": CACHE,
        "context_length": CONTEXT,
        "num_threads": 2,
    }
    return Engine(**(settings | changes))


@dataclass
class Traffic:
    """A neighbour who asks the same good question over and over while others err."""

    engine: Engine
    outputs: list[list[int]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stop.is_set():
            try:
                answer = self.engine.generate(input_ids=GOOD_PROMPT, sampling_params=GREEDY)
                self.outputs.append(answer["output_ids"])
            except Exception as error:
                self.errors.append(error)
                return

    def wait_for_another(self) -> None:
        """Two more answers, so that one of them began after now."""
        wanted = len(self.outputs) + 2
        while len(self.outputs) < wanted and not self.errors:
            self.stop.wait(0.005)


@pytest.fixture(scope="module")
def traffic(folder: Path) -> Iterator[Traffic]:
    with make_engine(folder) as engine:
        traffic = Traffic(engine)
        thread = threading.Thread(target=traffic.run)
        thread.start()
        yield traffic
        traffic.stop.set()
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert traffic.errors == []
    oracle = Oracle(load(folder))
    assert len(traffic.outputs) > 10
    assert all(output == traffic.outputs[0] for output in traffic.outputs)
    assert len(traffic.outputs[0]) == 12
    assert oracle.greedy_divergence(GOOD_PROMPT, traffic.outputs[0]) is None


def sampling(**values: Any) -> dict[str, Any]:
    return {"input_ids": [3, 4], "sampling_params": values}


# What is asked, and what the message must contain: the value, and what to do.
BAD_REQUESTS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("longer_than_context", {"input_ids": [7] * 300}, ["300", "256", "context-length"]),
    ("as_long_as_context", {"input_ids": [7] * 256}, ["256", "context"]),
    ("longer_than_the_cache", {"input_ids": [7] * 200}, ["200", "192", "max-total-tokens"]),
    ("empty_prompt", {"input_ids": []}, ["empty"]),
    ("empty_prompt_in_a_list", {"input_ids": [[5], []]}, ["prompt 1", "empty"]),
    ("no_prompt", {}, ["prompt", "input_ids"]),
    ("both_prompts", {"prompt": "a", "input_ids": [1]}, ["prompt", "input_ids"]),
    ("text_without_tokenizer", {"prompt": "hello"}, ["skip_tokenizer_init", "input_ids"]),
    ("token_too_large", {"input_ids": [1, 320]}, ["320", "319"]),
    ("token_negative", {"input_ids": [1, -1]}, ["-1", "319"]),
    ("token_not_an_integer", {"input_ids": [1, 2.5]}, ["2.5", "integer"]),
    ("negative_max_new_tokens", sampling(max_new_tokens=-1), ["max_new_tokens", "-1", "0 or more"]),
    ("min_above_max", sampling(min_new_tokens=9, max_new_tokens=4), ["min_new_tokens", "9", "4"]),
    ("negative_temperature", sampling(temperature=-0.5), ["temperature", "-0.5", "0"]),
    ("temperature_nan", sampling(temperature=float("nan")), ["temperature", "nan", "finite"]),
    ("temperature_text", sampling(temperature="hot"), ["temperature", "hot", "number"]),
    ("top_p_zero", sampling(top_p=0.0), ["top_p", "0.0", "(0, 1]"]),
    ("top_p_above_one", sampling(top_p=1.5), ["top_p", "1.5", "(0, 1]"]),
    ("top_k_zero", sampling(top_k=0), ["top_k", "0", "-1"]),
    ("min_p_above_one", sampling(min_p=1.5), ["min_p", "1.5", "[0, 1]"]),
    ("penalty_out_of_range", sampling(presence_penalty=3), ["presence_penalty", "3", "[-2, 2]"]),
    ("repetition_penalty_zero", sampling(repetition_penalty=0), ["repetition_penalty", "0"]),
    ("no_samples", sampling(n=0), ["n=0", "1 or more"]),
    ("unknown_sampling_field", sampling(temprature=1), ["temprature", "temperature"]),
    ("stop_id_out_of_range", sampling(stop_token_ids=[999]), ["stop_token_ids", "999", "320"]),
    ("bias_out_of_range", sampling(logit_bias={999: 1.0}), ["logit_bias", "999", "320"]),
    ("stop_without_tokenizer", sampling(stop=["x"]), ["stop", "stop_token_ids"]),
    (
        "too_few_sampling_params",
        {"input_ids": [[1], [2]], "sampling_params": [GREEDY]},
        ["sampling_params", "1", "2"],
    ),
    (
        "logprob_start_past_the_prompt",
        {"input_ids": [1, 2], "return_logprob": True, "logprob_start_len": 5},
        ["logprob_start_len", "5", "2"],
    ),
    (
        "too_many_top_logprobs",
        {"input_ids": [1, 2], "return_logprob": True, "top_logprobs_num": 500},
        ["top_logprobs_num", "500", "320"],
    ),
]


@pytest.mark.parametrize(
    ("request_", "words"), [bad[1:] for bad in BAD_REQUESTS], ids=[bad[0] for bad in BAD_REQUESTS]
)
def test_bad_request(traffic: Traffic, request_: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        traffic.engine.generate(**request_)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    traffic.wait_for_another()
    assert traffic.errors == []


def test_one_bad_prompt_starts_none_of_its_list(traffic: Traffic) -> None:
    with pytest.raises(ValueError, match="prompt 2: token id 320"):
        traffic.engine.generate(input_ids=[[5], [6], [320]], sampling_params=GREEDY)
    traffic.stop.wait(0.05)
    assert traffic.engine.get_server_info()["running"] <= 1


def test_a_bad_request_while_others_wait_for_memory(folder: Path) -> None:
    """Good requests that overfill the cache all end well, whatever is refused meanwhile."""
    prompts = make_prompts(320, lengths=[100, 120, 90, 110, 64, 80])
    with make_engine(folder, disable_radix_cache=True) as engine:
        stream = engine.generate(
            input_ids=prompts, sampling_params=GREEDY | {"max_new_tokens": 60}, stream=True
        )
        final: dict[int, list[int]] = {}
        for piece in stream:
            final[piece["index"]] = piece["output_ids"]
            with pytest.raises(ValueError, match="token id 320"):
                engine.generate(input_ids=[320])
    oracle = Oracle(load(folder))
    for index, prompt in enumerate(prompts):
        assert len(final[index]) == 60
        assert oracle.greedy_divergence(prompt, final[index]) is None


BAD_SETTINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "unknown_keyword",
        {"max_runing_requests": 4},
        ["max_runing_requests", "max_running_requests"],
    ),
    ("memory_above_one", {"mem_fraction_static": 1.5}, ["mem-fraction-static", "1.5"]),
    ("memory_zero", {"mem_fraction_static": 0.0}, ["mem-fraction-static", "0"]),
    (
        "memory_below_the_weights",
        {"mem_fraction_static": 1e-6, "max_total_tokens": None},
        ["mem-fraction-static", "1e-06", "weights", "give more than"],
    ),
    ("cache_below_a_page", {"max_total_tokens": 8, "page_size": 16}, ["8", "16", "page-size"]),
    ("page_size_zero", {"page_size": 0}, ["page-size", "0"]),
    ("unknown_dtype", {"dtype": "float17"}, ["dtype", "float17", "bfloat16"]),
    ("no_running_requests", {"max_running_requests": 0}, ["max-running-requests", "0"]),
    ("context_negative", {"context_length": -5}, ["context-length", "-5"]),
    ("context_beyond_the_model", {"context_length": 100000}, ["100000", "512"]),
]


@pytest.mark.parametrize(
    ("settings", "words"), [bad[1:] for bad in BAD_SETTINGS], ids=[bad[0] for bad in BAD_SETTINGS]
)
def test_bad_setting(folder: Path, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make_engine(folder, **settings)
    message = str(caught.value).replace("_", "-")
    assert [word for word in words if word.replace("_", "-") not in message] == []


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def corrupt_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(data)


def empty_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def break_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')


def name_absent_shard(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00007-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def mistype(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int32)


EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
GATE = "model.layers.2.block_sparse_moe.gate.weight"
ARCHITECTURES = ["MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"]
ARCHITECTURES += ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"]

BAD_FOLDERS: list[tuple[str, Callable[[Path], Any], list[str]]] = [
    ("truncated", truncate, ["model.safetensors", "again"]),
    ("corrupt_header", corrupt_header, ["model.safetensors", "again"]),
    ("empty_file", empty_file, ["model.safetensors", "again"]),
    ("no_weights", lambda f: (f / "model.safetensors").unlink(), ["safetensors", "convert"]),
    ("broken_index", break_index, ["model.safetensors.index.json"]),
    ("absent_shard", name_absent_shard, ["model-00007-of-00009.safetensors"]),
    ("missing_tensor", lambda f: edit_tensors(f, lambda t: t.pop(EXPERT)), [EXPERT, "missing"]),
    (
        "extra_tensor",
        lambda f: edit_tensors(f, lambda t: t.update({"model.extra.weight": torch.ones(2)})),
        ["model.extra.weight", "not in the model"],
    ),
    (
        "mis_shaped_tensor",
        lambda f: edit_tensors(f, lambda t: t.update({GATE: torch.ones(8, 63)})),
        [GATE, "[8, 63]", "[8, 64]"],
    ),
    ("mistyped_tensor", lambda f: edit_tensors(f, mistype), ["lm_head.weight", "I32"]),
    (
        "more_experts_than_weights",
        lambda f: edit_config(f, num_local_experts=9),
        ["num_local_experts is 9", "have 8"],
    ),
    (
        "unknown_architecture",
        lambda f: edit_config(f, architectures=["LlamaForCausalLM"], model_type="llama"),
        ["LlamaForCausalLM", *ARCHITECTURES],
    ),
    ("missing_config", lambda f: (f / "config.json").unlink(), ["config.json"]),
    ("config_not_json", lambda f: (f / "config.json").write_text("{"), ["config.json"]),
    ("config_without_field", lambda f: edit_config(f, hidden_size=None), ["hidden_size"]),
    (
        "unknown_rope",
        lambda f: edit_config(f, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ["spiral"],
    ),
    ("top_k_above_experts", lambda f: edit_config(f, num_experts_per_tok=9), ["9", "8"]),
    ("unknown_activation", lambda f: edit_config(f, hidden_act="relu7"), ["relu7"]),
]


@pytest.mark.parametrize(
    ("spoil", "words"), [bad[1:] for bad in BAD_FOLDERS], ids=[bad[0] for bad in BAD_FOLDERS]
)
def test_bad_folder(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: list[str]
) -> None:
    bad = tmp_path / "model"
    shutil.copytree(folder, bad)
    spoil(bad)
    with pytest.raises(ValueError) as caught:
        make_engine(bad)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError), match="nowhere"):
        make_engine(tmp_path / "nowhere")
