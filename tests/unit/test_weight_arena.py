"""Weights in memory that outlives a rank: two runners of one process, one after the other, are
a rank and the one that is started in its place. E experts · H hidden."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from moesaic.comm.network.handshake import Identity
from moesaic.comm.network.store import LocalStore
from moesaic.comm.windows.lasting_memory import LastingMemory
from moesaic.config import ServerArgs, resolve
from moesaic.config.roles import elastic_problems
from moesaic.engine.elastic.weight_arena import (
    PAGE,
    ArenaLayout,
    ArenaMemory,
    WeightArena,
    copy_expert,
    fingerprint,
)
from moesaic.engine.runner.model_runner import ModelRunner
from moesaic.engine.setup.rank_context import RankContext
from moesaic.engine.worker.local_core import LocalCore
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import EMPTY, Placement
from moesaic.moe.slot_records import TABLE_BYTES, checksum
from tests.unit.test_drafts import requests, serve
from tests.unit.test_expert_store import EXPERTS, FORMATS, make_layer, routed, tokens

SIZES = (0, 1, 7, 8, 9, 4095, 8 * 4096, 8 * 4096 + 5, TABLE_BYTES - 1, 2 * TABLE_BYTES + 11)


def some_bytes(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size)).byte()


def test_the_checksum_of_the_docstring() -> None:
    assert checksum([torch.tensor([5, 6, 7])]) == 58


@pytest.mark.parametrize("size", SIZES)
def test_a_checksum_changes_with_every_bit(size: int) -> None:
    data = some_bytes(size)
    known = checksum([data])
    for byte in {0, size // 2, size - 1} if size else ():
        for bit in range(8):
            data[byte] ^= 1 << bit
            assert checksum([data]) != known, (byte, bit)
            data[byte] ^= 1 << bit
    assert checksum([data]) == known


def test_a_checksum_notices_what_has_changed_places() -> None:
    data = some_bytes(2 * TABLE_BYTES + 64)
    words = data.view(torch.int64)
    known = checksum([data])
    for one, other in ((0, 1), (5, 4100), (0, TABLE_BYTES // 8)):
        words[[one, other]] = words[[other, one]]
        assert checksum([data]) != known
        words[[one, other]] = words[[other, one]]
    assert checksum([data[:64], data[64:128]]) != checksum([data[64:128], data[:64]])


def layers(weights: str, fill: bool) -> nn.ModuleList:
    placement = Placement(6, (0, 1, 2, 3, 4, 5, 0, 1))
    made = [make_layer(weights, placement) for _ in range(2)]
    for layer in made if fill else ():
        EXPERTS.fill(layer)
    return nn.ModuleList([*made, nn.Linear(5, 3)])


def arena_of(module: nn.Module, memory: Tensor | None = None, **facts: Any) -> WeightArena:
    layout = ArenaLayout(module)
    if memory is None:
        memory = torch.zeros(layout.length, dtype=torch.uint8)
    assert len(memory) == layout.length
    return WeightArena(memory, layout, fingerprint(layout, facts))


def first(module: nn.ModuleList) -> FusedMoE:
    layer = module[0]
    assert isinstance(layer, FusedMoE)
    return layer


def filled(weights: str) -> tuple[nn.ModuleList, WeightArena]:
    module = layers(weights, fill=False)
    arena = arena_of(module)
    assert not arena.found and not arena.differs
    for layer in arena.layout.layers:
        EXPERTS.fill(layer)
    arena.seal()
    return module, arena


@pytest.mark.parametrize("weights", FORMATS)
def test_a_successor_maps_the_same_weights(weights: str) -> None:
    module, arena = filled(weights)
    x_TH, logits_TE = tokens(9)
    wanted = first(module)(x_TH, routed(first(module), logits_TE))
    other = layers(weights, fill=True)  # whose own memory is dropped
    for layer in other[:2]:
        layer.store.write(0, layer.store.read(1))
    found = arena_of(other, arena.memory)
    assert found.found and found.experts == [(0, 1, 2, 3, 4, 5, 0, 1)] * 2
    assert found.damage().tensors == [] and found.damage().slots == []
    assert torch.equal(first(other)(x_TH, routed(first(other), logits_TE)), wanted)
    assert torch.equal(other[2].weight, module[2].weight)
    # Its parameters are the memory: nothing is there twice.
    start, end = arena.memory.data_ptr(), arena.memory.data_ptr() + len(arena.memory)
    held = [*other.parameters(), *(one for layer in other[:2] for one in layer.store.stacked)]
    assert all(start + PAGE <= one.data_ptr() <= end - one.nbytes for one in held)


@pytest.mark.parametrize("weights", ["fp32", "fp8_block", "int8_w8a16", "nvfp4"])
def test_a_flipped_bit_is_found(weights: str) -> None:
    module, arena = filled(weights)
    layer = first(module)
    for number, tensor in enumerate(layer.store.tensors(3)):
        data = tensor.reshape(-1).view(torch.uint8)
        data[len(data) // 2] ^= 16
        assert arena.damage().slots == [(layer, 3)], number
        data[len(data) // 2] ^= 16
    module[2].bias.data.view(torch.uint8)[1] ^= 1
    assert arena.damage().tensors == ["2.bias"] and arena.damage().slots == []


def interrupt(_: WeightArena) -> None:
    raise InterruptedError


def test_another_model_flags_or_a_half_loaded_one_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, arena = filled("fp32")
    assert arena_of(layers("fp32", False), arena.memory).found
    other = arena_of(layers("fp32", False), arena.memory, flags="others")
    assert other.differs and not other.found
    # The process ends before it has loaded.
    assert arena_of(layers("fp32", False), arena.memory, flags="others").differs
    # Or before it has begun to.
    _, arena = filled("fp32")
    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(WeightArena, "_use", interrupt)
        arena_of(layers("fp32", False), arena.memory, flags="others")
    assert arena_of(layers("fp32", False), arena.memory, flags="others").differs
    again = arena_of(layers("fp32", False), arena.memory, flags="others")
    again.seal()
    assert arena_of(layers("fp32", False), arena.memory, flags="others").found


def test_slots_that_are_written_are_unknown_until_they_are_noted() -> None:
    module, arena = filled("int8_w8a16")
    layer = first(module)
    layer.store.write(6, layer.store.read(5))
    found = arena_of(layers("int8_w8a16", False), arena.memory)
    assert found.experts[0][6] == EMPTY
    assert [slot for _, slot in found.damage().slots] == [6]
    layer.update_placement(Placement(6, (0, 1, 2, 3, 4, 5, 5, 1)))
    layer.note_experts()
    found = arena_of(layers("int8_w8a16", False), arena.memory)
    assert found.experts == [(0, 1, 2, 3, 4, 5, 5, 1), (0, 1, 2, 3, 4, 5, 0, 1)]
    assert not found.damage().slots


def test_an_expert_is_copied_from_the_memory_of_a_lost_rank() -> None:
    lost, arena = filled("nvfp4")
    mine, own = filled("nvfp4")
    memory = ArenaMemory(arena.memory, own.layout)
    layer = first(mine)
    first(lost).store.read(5)[0][3] ^= 1
    first(lost).note_experts()  # knows nothing of it
    wanted = first(lost).store.read(4)
    assert copy_expert(memory, 0, 4, slot=7)
    assert all(map(torch.equal, layer.store.read(7), wanted))
    assert own.experts[0] == (0, 1, 2, 3, 4, 5, 0, 4) and not own.damage().slots
    assert not copy_expert(memory, 0, 5, slot=6), "its bytes have changed"
    assert own.experts[0][6] == EMPTY
    first(lost).store.forget(4)
    assert not copy_expert(memory, 0, 4, slot=6), "it is being written"
    memory.head[:1] = 1
    assert not copy_expert(memory, 0, 3, slot=6), "the rank loads"


# Blocks of formats are wider than the tiny model's experts.
WIDE = {name: {"hidden_size": 128, "moe_intermediate_size": 128} for name in ("fp8", "mxfp4")}
# Whole models, and how they are quantised while loading.
MODELS = [
    ("qwen3_moe", None),
    ("qwen3_moe", "fp8"),
    pytest.param("qwen3_moe", "w8a8_fp8", marks=pytest.mark.slow),
    ("qwen3_moe", "w8a8_int8"),
    pytest.param("qwen3_moe", "modelopt_fp4", marks=pytest.mark.slow),
    ("qwen3_moe", "mxfp4"),
    pytest.param("qwen2_moe", None, marks=pytest.mark.slow),
    ("deepseek_v3", None),
    ("gpt_oss", None),
]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[LastingMemory]:
    """As a supervisor keeps it."""
    folder = tmp_path / "store"
    folder.mkdir()
    store = LocalStore(folder)
    client = store.address.connect(5.0, Identity(0, 0))
    yield LastingMemory(client, 0)
    client.close()
    store.close()


def start(memory: LastingMemory | None, folder: Path, **flags: Any) -> LocalCore:
    own = {"model_path": str(folder), "device": "cpu", "dtype": "bfloat16", "page_size": 4}
    own |= {"max_total_tokens": 1024, "skip_tokenizer_init": True}
    args = resolve(ServerArgs.from_kwargs(**own, **flags))
    return LocalCore(args, ModelRunner(args, RankContext(memory=memory)))


def answers(core: LocalCore) -> list[Any]:
    return [(one.output_ids, one.output_logprobs) for one in serve(core, requests())]


def poison(folder: Path) -> None:
    """Whatever is read from the checkpoint from now on shows."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.full_like(one, torch.nan) for name, one in tensors.items()}, path)


