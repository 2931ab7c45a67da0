"""Ranks of a split model hold and read every number once, and no byte more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.comm.collectives.collective import ShapeOnlyCollective
from moesaic.layers.attention import AttentionConfig, Heads
from moesaic.layers.linear import Linear, LinearConfig, MergedLinear, OutputPart, head_products
from moesaic.layers.module import TensorSlot
from moesaic.layers.parallel import Parallel
from moesaic.models.blocks import CausalLM, Router
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.quantize import QuantizeJob, quantize
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.models.tiny import FAMILIES, make_tiny_checkpoint, materialise
from moesaic.models.weights import (
    fill_randomly,
    fill_some_randomly,
    load_some_weights,
    load_weights,
)
from moesaic.moe.context import MoeContext
from tests.unit.disk_formats import CountingCheckpoint

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8}
# How many of four ranks hold each kind of tensor; all ranks hold the others.
CUT = {
    **dict.fromkeys(("q_proj", "o_proj", "sinks", "q_b_proj", "kv_b_proj"), 1),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"), 1),
    **dict.fromkeys(("k_proj", "v_proj"), 2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("cut")
    return {f: make_tiny_checkpoint(f, root / f, changes=SIZES) for f in FAMILIES}


def part(rank: int, size: int, dp: int = 1, **more: int) -> Parallel:
    """A single rank of a stage."""
    attention = ShapeOnlyCollective(rank % (size // dp), size // dp)
    sizes = {"dense_tp": size, "vocab_tp": size} | more
    return Parallel(attention, ShapeOnlyCollective(rank, size), dp, **sizes)


def build(folder: Path, parallel: Parallel | None = None) -> CausalLM:
    """Builds a rank with whole experts: other tests split them."""
    context = BuildContext(16, MoeContext.single(torch.float32), parallel or Parallel())
    return build_model(RawConfig.read(folder), context)


def dense_slots(model: CausalLM) -> Iterator[TensorSlot]:
    for slot in model.checkpoint_slots():
        if isinstance(slot, TensorSlot) and ".experts." not in slot.name:
            yield slot


def tensors(model: CausalLM) -> dict[str, Tensor]:
    return {slot.name: slot.into for slot in dense_slots(model)}


def kind(name: str) -> str:
    parts = name.split(".")
    return parts[-2] if parts[-1] in ("weight", "bias") else parts[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_held_once(family: str, folders: dict[str, Path]) -> None:
    with torch.device("meta"):
        whole = tensors(build(folders[family]))
        ranks = [build(folders[family], part(rank, 4)) for rank in range(4)]
    held = {name: torch.zeros(tensor.shape, device="cpu") for name, tensor in whole.items()}
    for model in ranks:
        for slot in dense_slots(model):
            assert slot.shape == whole[slot.name].shape
            assert slot.into.shape == held[slot.name][slot.cut].shape
            held[slot.name][slot.cut] += 1
    for name, counts in held.items():
        # A projection with split inputs has a whole bias.
        times = 4 if name.endswith("o_proj.bias") else CUT.get(kind(name), 4)
        assert (counts == times).all(), name


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_deterministic_mode_cuts_no_inputs(family: str, folders: dict[str, Path]) -> None:
    """Projections that sum over ranks stay whole; all others are split as usual."""
    with torch.device("meta"):
        usual = {slot.name: slot for slot in dense_slots(build(folders[family], part(1, 4)))}
        bits = replace(part(1, 4), deterministic=True)
        held = {slot.name: slot for slot in dense_slots(build(folders[family], bits))}
    summed = [name for name in held if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(summed) == {"qwen2_moe": 8, "deepseek_v3": 8, "gpt_oss": 4}[family]
    for name, slot in held.items():
        if name in summed:
            assert slot.cut == () and slot.into.shape == slot.shape, name
        else:
            assert slot.cut == usual[name].cut, name


@pytest.mark.parametrize(
    ("dp", "dense_tp", "vocab_tp", "inner", "vocab", "queries"),
    [
        (2, 1, 2, 96, 129, 64),
        (2, 2, 4, 48, 65, 64),
        (4, 4, 1, 24, 258, 128),
        (4, 1, 4, 96, 65, 128),
    ],
)
def test_dense_layers_have_their_own_cut(
    dp: int,
    dense_tp: int,
    vocab_tp: int,
    inner: int,
    vocab: int,
    queries: int,
    folders: dict[str, Path],
) -> None:
    """DeepSeek has an inner size of 96, 8 heads with values of 16 channels, a vocabulary of 258."""
    with torch.device("meta"):
        last = part(3, 4, dp, dense_tp=dense_tp, vocab_tp=vocab_tp)
        held = tensors(build(folders["deepseek_v3"], last))
    layer = "model.layers.0"
    assert held[f"{layer}.mlp.down_proj.weight"].shape == (64, inner)
    assert held[f"{layer}.mlp.up_proj.weight"].shape == (inner, 64)
    assert held[f"{layer}.self_attn.o_proj.weight"].shape == (64, queries)
    assert held["lm_head.weight"].shape == (vocab, 64)
    assert held["model.embed_tokens.weight"].shape == ({2: 129, 4: 258}[dp], 64)


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v2", "gpt_oss"])
def test_random_weights_do_not_depend_on_the_cut(family: str, folders: dict[str, Path]) -> None:
    whole = build(folders[family])
    fill_randomly(whole, seed=5)
    expected = tensors(whole)
    for rank in range(3):
        size = 3 if family == "deepseek_v2" else 2
        model = build(folders[family], part(rank % size, size))
        fill_randomly(model, seed=5)
        for slot in dense_slots(model):
            assert torch.equal(slot.into, expected[slot.name][slot.cut]), slot.name


@pytest.mark.parametrize("is_dummy", [True, False])
def test_parts_are_read_again_one_by_one(is_dummy: bool, folders: dict[str, Path]) -> None:
    """A rank that takes over experts tells that it makes progress after each."""
    folder, model = folders["mixtral"], build(folders["mixtral"])
    scheme = detect_scheme(RawConfig.read(folder), folder)
    if is_dummy:
        fill_randomly(model, seed=5)
    else:
        load_weights(model, folder)
    parts = [slot.into for slot in dense_slots(model) if "q_proj" in slot.name]
    kept = [slot.into for slot in dense_slots(model) if "k_proj" in slot.name]
    wanted = [part.clone() for part in parts]
    for part in parts + kept:
        part.zero_()
    if is_dummy:
        filled = fill_some_randomly(model, 5, parts)
    else:
        filled = load_some_weights(model, folder, scheme, parts)
    for number, _ in enumerate(filled, start=1):
        assert sum(bool(part.any()) for part in parts) == number
    assert all(torch.equal(*both) for both in zip(parts, wanted, strict=True)) and len(parts) == 4
    assert not any(part.any() for part in kept)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_a_rank_reads_its_bytes_only(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[CountingCheckpoint] = []

    def counting(folder: Path, *_: object) -> CountingCheckpoint:
        opened.append(CountingCheckpoint(folder))
        return opened[-1]

    monkeypatch.setattr("moesaic.models.weights.Checkpoint", counting)
    whole, mine = build(folders[family]), build(folders[family], part(1, 4))
    load_weights(whole, folders[family])
    load_weights(mine, folders[family])
    sizes = [sum(t.nbytes for t in tensors(model).values()) for model in (whole, mine)]
    # Experts are whole on both ranks: only dense tensors differ.
    assert opened[0].bytes_read - opened[1].bytes_read == sizes[0] - sizes[1]
    assert sizes[1] < 0.5 * sizes[0]
    expected = tensors(whole)
    for slot in dense_slots(mine):
        assert torch.equal(slot.into, expected[slot.name][slot.cut]), slot.name


def test_a_quantised_layer_is_cut_anywhere(folders: dict[str, Path], tmp_path: Path) -> None:
    """Parts of a third of the inner size split blocks of 128 numbers that share a scale."""
    quantize(folders["deepseek_v3"], tmp_path / "fp8", QuantizeJob("fp8", None))
    scheme = detect_scheme(RawConfig.read(tmp_path / "fp8"), tmp_path / "fp8")
    names = load_file(tmp_path / "fp8" / "model.safetensors")
    assert names["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    whole = build(tmp_path / "fp8")
    load_weights(whole, tmp_path / "fp8", scheme)
    expected = tensors(whole)
    for rank in range(3):
        mine = build(tmp_path / "fp8", part(rank, 3))
        load_weights(mine, tmp_path / "fp8", scheme)
        for slot in dense_slots(mine):
            assert torch.equal(slot.into, expected[slot.name][slot.cut]), slot.name


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_a_stage_holds_its_layers(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    stages = [
        Parallel(layers=range(1), is_last=False),
        Parallel(layers=range(1, 3), is_first=False, is_last=False),
        Parallel(layers=range(3, 4), is_first=False),
    ]
    whole = {slot.name for slot in build(folders[family]).checkpoint_slots()}
    models = [build(folders[family], stage) for stage in stages]
    names = [{slot.name for slot in model.checkpoint_slots()} for model in models]
    assert set.union(*names) == whole and sum(map(len, names)) == len(whole)
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in names[1])
    assert [model.cache.num_layers for model in models] == [1, 2, 1]
    assert [layer.self_attn.spec.layer for layer in models[1].model.layers] == [0, 1]
    # Tensors of other stages are allowed, unknown tensors are not.
    load_weights(models[1], folders[family])
    tensors = load_file(folders[family] / "model.safetensors")
    tensors["model.layers.0.stranger.weight"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders[family] / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"not in the model model\.layers\.0\.stranger\.weight$"):
        load_weights(models[1], tmp_path)


def test_a_tied_head(folders: dict[str, Path]) -> None:
    """A tied head uses the embedding's weights if both are split alike. Else it reads the
    embedding's tensor: on a last stage, or if more ranks split the vocabulary than attention."""
    raw = RawConfig.read(folders["qwen3_moe"])
    raw.data["tie_word_embeddings"] = True
    moe = MoeContext.single(torch.float32)
    for parallel, slots, borrows in (
        (Parallel(), 1, True),
        (part(1, 2), 1, True),
        (part(1, 2, dp=2), 2, False),
        (Parallel(layers=range(2, 4), is_first=False), 1, False),
        (Parallel(layers=range(2), is_last=False), 1, None),
    ):
        model = build_model(raw, BuildContext(16, moe, parallel))
        names = [slot.name for slot in model.checkpoint_slots()]
        assert names.count("model.embed_tokens.weight") == slots
        assert "lm_head.weight" not in names and model.is_optional("lm_head.weight")
        assert (model.lm_head.is_tied if model.lm_head else None) == borrows


