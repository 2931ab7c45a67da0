"""The files of an untrusted checkpoint: any value of a field is served, or a ValueError names the
field and the value before anything that large is allocated."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import Engine
from moesaic.config import ServerArgs
from moesaic.engine.setup.memory_plan import context_length, shape_only_model
from moesaic.engine.text.tokenizer import Tokenizer
from moesaic.models.checkpoint import INDEX, Checkpoint, check_folder
from moesaic.models.config import MAX_VALUES, RawConfig, checkpoint_dtype
from moesaic.models.folder import ModelEosTokens, checked
from moesaic.models.schemes import detect_scheme
from moesaic.models.shapes import known, shape_config
from moesaic.models.tiny import _COMMON, FAMILIES, make_tiny_checkpoint, materialise
from moesaic.server.openai.setup import _defaults

WRONG: tuple[Any, ...] = (
    *("x", -1, 0, 1.5, 10**9, 10**400, 1e300, True),
    *([], [1], [None], {}, {"a": 1}, {"content": []}),
)
ROPE = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "attention_factor": 1.0,
    "truncate": True,
}
OTHERS = {
    "rope_scaling": ROPE,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "text_config": {"eos_token_id": 3},
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
    "use_sliding_window": True,
    "sliding_window": 32,
    "attention_bias": False,
}
QUANTISED: tuple[dict[str, Any], ...] = (
    {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "dynamic": {"-:a": {}},
    },
    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32},
                "input_activations": None,
            }
        },
    },
)


def changed(base: dict[str, Any], keys: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yields copies of `base` with wrong values for one field."""
    for value in WRONG:
        found = copy.deepcopy(base)
        inner = found
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        yield found


def fields(content: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in pairs:
        yield (*before, key)
        if isinstance(value, dict | list):
            yield from fields(value, (*before, key))


def outline(folder: Path) -> None:
    """Makes everything that depends on config.json alone."""
    raw = RawConfig.read(folder)
    check_folder(str(folder), has_tensors=False)
    detect_scheme(raw, folder)
    context_length(ServerArgs.from_kwargs(model_path=str(folder)), raw)
    shape_only_model(raw, checkpoint_dtype(raw), None)
    checked(raw.data, ModelEosTokens, raw.source)


def configs() -> Iterator[tuple[str, dict[str, Any], list[tuple[Any, ...]]]]:
    """Yields each config with the fields that no earlier config has."""
    seen = set[tuple[Any, ...]]()
    for name, own in FAMILIES.items():
        base = {**_COMMON, **OTHERS, **own, "model_type": name}
        new = [keys for keys in fields(base) if keys not in seen]
        seen.update(new)
        yield name, base, new
    for declared in QUANTISED:
        base = {**_COMMON, **FAMILIES["qwen3_moe"], "quantization_config": declared}
        new = [keys for keys in fields(base) if keys[0] == "quantization_config"]
        yield declared["quant_method"], base, new


@pytest.mark.parametrize(("base", "keys"), [pytest.param(*c[1:], id=c[0]) for c in configs()])
def test_config_json(tmp_path: Path, base: dict[str, Any], keys: list[tuple[Any, ...]]) -> None:
    file, refused = tmp_path / "config.json", 0
    for field in keys:
        for config in changed(base, field):
            file.write_text(json.dumps(config))
            try:
                outline(tmp_path)
            except ValueError as error:
                refused += 1
                assert str(file) in str(error) and len(str(error)) < 600
    assert refused > len(keys)
    file.write_text(json.dumps(base))
    outline(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"))
    entry = {"content": "<|end|>", "lstrip": False, "special": True}
    template = [{"name": "default", "template": "{{ messages }}"}]
    for name, content in {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"256": entry},
            "eos_token": entry,
            "bos_token": None,
            "image_token": entry,
            "add_bos_token": False,
            "add_eos_token": False,
            "additional_special_tokens": ["<|turn|>"],
            "extra_special_tokens": {"turn_token": entry},
            "chat_template": template,
        },
        "special_tokens_map.json": {"eos_token": entry, "additional_special_tokens": [entry]},
        "generation_config.json": {
            "eos_token_id": [256],
            "temperature": 1.0,
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "do_sample": True,
        },
        INDEX: {"weight_map": {"model.norm.weight": "model.safetensors"}},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "name",
    ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", INDEX),
)
def test_other_files(folder: Path, name: str) -> None:
    file = folder / name
    good = file.read_text()

    def read() -> None:
        Tokenizer.from_folder(folder)
        _defaults(folder / "generation_config.json")
        Checkpoint(folder).__exit__()

    refused = set[Any]()
    try:
        read()
        for keys in fields(json.loads(good)):
            for content in changed(json.loads(good), keys):
                file.write_text(json.dumps(content))
                try:
                    read()
                except ValueError as error:
                    refused.add(keys[0])
                    named = name if name != INDEX else str(folder)  # or a file that the index names
                    assert named in str(error) and len(str(error)) < 400
        for text in ("", "[]", "5", "{", '{"a": NaN}', "[" * 100_000, '{"a": 1' + "0" * 5000 + "}"):
            file.write_text(text)
            with pytest.raises(ValueError, match=re.escape(name)):
                read()
    finally:
        file.write_text(good)
    assert refused == set(json.loads(good))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": [1]},
            r"added_tokens_decoder is \[1\]: Expected object \| null, got array: fix the file",
        ),
        (
            "config.json",
            {"eos_token_id": {"a": 1}},
            r"eos_token_id is {'a': 1}: Expected int \| array \| null, got object: fix the file",
        ),
    ],
)
def test_the_field_and_its_value_are_named(
    folder: Path, name: str, content: dict[str, Any], words: str
) -> None:
    file = folder / name
    good = file.read_text()
    try:
        file.write_text(json.dumps({**json.loads(good), **content}))
        with pytest.raises(ValueError, match=f"{re.escape(str(file))}: {words}"):
            Tokenizer.from_folder(folder)
    finally:
        file.write_text(good)


