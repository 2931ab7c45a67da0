"""The MTP layers of DeepSeek-V3 against their definition, put together from transformers' parts.

T tokens · H hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from examples.train.export import export
from examples.train.model import Model, Shape
from moesaic.layers.module import MatrixSlot
from moesaic.layers.paged_cache import PagedCache, SequenceSpan
from moesaic.layers.parallel import Parallel
from moesaic.layers.torch_attention import TorchAttention
from moesaic.models.blocks import CausalLM
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.nextn import NextN, load_nextn
from moesaic.models.quantize import PROJECTION, QuantizeJob, quantize
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.models.schemes.quantize_formats import QUANTIZE_FORMATS
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.models.weights import load_weights
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.shape_only import ShapeOnlyGroup
from tests.oracle import Case, build, load, spread

PAGE, PAGES = 8, 8  # pages per sequence
LENGTHS = (1, 2, 7, 33, 60)
TOLERANCE = 2e-4  # float32 logits up to 30
CASE = Case(
    "deepseek_v3_mtp",
    "deepseek_v3",
    {"num_nextn_predict_layers": 2, "q_lora_rank": 32, "moe_intermediate_size": 32},
)


class Definition(nn.Module):
    """One MTP layer, as DeepSeek's report has it."""

    def __init__(self, config: DeepseekV3Config, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(size, eps), DeepseekV3RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.decoder = DeepseekV3DecoderLayer(config, layer)
        self.rotary = DeepseekV3RotaryEmbedding(config)
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(size, eps)})

    def forward(self, embedded_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        """Takes one sequence."""
        x_TH = self.eh_proj(torch.cat((self.enorm(embedded_TH), self.hnorm(hidden_TH)), -1))
        count = len(x_TH)
        mask = torch.full((count, count), float("-inf"), dtype=x_TH.dtype).triu(1)
        angles = self.rotary(x_TH[None], torch.arange(count)[None])
        return self.decoder(x_TH[None], mask[None, None], position_embeddings=angles)[0]


@dataclass(frozen=True)
class Oracle:
    """The main model, and for each MTP layer its definition, embedding and head."""

    main: nn.Module
    layers: list[Definition]
    tables: list[tuple[Tensor, Tensor]]

    def logits(self, ids: list[int]) -> list[Tensor]:
        """Logits by depth, for the rows with known inputs: one row fewer at each depth."""
        found = []
        x_TH = self.main.model(torch.tensor([ids])).last_hidden_state[0]
        for depth, (layer, (embedding, head)) in enumerate(
            zip(self.layers, self.tables, strict=True)
        ):
            next_ids = ids[depth + 1 :]
            if not next_ids:
                break
            x_TH = layer(embedding[next_ids], x_TH[: len(next_ids)])
            found.append(layer.shared_head["norm"](x_TH) @ head.t())
        return found


def tensors_of(layer: Definition, number: int) -> dict[str, Tensor]:
    """The tensors by DeepSeek's names: the decoder's have no prefix, experts are separate
    tensors."""
    found = {}
    for name, tensor in layer.state_dict().items():
        stem = f"model.layers.{number}.{name.removeprefix('decoder.')}"
        if not name.endswith(("gate_up_proj", "experts.down_proj")):
            found[stem] = tensor
            continue
        stem, _, which = stem.rpartition(".")
        for expert, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if which == "gate_up_proj" else (matrix,)
            names = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
            for part, projection in zip(parts, names, strict=True):
                found[f"{stem}.{expert}.{projection}.weight"] = part.clone()
    return found


@torch.no_grad()
def write(folder: Path, own: bool) -> Oracle:
    """Writes a checkpoint with two MTP layers; `own`: each has its own embedding and head."""
    build(CASE, folder)
    main = load(folder).double()
    config = main.config
    config._attn_implementation = config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(folder / "model.safetensors")
    layers, tables = [], []
    for number in range(config.num_hidden_layers, config.num_hidden_layers + 2):
        layer = Definition(config, number).eval()
        for name, tensor in layer.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(spread(name, noise, config))
        tensors |= tensors_of(layer, number)
        embedding, head = main.model.embed_tokens.weight, main.lm_head.weight
        if own:
            shape, stem = embedding.shape, f"model.layers.{number}."
            embedding, head = (torch.randn(shape, generator=generator) * gain for gain in (1, 0.5))
            tensors |= {stem + "embed_tokens.weight": embedding}
            tensors |= {stem + "shared_head.head.weight": head}
        layers.append(layer.double())
        tables.append((embedding.double(), head.double()))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Oracle(main, layers, tables)


@dataclass(frozen=True)
class Written:
    folder: Path
    oracle: Oracle


@pytest.fixture(scope="module", params=[False, True], ids=["lent", "own"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("mtp")
    return Written(folder, write(folder, request.param))


def load_main(folder: Path, parallel: Parallel | None = None) -> CausalLM:
    raw = RawConfig.read(folder)
    scheme = detect_scheme(raw, folder)
    moe = MoeContext.single(torch.float32, scheme.expert_format)
    model = build_model(raw, BuildContext(PAGE * PAGES, moe, parallel or Parallel()))
    load_weights(model, folder, scheme)
    return model


def new_cache(model: CausalLM | NextN, sequences: int) -> PagedCache:
    cache = PagedCache(model.cache, sequences * PAGES, PAGE, torch.float32)
    cache.clear(range(sequences * PAGES + 1))
    return cache


def ids_of(lengths: tuple[int, ...], vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True)
class Work:
    """Rows [first, stop) of each sequence."""

    sequences: list[list[int]]
    parts: list[tuple[int, int]]

    def tokens(self, later: int = 0) -> Tensor:
        parts = zip(self.sequences, self.parts, strict=True)
        rows = [
            token for ids, (first, stop) in parts for token in ids[first + later : stop + later]
        ]
        return torch.tensor(rows, dtype=torch.int64)

    @property
    def positions(self) -> Tensor:
        rows = [position for first, stop in self.parts for position in range(first, stop)]
        return torch.tensor(rows, dtype=torch.int64)

    def attention(self, cache: PagedCache) -> TorchAttention:
        spans, start = [], 0
        for number, (first, stop) in enumerate(self.parts):
            if stop > first:
                pages = range(1 + number * PAGES, 1 + (number + 1) * PAGES)
                spans.append(SequenceSpan(start, stop - first, stop, pages))
            start += stop - first
        return TorchAttention(cache, spans)


@torch.inference_mode()
def predict(main: CausalLM, mtp: NextN, sequences: list[list[int]]) -> list[list[Tensor]]:
    """Logits of each sequence by depth, all sequences in one batch."""
    whole = Work(sequences, [(0, len(ids)) for ids in sequences])
    cache = new_cache(main, len(sequences))
    x_TH = main(whole.tokens(), whole.positions, whole.attention(cache))
    states = list(x_TH.split([len(ids) for ids in sequences]))
    cache, found = new_cache(mtp, len(sequences)), []
    for depth in range(len(mtp.layers)):
        rows = [max(0, len(ids) - depth - 1) for ids in sequences]
        work = Work(sequences, [(0, count) for count in rows])
        hidden_TH = torch.cat([x[:count] for x, count in zip(states, rows, strict=True)])
        attention = work.attention(cache)
        x_TH = mtp(work.tokens(depth + 1), work.positions, hidden_TH, attention, depth=depth)
        states = list(x_TH.split(rows))
        found.append(mtp.logits(x_TH, depth=depth).split(rows))
    return [list(logits) for logits in zip(*found, strict=True)]


def dense(mtp: NextN) -> dict[str, Tensor]:
    """The layers' tensors by name, decoded."""
    return {
        slot.name: slot.format.decode(slot.into, torch.empty(slot.shape))
        if isinstance(slot, MatrixSlot)
        else slot.into.clone()
        for slot in mtp.checkpoint_slots()
    }


def test_the_definition(written: Written) -> None:
    main = load_main(written.folder)
    mtp = load_nextn(main, written.folder)
    sequences = ids_of(LENGTHS, main.config.vocab_size)
    largest = 0.0
    for ids, found in zip(sequences, predict(main, mtp, sequences), strict=True):
        assert [len(logits) for logits in found] == [len(ids) - 1, max(0, len(ids) - 2)]
        with torch.no_grad():
            wanted = written.oracle.logits(ids)
        assert len(wanted) == min(2, len(ids) - 1)
        for ours, theirs in zip(found, wanted, strict=False):
            torch.testing.assert_close(ours.double(), theirs, atol=TOLERANCE, rtol=0)
            largest = max(largest, float(theirs.abs().max()))
    assert largest > 5, "logits near zero would agree whatever the layer does"


def unnormed(written: Written, ids: list[int]) -> Tensor:
    main = written.oracle.main.model
    states = main(torch.tensor([ids]), output_hidden_states=True).hidden_states
    x_TH = main.layers[-1](
        states[-2],
        torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None],
        position_embeddings=main.rotary_emb(states[-2], torch.arange(len(ids))[None]),
    )
    torch.testing.assert_close(main.norm(x_TH), states[-1])
    return x_TH[0]


@torch.no_grad()
def test_a_mistake_shows(written: Written) -> None:
    """Plausible mistakes in the layer's inputs give logits far from the right ones."""
    oracle, ids = written.oracle, ids_of((12,), 320)[0]
    layer, (embedding, head) = oracle.layers[0], oracle.tables[0]
    normed_TH = oracle.main.model(torch.tensor([ids])).last_hidden_state[0]
    right = oracle.logits(ids)[0]
    inputs = {
        "the token itself": (embedding[ids[:-1]], normed_TH[:-1]),
        "before the final norm": (embedding[ids[1:]], unnormed(written, ids)[:-1]),
        "the wrong way round": (normed_TH[:-1], embedding[ids[1:]]),
    }
    for mistake, given in inputs.items():
        wrong = layer.shared_head["norm"](layer(*given)) @ head.t()
        assert (wrong - right).abs().max() > 100 * TOLERANCE, mistake


def test_chunks_and_single_tokens(written: Written) -> None:
    """MTP layers compute chunks and single tokens over their own cache, beside an idle sequence."""
    main = load_main(written.folder)
    mtp = load_nextn(main, written.folder)
    sequences = ids_of((27, 12, 19), main.config.vocab_size)
    whole = [logits[0] for logits in predict(main, mtp, sequences)]
    caches = new_cache(main, 3), new_cache(mtp, 3)
    borders = ((0, 5, 14, 15, 16, 26), (0, 0, 1, 2, 3, 11), (0, 17, 17, 17, 18, 18))
    pieces: list[list[Tensor]] = [[], [], []]
    for turn in range(5):
        parts = [(ends[turn], ends[turn + 1]) for ends in borders]
        work = Work(sequences, parts)
        with torch.inference_mode():
            x_TH = main(work.tokens(), work.positions, work.attention(caches[0]))
            x_TH = mtp(work.tokens(1), work.positions, x_TH, work.attention(caches[1]))
            rows = mtp.logits(x_TH).split([stop - first for first, stop in parts])
        for piece, logits in zip(pieces, rows, strict=True):
            piece.append(logits)
    for piece, wanted in zip(pieces, whole, strict=True):
        torch.testing.assert_close(torch.cat(piece), wanted, atol=TOLERANCE, rtol=0)


def test_no_tokens(written: Written) -> None:
    main = load_main(written.folder)
    mtp = load_nextn(main, written.folder)
    idle = Work([[]], [(0, 0)])
    with torch.inference_mode():
        attention = idle.attention(new_cache(mtp, 1))
        x_TH = mtp(idle.tokens(), idle.positions, torch.empty(0, 64), attention)
        assert mtp.logits(x_TH).shape == (0, main.config.vocab_size)


def test_last_stage_without_the_embedding(written: Written) -> None:
    """In a pipeline the first stage has the embedding, so the MTP layer loads its own copy."""
    last = load_main(written.folder, Parallel(layers=range(2, 4), is_first=False))
    assert last.model.embed_tokens is None
    mtp, whole = load_nextn(last, written.folder), load_main(written.folder)
    sequences = ids_of((9,), whole.config.vocab_size)
    wanted = predict(whole, load_nextn(whole, written.folder), sequences)[0][0]
    work = Work(sequences, [(0, 9)])
    with torch.inference_mode():
        x_TH = whole(work.tokens(), work.positions, work.attention(new_cache(whole, 1)))[:8]
        work = Work(sequences, [(0, 8)])
        x_TH = mtp(work.tokens(1), work.positions, x_TH, work.attention(new_cache(mtp, 1)))
        assert torch.equal(mtp.logits(x_TH), wanted)


def test_a_rank_reads_its_own_experts(written: Written) -> None:
    """A rank loads its own experts and ignores those of other ranks."""
    main = load_main(written.folder)
    problem = MoeProblem(a2a="none", weights=WEIGHT_FORMATS["fp32"], dtype="fp32", ep=2, tp=2)
    moe = MoeContext.make(problem, torch.float32, ShapeOnlyGroup(1, 2))
    half = build_model(RawConfig.read(written.folder), BuildContext(PAGE * PAGES, moe))
    mine, whole = load_nextn(half, written.folder), load_nextn(main, written.folder)
    held, every = dense(mine), dense(whole)
    experts = {
        int(name.split(".experts.")[1].split(".")[0]) for name in held if ".experts." in name
    }
    assert experts == set(range(8, 16))
    assert all(torch.equal(tensor, every[name]) for name, tensor in held.items())
    assert len(every) - len(held) == 2 * 8 * 3


@pytest.mark.parametrize(
    ("form", "weights", "activations"),
    [
        ("fp8", 0.04, 0.04),
        ("int8_w8a8", 0.02, 0.02),
        ("int4_w4a16", 0.15, None),
        ("awq", 0.15, None),
        ("nvfp4", 0.15, 0.2),
    ],
)
def test_quantised(
    form: str, weights: float, activations: float | None, written: Written, tmp_path: Path
) -> None:
    """`quantize` keeps the MTP layers and quantises only their projections, as DeepSeek does. They
    compute like the decoded weights, within `activations` if these are quantised too."""
    grouped = QUANTIZE_FORMATS[form].group_size
    quantize(written.folder, tmp_path / "out", QuantizeJob(form, 16 if grouped else None))
    plain = load_main(written.folder)
    plain_mtp = load_nextn(plain, written.folder)
    main = load_main(tmp_path / "out")
    mtp = load_nextn(main, tmp_path / "out")
    before, after = dense(plain_mtp), dense(mtp)
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if PROJECTION.fullmatch(name)}
    assert len(changed) == 2 * (5 + 3 + 16 * 3)
    kinds = {name.split(".", 3)[3] for name in before.keys() - changed}
    assert {"eh_proj.weight", "enorm.weight", "mlp.gate.e_score_correction_bias"} < kinds
    for name in changed:
        error = (after[name] - before[name]).norm() / before[name].norm()
        assert error < weights, f"{name}: {error}"
    decoded = changed_copy(written, tmp_path, lambda tensors: tensors.update(after))
    sequences = ids_of((40,), plain.config.vocab_size)
    ours, wanted = (
        predict(plain, layers, sequences)[0][0] for layers in (mtp, load_nextn(plain, decoded))
    )
    if activations is None:
        torch.testing.assert_close(ours, wanted, atol=TOLERANCE, rtol=0)
    else:
        assert (ours - wanted).norm() / wanted.norm() < activations


def changed_copy(
    written: Written, target: Path, change: Callable[[dict[str, Tensor]], object]
) -> Path:
    tensors = load_file(written.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((written.folder / "config.json").read_text())
    return target


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("eh_proj.weight", "missing model.layers.5.eh_proj.weight$"),
        ("mlp.experts.3.up_proj.weight", "missing model.layers.5.mlp.experts.3.up_proj.weight$"),
        ("", "missing model.layers.5.eh_proj.weight, .* and 6. more$"),
    ],
)
def test_missing_tensors(lost: str, said: str, written: Written, tmp_path: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(f"model.layers.5.{lost}")]:
            del tensors[name]

    folder = changed_copy(written, tmp_path, drop)
    main = load_main(folder)  # the main model does not need them
    with pytest.raises(ValueError, match=said):
        load_nextn(main, folder)


