"""The loader, and transformers where possible, read what `moesaic quantize` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moesaic.cli.main import main
from moesaic.cli.quantize import FORMATS
from moesaic.layers.module import MatrixSlot, TensorSlot
from moesaic.models.blocks import CausalLM
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.quantize import PROJECTION, QuantizeJob, quantize
from moesaic.models.registry import build_model
from moesaic.models.schemes import Matrix, detect_scheme
from moesaic.models.schemes.quantize_formats import QUANTIZE_FORMATS
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.models.weights import fill_randomly, load_weights
from moesaic.moe.context import MoeContext
from moesaic.moe.quant.codecs import Nvfp4
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat, int4_format
from tests.unit.disk_formats import CountingCheckpoint

GROUP = 16
Change = Callable[[dict[str, Tensor]], object]
EXPERT = "model.layers.0.mlp.experts.0.up_proj"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    families = ("qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss")
    return {family: make_tiny_checkpoint(family, root / family) for family in families}


def job(form: str, **more: int) -> QuantizeJob:
    return QuantizeJob(form, GROUP if QUANTIZE_FORMATS[form].group_size else None, **more)


def build(folder: Path, format: WeightFormat | None = None) -> CausalLM:
    context = MoeContext.single(torch.float32, format)
    return build_model(RawConfig.read(folder), BuildContext(64, context))


def decoded(model: CausalLM) -> dict[str, Tensor]:
    """Decodes the model's tensors, by name and index in a stack."""
    found = {}
    for slot in model.checkpoint_slots():
        part = slot.interleaved if isinstance(slot, MatrixSlot) else None
        found[f"{slot.name} {slot.index} {part}"] = _dense(slot)
    return found


def _dense(slot: TensorSlot | MatrixSlot) -> Tensor:
    if isinstance(slot, TensorSlot):
        return slot.into.clone()
    return slot.format.decode(slot.into, torch.empty(slot.shape))


def loaded(folder: Path, format: WeightFormat | None = None) -> dict[str, Tensor]:
    model = build(folder, format)
    load_weights(model, folder)
    return decoded(model)


def bound(form: str, name: str, before: dict[str, Tensor]) -> Tensor:
    """The error bound of a matrix. Float16 scales of AWQ and GPTQ are up to 1/1024 larger."""
    w_NK = before[name]
    format = QUANTIZE_FORMATS[form].storage(GROUP).format
    assert format is not None
    codec = format.codec
    if isinstance(codec, Nvfp4):
        amax = max(float(before[key].abs().amax()) for key in siblings(name) if key in before)
        codec = Nvfp4(global_scale=amax / 2688)
    return codec.error_bound(w_NK) * (1 + 2.0**-10) + 1e-12