HEADS = AttentionConfig(64, num_heads=12, num_kv_heads=3, head_dim=8)


@pytest.mark.parametrize(
    ("size", "queries", "kv"),
    [
        (1, [range(12)], [range(3)]),
        (2, [range(4), range(4, 12)], [range(1), range(1, 3)]),
        (3, [range(4), range(4, 8), range(8, 12)], [range(1), range(1, 2), range(2, 3)]),
        (
            6,
            [range(r, r + 2) for r in range(0, 12, 2)],
            [range(r // 4, r // 4 + 1) for r in range(0, 12, 2)],
        ),
        (12, [range(r, r + 1) for r in range(12)], [range(r // 4, r // 4 + 1) for r in range(12)]),
    ],
)
def test_heads(size: int, queries: list[range], kv: list[range]) -> None:
    heads = [Heads.of(HEADS, rank, size) for rank in range(size)]
    assert [h.queries for h in heads] == queries and [h.kv for h in heads] == kv


@pytest.mark.parametrize(("size", "nearest"), [(4, "3 and 6"), (9, "6 and 12"), (13, "12")])
def test_heads_that_do_not_split(size: int, nearest: str) -> None:
    message = (
        rf"num_attention_heads 12 with num_key_value_heads 3 cannot be split over {size} ranks of "
        rf"attention: {nearest} can be; .*--enable-dp-attention: a larger --dp-size"
    )
    with pytest.raises(ValueError, match=message):
        Heads.of(HEADS, 0, size)


def test_too_many_ranks_for_latent_heads(folders: dict[str, Path]) -> None:
    message = "num_attention_heads 8 cannot be split over 9 ranks of attention: at most 8 .*dp-size"
    with pytest.raises(ValueError, match=message):
        build(folders["deepseek_v2"], part(0, 9))


@pytest.mark.parametrize("inputs", [64, 50])
def test_deterministic_products(inputs: int) -> None:
    """A row's bits do not depend on the rows beside it."""
    torch.manual_seed(0)
    config = LinearConfig(inputs, 40, torch.float32, bias=True, deterministic=True)
    merged = {"a": OutputPart(30, range(30)), "b": OutputPart(10, range(10))}
    layers = [
        Linear(config),
        MergedLinear(config, merged),
        Router(replace(config, bias=False), float32=True),
    ]
    x_TI = torch.randn(77, inputs)
    for layer in layers:
        for tensor in layer.parameters():
            tensor.copy_(torch.randn_like(tensor))
        y_TO = layer(x_TI)
        assert torch.equal(y_TO, torch.cat([layer(x_TI[row : row + 1]) for row in range(77)]))
        assert layer(x_TI[:0]).shape == (0, 40)
        bias = layer.bias if layer.bias is not None else 0
        torch.testing.assert_close(y_TO, x_TI @ layer.weight.t() + bias)
    w_NOI, x_NTI = torch.randn(3, 24, inputs), torch.randn(3, 77, inputs)
    y_NTO = head_products(x_NTI, w_NOI, deterministic=True)
    rows = [head_products(x_NTI[:, row : row + 1], w_NOI, True) for row in range(77)]
    assert torch.equal(y_NTO, torch.cat(rows, dim=1))
    torch.testing.assert_close(y_NTO, head_products(x_NTI, w_NOI, deterministic=False))


def test_rows_of_a_group() -> None:
    parallel = part(3, 4, dp=2)
    assert parallel.dp_rank == 1 and parallel.spans_groups(4) and not parallel.spans_groups(2)
    assert parallel.own_rows(5) == slice(2, 5)
    assert [parallel.own_tokens(tokens, 5) for tokens in range(6)] == [0, 0, 0, 1, 2, 3]
    first = part(2, 4, dp=2)
    assert [first.own_tokens(tokens, 5) for tokens in range(6)] == [0, 1, 2, 2, 2, 2]
    assert (first.own_tokens(1, 1), parallel.own_tokens(1, 1)) == (0, 1)
    assert [parallel.most_rows(count) for count in (0, 1, 5, 8)] == [0, 1, 3, 4]
    assert parallel.row_counts([5, 0]) == [2, 3, 0, 0]
    assert parallel.group_rows([5, 7]) == slice(5, 12)
    with pytest.raises(AssertionError, match="counts of 0 groups, and there are 2"):
        parallel.group_rows([])
    assert replace(parallel, layers=range(6, 9)).stage_layer(7) == 1


def test_tiny_models_of_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = "tiny:deepseek_v3,num_hidden_layers=4,num_attention_heads=16"
    folder = Path(materialise(path))
    swapped = "tiny:deepseek_v3,num_attention_heads=16,num_hidden_layers=4"
    assert Path(materialise(swapped)) == folder != Path(materialise("tiny:deepseek_v3"))
    raw = RawConfig.read(folder)
    assert (raw.integer("num_hidden_layers"), raw.integer("num_attention_heads")) == (4, 16)
    load_weights(build(folder, part(15, 16)), folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("nonesuch=3", "tiny mixtral has no 'nonesuch' to change; it has eos_token_id, head_dim"),
        ("architectures=3", "has no 'architectures' to change"),
        ("num_hidden_layers=two", "'num_hidden_layers=two' in 'tiny:mixtral,.* is not KEY=INTEGER"),
        ("num_hidden_layers=-1", "is not KEY=INTEGER"),
        ("num_hidden_layers=0", "num_hidden_layers must be an integer from 1 to 1024, not 0"),
        ("num_hidden_layers", "'num_hidden_layers' in .* is not KEY=INTEGER"),
        ("head_dim=8,head_dim=8", "gives head_dim twice"),
        ("vocab_size=257", "vocab_size=257: a tiny model needs at least 258"),
    ],
)
def test_wrong_sizes_of_tiny_models(
    changes: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=message):
        materialise(f"tiny:mixtral,{changes}")
    assert list(tmp_path.glob("moesaic/*")) == []