def test_a_tensor_that_nobody_knows(written: Written, tmp_path: Path) -> None:
    folder = changed_copy(
        written, tmp_path, lambda t: t.update({"model.layers.4.gamma.weight": torch.ones(3)})
    )
    with pytest.raises(ValueError, match=r"not in the model model\.layers\.4\.gamma\.weight$"):
        load_nextn(load_main(folder), folder)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("deepseek_v3", r"config\.json: num_nextn_predict_layers is 0: .* use one that has"),
        ("qwen3_moe", r"prediction is not supported for architectures \['Qwen3MoeForCausalLM'\]"),
    ],
)
def test_models_without_such_layers(family: str, said: str, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(family, tmp_path)
    with pytest.raises(ValueError, match=said):
        load_nextn(load_main(folder), folder)


@torch.no_grad()
def test_what_the_training_script_trains(tmp_path: Path) -> None:
    """The loaded layer gives the logits of the trained one for the token after the next."""
    torch.manual_seed(4)
    sizes = {"hidden": 64, "dense_inner": 96, "layers": 2, "heads": 2, "q_rank": 32, "kv_rank": 32}
    model = Model(Shape(vocab=320, experts=8, top_k=2, expert_inner=32, **sizes)).eval()
    for router in model.routers():
        router.bias.normal_(0, 0.3)
    for name, param in model.named_parameters():
        if "norm" in name:
            param += 0.3 * torch.randn_like(param)
        param.copy_(param.bfloat16())  # the stored precision
    export(model, tmp_path, 1, 2, 0)
    main = load_main(tmp_path)
    sequences = ids_of((41, 2), 320)
    ours = predict(main, load_nextn(main, tmp_path), sequences)
    for ids, found in zip(sequences, ours, strict=True):
        row = torch.tensor([ids])
        theirs = model(row, torch.ones_like(row), torch.float32)[1][0, :-1]
        torch.testing.assert_close(found[0], theirs, atol=2e-5, rtol=2e-5)