@pytest.mark.parametrize(("family", "quantization"), MODELS)
def test_answers_of_a_restarted_rank_are_the_same(
    family: str, quantization: str | None, memory: LastingMemory, tmp_path: Path
) -> None:
    """To the bit, and nothing is read from the checkpoint."""
    folder = make_tiny_checkpoint(family, tmp_path / family, changes=WIDE.get(quantization))
    flags = {"quantization": quantization}
    plain = answers(start(None, folder, **flags))
    core = start(memory, folder, **flags)
    facts = core.rank_facts[0]
    assert answers(core) == plain
    assert facts["lasting_bytes"] >= facts["weight_bytes"] > 0 == facts["mapped_bytes"]
    poison(folder)
    again = start(memory, folder, **flags)
    facts = again.rank_facts[0]
    assert facts["mapped_bytes"] == facts["lasting_bytes"]
    assert answers(again) == plain


def test_a_damaged_expert_is_read_again(
    memory: LastingMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    core = start(memory, folder)
    wanted = answers(core)
    layer = core.runner.moe_layers[1]
    layer.store.read(2)[1][77] ^= 4
    with caplog.at_level(logging.INFO, "moesaic"):
        again = start(memory, folder)
    assert "1 slots of experts in memory are not whole: they are read from the check" in caplog.text
    facts = again.rank_facts[0]
    read = sum(map(len, layer.store.read(2)))
    assert facts["mapped_bytes"] == facts["lasting_bytes"] - read
    assert answers(again) == wanted


def test_another_damaged_tensor_loads_all_anew(
    memory: LastingMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    core = start(memory, folder)
    wanted = answers(core)
    core.runner.model.model.embed_tokens.weight.data[5, 5] += 1
    with caplog.at_level(logging.INFO, "moesaic"):
        again = start(memory, folder)
    assert "model.embed_tokens.weight in memory differ from their checksums" in caplog.text
    assert again.rank_facts[0]["mapped_bytes"] == 0
    assert answers(again) == wanted
    assert answers(start(memory, folder)) == wanted


def test_other_flags_load_anew(
    memory: LastingMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    start(memory, folder)
    with caplog.at_level(logging.INFO, "moesaic"):
        other = start(memory, folder, enable_deterministic_inference=True)
    assert "of another model, layout, flags or versions" in caplog.text
    assert other.rank_facts[0]["mapped_bytes"] == 0 < other.rank_facts[0]["lasting_bytes"]
    caplog.clear()
    wider = start(memory, folder, quantization="w8a8_int8")
    assert "of another layout: it has" in caplog.text
    assert wider.rank_facts[0]["lasting_bytes"] == 0


def test_dummy_weights_are_not_made_again(memory: LastingMemory, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    flags = {"load_format": "dummy", "random_seed": 3, "dummy_router_zipf": 0.5}
    wanted = answers(start(memory, folder, **flags))
    again = start(memory, folder, **flags)
    assert again.rank_facts[0]["mapped_bytes"] > 0 and answers(again) == wanted


def test_gpus_are_refused() -> None:
    flags = {"weight_cache_mode": "daemon", "elastic_ep_backend": "mooncake", "device": "cuda"}
    problems = list(elastic_problems(ServerArgs(model_path="m", **flags)))
    assert any("nothing keeps memory of a GPU when its rank has ended" in one for one in problems)