@pytest.mark.parametrize("content", ["{}", '{"model": {"type": "BPE", "vocab": [], "merges": 5}}'])
def test_tokenizer_json(folder: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja cannot be read as text in UTF-8"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny:qwen3_moe,num_hidden_layers=1000000000", "num_hidden_layers must be .* to 1024"),
        ("tiny:mixtral,num_local_experts=1000000000", "num_local_experts must be .* to 4096"),
        ("tiny:qwen3_moe,num_experts=4096,num_hidden_layers=1024", "4194304 experts: no more than"),
        (
            "tiny:qwen3_moe,vocab_size=1000000000",
            "vocab_size must be an integer from 1 to 16777216",
        ),
        ("tiny:qwen3_moe,vocab_size=16777216,hidden_size=1024", "smaller sizes, or take a shape"),
        (
            "shape:qwen3-30b-a3b,num_hidden_layers=1000000000",
            "num_hidden_layers must be .* to 1024",
        ),
        ("shape:qwen3-30b-a3b,max_position_embeddings=16777217", "embeddings must be .* 16777216"),
        ("tiny:mixtral,max_position_embeddings=16777216,head_dim=1024", "GiB and this"),
    ],
)
def test_sizes_that_no_model_has(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(model_path=name, load_format="dummy" if "shape" in name else "auto", num_threads=1)


def test_known_models_are_far_from_the_limits() -> None:
    for name in known():
        config = RawConfig(shape_config(name), name)
        for key, most in MAX_VALUES.items():
            if config.has(key):
                assert 2 * config.integer(key) <= most
        assert config.num_experts() > 0


@pytest.mark.parametrize("indexed", [False, True])
def test_more_layers_or_experts_than_there_are_tensors_of(tmp_path: Path, indexed: bool) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if indexed:
        with Checkpoint(folder) as checkpoint:
            index = {"weight_map": checkpoint.location}
        (folder / INDEX).write_text(json.dumps(index))
    check_folder(str(folder), has_tensors=True)
    for field, asked, held in (("num_hidden_layers", 1000, 2), ("num_experts", 4000, 8)):
        (folder / "config.json").write_text(json.dumps({**config, field: asked}))
        words = f"{field} is {asked}, but the tensors in .* have {held}: fix it"
        with pytest.raises(ValueError, match=words):
            Engine(model_path=str(folder), num_threads=1)
    assert materialise(str(folder)) == str(folder)


def test_numbers_that_begin_anywhere(tmp_path: Path) -> None:
    """Writers sort tensors by the size of their numbers; the format does not demand it."""
    parts = {
        "a": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "b": torch.tensor([[1.5, -2.0], [0.25, 8.0]]),
        "c": torch.tensor(7.5, dtype=torch.bfloat16),
        "d": torch.empty(0, 4),
    }
    names = {"U8": torch.uint8, "F32": torch.float32, "BF16": torch.bfloat16}
    header, data = dict[str, Any](), b""
    for name, tensor in parts.items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        dtype = next(key for key, value in names.items() if value == tensor.dtype)
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps({"__metadata__": {"dtype": "pt"}, **header}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.location) == set(parts)
        for name, tensor in parts.items():
            assert checkpoint.shape(name) == tensor.shape
            assert torch.equal(checkpoint.read(name), tensor)
        assert torch.equal(checkpoint.read("b", 1, slice(0, 1)), parts["b"][1, :1])
        assert torch.equal(checkpoint.read("b", range(2), range(1, 2)), parts["b"][:, 1:])
        assert checkpoint.is_empty("d") and not checkpoint.is_empty("c")