def siblings(name: str) -> set[str]:
    """This matrix and those that share its global scale."""
    groups = (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"))
    group = next((g for g in groups if any(f".{part}." in name for part in g)), ())
    return {name} | {name.replace(f".{a}.", f".{b}.") for a in group for b in group}


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_moe", form) for form in QUANTIZE_FORMATS]
    + [(family, form) for family in ("deepseek_v3", "mixtral") for form in ("fp8", "awq", "nvfp4")]
    + [("mixtral", "mxfp4")],
)
def test_round_trip(family: str, form: str, sources: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "out"
    quantize(sources[family], target, job(form))
    scheme = detect_scheme(RawConfig.read(target), target)
    assert scheme.expert_format is not None
    stored = QUANTIZE_FORMATS[form].storage(GROUP).format
    assert stored is not None and scheme.expert_format.name == stored.name
    before, kept = loaded(sources[family]), loaded(target, scheme.expert_format)
    dense = loaded(target)
    assert kept.keys() == before.keys()
    changed = 0
    for name, w in before.items():
        assert torch.equal(kept[name], dense[name])
        if PROJECTION.fullmatch(name.split()[0]) is None:
            assert torch.equal(kept[name], w)
        else:
            changed += 1
            error = (kept[name].double() - w.double()).abs()
            assert (error <= bound(form, name, before)).all(), name
            assert not torch.equal(kept[name], w)
    assert changed > 30


def test_mxfp4_of_stacks(sources: dict[str, Path], tmp_path: Path) -> None:
    quantize(sources["gpt_oss"], tmp_path / "out", QuantizeJob("mxfp4"))
    format = WEIGHT_FORMATS["mxfp4"]
    assert detect_scheme(RawConfig.read(tmp_path / "out"), tmp_path / "out").expert_format is format
    before, kept = loaded(sources["gpt_oss"]), loaded(tmp_path / "out", format)
    dense = loaded(tmp_path / "out")
    for name, w in before.items():
        assert torch.equal(kept[name], dense[name])
        if ".experts." in name and "bias" not in name:
            assert ((kept[name] - w).abs() <= format.error_bound(w)).all()
            # Encoding the same numbers at load gives the same result as `quantize`.
            assert torch.equal(kept[name], format.decode(format.encode(w), torch.empty(w.shape)))
        else:
            assert torch.equal(kept[name], w)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel", "int8_w8a8", "nvfp4", "mxfp4"])
def test_quantised_at_load(name: str, sources: dict[str, Path]) -> None:
    format = WEIGHT_FORMATS[name]
    before, kept = loaded(sources["qwen3_moe"]), loaded(sources["qwen3_moe"], format)
    for key, w in before.items():
        expected = w
        if ".experts." in key:
            expected = format.decode(format.encode(w), torch.empty(w.shape))
        assert torch.equal(kept[key], expected)


RANDOM = {name: format for name, format in WEIGHT_FORMATS.items() if format.quantised}
RANDOM |= {"fp32": WEIGHT_FORMATS["fp32"], "int4_w4a16": int4_format(32)}  # 128 do not fit


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights_are_numbers(name: str, sources: dict[str, Path]) -> None:
    format = RANDOM[name]
    one, two = build(sources["qwen3_moe"], format), build(sources["qwen3_moe"], format)
    fill_randomly(one, seed=3)
    fill_randomly(two, seed=3)
    first, second = decoded(one), decoded(two)
    experts = [x for key, x in first.items() if ".experts." in key]
    assert all(torch.isfinite(x).all() and torch.equal(x, second[key]) for key, x in first.items())
    assert not torch.equal(experts[0], experts[3]) and 0.5 < experts[0].std() * 8 < 2


@dataclass
class Share:
    """A rank's share of a model: some experts, and half of their inner dimension."""

    model: CausalLM
    experts: tuple[int, ...]

    def checkpoint_slots(self) -> Iterator[TensorSlot | MatrixSlot]:
        for slot in self.model.checkpoint_slots():
            if not isinstance(slot, MatrixSlot):
                yield slot
            elif int(slot.name.split(".experts.")[1].split(".")[0]) in self.experts:
                yield self._half(slot)

    def _half(self, slot: MatrixSlot) -> MatrixSlot:
        half = slice(16, 32)
        down = "down_proj" in slot.name
        rows, cols = (slice(None), half) if down else (half, slice(None))
        into = cast(WeightFormat, slot.format).slice(slot.into, rows, cols)
        return replace(slot, into=into, rows=rows, cols=cols)

    def is_optional(self, name: str) -> bool:
        return self.model.is_optional(name)


@pytest.mark.parametrize("form", ["int4_w4a16", "gptq", "nvfp4", "fp8_channel"])
def test_a_rank_reads_what_it_holds(
    form: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(sources["qwen3_moe"], tmp_path / "out", job(form))
    scheme = detect_scheme(RawConfig.read(tmp_path / "out"), tmp_path / "out")
    whole, part = (build(tmp_path / "out", scheme.expert_format) for _ in range(2))
    opened: list[CountingCheckpoint] = []

    def counting(folder: Path, *_: object) -> CountingCheckpoint:
        opened.append(CountingCheckpoint(folder))
        return opened[-1]

    monkeypatch.setattr("moesaic.models.weights.Checkpoint", counting)
    load_weights(whole, tmp_path / "out", scheme)
    load_weights(cast(CausalLM, Share(part, (2, 5))), tmp_path / "out", scheme)
    everything, some = (checkpoint.bytes_read for checkpoint in opened)
    with Checkpoint(tmp_path / "out") as checkpoint:
        experts = sum(
            checkpoint.read(name).nbytes for name in checkpoint.location if ".experts." in name
        )
    # Two of eight experts, half of each; scales of whole rows and g_idx belong to both halves.
    assert experts * 0.1 < some - (everything - experts) < experts * 0.17
    for mine, theirs in zip(
        Share(part, (2, 5)).checkpoint_slots(), Share(whole, (2, 5)).checkpoint_slots(), strict=True
    ):
        if isinstance(mine, MatrixSlot) and isinstance(theirs, MatrixSlot):
            for plane, tensor in mine.into.items():
                same = tensor.contiguous().view(torch.uint8)
                assert torch.equal(same, theirs.into[plane].contiguous().view(torch.uint8))


def test_names_of_other_experts(sources: dict[str, Path], tmp_path: Path) -> None:
    """They are known by those of this rank's experts: the whole model is not built to know them."""
    source = sources["qwen3_moe"]

    def share() -> CausalLM:
        return cast(CausalLM, Share(build(source), (2, 5)))

    def unused(_: RawConfig) -> CausalLM:
        raise AssertionError("the whole model was built")

    load_weights(share(), source, None, unused)
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    stem = "model.layers.0.mlp.experts."
    for stranger in ("8.gate_proj.weight", "03.gate_proj.weight", "3.stranger.weight"):
        tensors = load_file(source / "model.safetensors") | {stem + stranger: torch.ones(1)}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=f"not in the model {re.escape(stem + stranger)}$"):
            load_weights(share(), tmp_path)


def _rename(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("fp8", lambda t: t.pop(f"{EXPERT}.weight_scale_inv"), "missing .*up_proj.weight_scale_i"),
        ("awq", lambda t: t.pop(f"{EXPERT}.qweight"), "missing .*up_proj.qweight"),
        ("gptq", lambda t: t.pop(f"{EXPERT}.scales"), "missing .*up_proj.scales"),
        ("nvfp4", lambda t: t.pop(f"{EXPERT}.weight_scale_2"), "missing .*weight_scale_2"),
        ("nvfp4", lambda t: t.pop(f"{EXPERT}.weight"), "missing .*up_proj.weight"),
        ("mxfp4", lambda t: t.pop(f"{EXPERT}.weight_scale"), "missing .*up_proj.weight_scale"),
        (
            "mxfp4",
            lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(32, 2)}),
            "has type F32 where config.json asks for U8",
        ),
        ("fp8", lambda t: t.update({"x.weight_scale_inv": torch.ones(1)}), "not in the model x.w"),
        ("int4_w4a16", lambda t: t.update({f"{EXPERT}.scales": torch.ones(1)}), "not in the model"),
        (
            "int4_w4a16",
            _rename(f"{EXPERT}.weight_packed", EXPERT.replace("s.0.", "s.8.") + ".weight_packed"),
            "missing .*experts.0.*; not in the model .*experts.8.*",
        ),
        (
            "int4_w4a16",
            lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(32, 2)}),
            r"weight_scale in .* has shape \[32, 2\] where config.json asks for \[32, 4\]",
        ),
        (
            "fp8",
            lambda t: t.update({f"{EXPERT}.weight": torch.ones(32, 64)}),
            "has type F32 where config.json asks for F8_E4M3",
        ),
        (
            "gptq",
            lambda t: t.update({f"{EXPERT}.qzeros": torch.zeros(4, 4)}),
            "qzeros in .* has type F32 where config.json asks for I32",
        ),
    ],
)
def test_bad_checkpoints(
    form: str, change: Change, message: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    quantize(sources["qwen3_moe"], tmp_path / "out", job(form))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_weights(build(tmp_path / "out"), tmp_path / "out")


def test_cache_scales_and_input_scales_are_known(sources: dict[str, Path], tmp_path: Path) -> None:
    quantize(sources["qwen3_moe"], tmp_path / "out", QuantizeJob("nvfp4"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    load_weights(build(tmp_path / "out"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    # hf_quant_config.json still declares the quantisation.
    load_weights(build(tmp_path / "out"), tmp_path / "out")


def test_shards_and_files(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    written = quantize(
        sources["qwen3_moe"], tmp_path / "out", QuantizeJob("fp8", shard_bytes=60_000)
    )
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors" and len(names) > 3
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.bytes_after < written.bytes_before / 2
    assert sorted(set(index["weight_map"].values())) == names
    quantize(sources["qwen3_moe"], tmp_path / "whole", QuantizeJob("fp8"))
    one, many = loaded(tmp_path / "whole"), loaded(tmp_path / "out")
    assert all(torch.equal(x, many[name]) for name, x in one.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_experts_only(sources: dict[str, Path], tmp_path: Path) -> None:
    quantize(sources["deepseek_v3"], tmp_path / "out", replace(job("awq"), experts_only=True))
    before, after = loaded(sources["deepseek_v3"]), loaded(tmp_path / "out")
    for name, w in before.items():
        assert torch.equal(after[name], w) == (".mlp.experts." not in name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.gate" in ignored and "model.layers.0.mlp.up_proj" in ignored


def test_gate_and_up_share_their_global_scale(sources: dict[str, Path], tmp_path: Path) -> None:
    quantize(sources["mixtral"], tmp_path / "out", QuantizeJob("nvfp4"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    stem = "model.layers.0.block_sparse_moe.experts.3"
    gate, up, down = (tensors[f"{stem}.{name}.weight_scale_2"] for name in ("w1", "w3", "w2"))
    assert gate == up != down


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("qwen3_moe", "--format int3", "--format is 'int3'"),
        ("qwen3_moe", "", "--format is missing: choose one of fp8, "),
        ("deepseek_v3", "--format mxfp4", "columns of 32; quantise the experts alone with --exp"),
        ("gpt_oss", "--format fp8", "no standard form for GptOssForCausalLM: choose mxfp4"),
        ("qwen3_moe", "--format fp8 --group-size 32", "format fp8 has no groups to choose"),
        ("deepseek_v3", "--format gptq", "columns of 128; choose --group-size 16"),
    ],
)
def test_refusals(
    family: str,
    words: str,
    message: str,
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["quantize", str(sources[family]), str(tmp_path / "out"), *words.split()]
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_command(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = str(sources["qwen3_moe"]), str(tmp_path / "out")
    assert main(["quantize", source, target, "--format", "fp8"]) == 0
    assert "56 matrices as fp8" in capsys.readouterr().out
    assert main(["quantize", source, target, "--format", "fp8"]) == 2
    assert "exists and is not an empty folder: name a new one" in capsys.readouterr().err
    assert main(["quantize", target, str(tmp_path / "again"), "--format", "awq"]) == 2
    assert "is quantised already (fp8): start from its" in capsys.readouterr().err
    assert tuple(QUANTIZE_FORMATS) == FORMATS


def test_numbers_without_a_scale(sources: dict[str, Path], tmp_path: Path) -> None:
    source = make_tiny_checkpoint("qwen3_moe", tmp_path / "nan")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{EXPERT}.weight"][3, 4] = float("nan")
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"up_proj.weight holds NaN or infinity"):
        quantize(source, tmp_path / "out", QuantizeJob("fp8"))
    assert [path.name for path in tmp_path.iterdir()] == ["nan"]


def reference(source: Path, target: Path, folder: Path) -> Path:
    """Writes an unquantised checkpoint with the decoded numbers of `target`."""
    scheme = detect_scheme(RawConfig.read(target), target)
    with Checkpoint(source) as plain, Checkpoint(target) as checkpoint:
        tensors = {
            name: scheme.find(
                checkpoint, Matrix(name, cast(tuple[int, int], plain.shape(name)))
            ).dense()
            if name not in checkpoint or len(plain.shape(name)) == 2
            else checkpoint.read(name)
            for name in plain.location
        }
    folder.mkdir()
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def test_transformers_reads_fp8(sources: dict[str, Path], tmp_path: Path) -> None:
    oracle = pytest.importorskip("tests.oracle")
    source = sources["qwen3_moe"]
    quantize(source, tmp_path / "out", QuantizeJob("fp8"))
    ours = reference(source, tmp_path / "out", tmp_path / "reference")
    ids = torch.arange(40)[None]
    with torch.no_grad():
        theirs, expected = (oracle.load(path)(ids).logits for path in (tmp_path / "out", ours))
    assert torch.equal(theirs, expected) and expected.abs().max() > 0.5


def test_transformers_reads_mxfp4_stacks(sources: dict[str, Path], tmp_path: Path) -> None:
    oracle = pytest.importorskip("tests.oracle")
    quantize(sources["gpt_oss"], tmp_path / "out", QuantizeJob("mxfp4"))
    state = oracle.load(tmp_path / "out").state_dict()
    for name, w in loaded(tmp_path / "out").items():
        tensor, index, part = name.split()
        if tensor.endswith("experts.gate_up_proj"):
            assert torch.equal(state[tensor][int(index)].t()[int(part) :: 2].float(), w)
        elif tensor.endswith("experts.down_proj"):
            assert torch.equal(state[tensor][int(index)].t().float(), w)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def by_definition(packed: Tensor, scales: Tensor) -> Tensor:
    """Decodes mxfp4 number by number: e2m1 times a power of two per 32 columns."""
    rows = []
    for bytes_of_row, exponents in zip(packed.tolist(), scales.tolist(), strict=True):
        codes = [code for byte in bytes_of_row for code in (byte & 15, byte >> 4)]
        rows.append(
            [
                (-1.0 if code & 8 else 1.0) * E2M1[code & 7] * 2.0 ** (exponents[k // 32] - 127)
                for k, code in enumerate(codes)
            ]
        )
    return torch.tensor(rows)


@pytest.mark.parametrize(("family", "matrices"), [("qwen3_moe", 56), ("deepseek_v3", 24)])
def test_mxfp4_by_definition(
    family: str, matrices: int, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Compares with the definition, and with transformers' decoder if it is installed."""
    job = QuantizeJob(
        "mxfp4", experts_only=family == "deepseek_v3"
    )  # its latents of 16 have no groups
    quantize(sources[family], tmp_path / "out", job)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    found = {
        name: w for name, w in loaded(tmp_path / "out").items() if name.split()[0] not in tensors
    }
    assert len(found) == matrices
    for name, w in found.items():
        stem = name.split()[0].removesuffix(".weight")
        packed, scales = tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]
        assert packed.dtype == scales.dtype == torch.uint8
        assert packed.shape == (w.shape[0], w.shape[1] // 2)
        assert scales.shape == (w.shape[0], w.shape[1] // 32)
        assert torch.equal(by_definition(packed, scales), w) and w.abs().max() > 0.05
    decode = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks = packed.view(1, len(packed), -1, 16)
    assert torch.equal(decode(blocks, scales[None], dtype=torch.float32)[0].t(), w)


def test_compressed_tensors_reads_mxfp4(sources: dict[str, Path], tmp_path: Path) -> None:
    theirs = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor

    quantize(sources["qwen3_moe"], tmp_path / "out", QuantizeJob("mxfp4"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = theirs.quantization.QuantizationConfig.model_validate(config).config_groups["group_0"]
    preset = theirs.quantization.preset_name_to_scheme("MXFP4A16", ["Linear"]).weights
    assert scheme.input_activations is None
    for key in ("num_bits", "type", "strategy", "group_size", "symmetric", "scale_dtype"):
        assert getattr(scheme.weights, key) == getattr(preset, key)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    held = {name.split()[0]: w for name, w in loaded(tmp_path / "out").items()}
    stems = [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]
    assert len(stems) == 56
    for stem in stems:
        parts = {f"weight{part}": tensors[stem + part] for part in ("_packed", "_scale")}
        decoded = MXFP4PackedCompressor.decompress(parts, scheme)["weight"]
        assert torch.equal(decoded.float(), held[stem])
