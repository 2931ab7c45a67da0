"""`moesaic doctor`: layouts against the one-rank model and against tables written by hand."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.cli.doctor_text import size, spans, table
from moesaic.cli.main import main
from moesaic.comm.launch.mps import PROGRAM
from moesaic.engine.setup.device_memory import DeviceRoom, total_memory
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.registry import build_model
from moesaic.models.tiny import FAMILIES, make_tiny_checkpoint
from moesaic.moe.backends import load_backends
from moesaic.moe.layer import FusedMoE
from moesaic.moe.registry import A2A_REGISTRY, RUNNER_REGISTRY

DPA = "--dp 4 --enable-dp-attention"
GIB = 1 << 30


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_tiny_checkpoint(family, root / family) for family in FAMILIES}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, int], list[Any]]:
    """Fakes `count` GPUs of `nbytes` each and the program of MPS; returns the devices that torch is
    set to."""

    def have(count: int, nbytes: int) -> list[Any]:
        chosen: list[torch.device] = []
        room, facts = DeviceRoom(nbytes, nbytes, 0), {"name": "H200", "memory_bytes": nbytes}
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("moesaic.config.devices.cuda_missing", lambda: "")
        monkeypatch.setattr(sys.modules["moesaic.config.resolve"], "cuda_missing", lambda: "")
        monkeypatch.setattr("moesaic.config.devices._num_gpus", lambda: count)
        monkeypatch.setattr(
            "moesaic.cli.machine._gpus", lambda: iter([{**facts, "processors": 132}] * count)
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        monkeypatch.setattr("moesaic.engine.setup.memory_plan.gpu_room", lambda: room)
        monkeypatch.setattr("moesaic.comm.launch.mps_owner.mps_processes", lambda: iter(()))
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
        (tmp_path / PROGRAM).write_text("")
        (tmp_path / PROGRAM).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return chosen

    return have


def ask(capsys: pytest.CaptureFixture[str], line: str, status: int = 0) -> dict[str, Any]:
    assert main(["doctor", *line.split(), "--json"]) == status
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return report


def ranks(report: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report["layout"]["ranks"]
    return found


def whole_bytes(folder: Path) -> tuple[int, int]:
    """Allocates the model on one rank; returns the bytes of dense weights and of experts."""
    model = build_model(RawConfig.read(folder), BuildContext.single(torch.float32, 16))
    experts = [module for module in model.modules() if isinstance(module, FusedMoE)]
    held = [layer.weights.w13_eJH.nbytes + layer.weights.w2_eHI.nbytes for layer in experts]
    biases = [b.nbytes for layer in experts for b in (layer.b13, layer.b2) if b is not None]
    return model.nbytes - sum(held) - sum(biases), sum(held) + sum(biases)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_holds_the_model(
    family: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    (rank,) = ranks(ask(capsys, f"{folders[family]} --max-total-tokens 64"))
    assert (rank["dense_bytes"], rank["expert_bytes"]) == whole_bytes(folders[family])
    assert rank["experts"] == list(range(8))
    assert rank["layers"] == [0, 1]
    assert rank["cache_bytes"] == 64 * rank["cache_bytes_per_token"]
    assert (rank["a2a_bytes"], rank["collective_bytes"]) == (0, 0)
    assert rank["total_bytes"] == sum(
        rank[f"{kind}_bytes"] for kind in ("dense", "expert", "cache", "table")
    )


@pytest.mark.parametrize("a2a", ["none", "deepep", "mooncake", "mori", "flashinfer"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_expert_bytes_fall_as_one_by_ep(
    family: str, a2a: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    _, whole = whole_bytes(folders[family])
    for ep in (2, 4, 8):
        line = f"{folders[family]} --tp 8 --dp 8 --enable-dp-attention --ep {ep}"
        found = ranks(ask(capsys, f"{line} --moe-a2a-backend {a2a}"))
        # The first rank that shares an expert holds the bias of the down projection.
        first = [rank for rank in found if rank["moe_tp_rank"] == 0]
        biases = 0 if family != "gpt_oss" else 2 * 8 * 64 * 4 // ep
        held = {rank["expert_bytes"] for rank in first}
        assert held == {(whole - biases * ep) // 8 + biases}
        experts = [expert for rank in first for expert in rank["experts"]]
        assert experts == list(range(8))
        assert all(rank["a2a_bytes"] > 0 for rank in found)


def test_tensor_parallel_ranks_share_everything(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    dense, experts = whole_bytes(folders["qwen3_moe"])
    report = ask(capsys, f"{folders['qwen3_moe']} --tp 2")
    for rank in ranks(report):
        assert rank["expert_bytes"] == experts // 2
        # Norms (each layer's two, of hidden size, and q's and k's), the last norm and the routers.
        replicated = (2 * (2 * 64 + 2 * 16) + 64 + 2 * 8 * 64) * 4
        assert rank["dense_bytes"] == (dense - replicated) // 2 + replicated
        assert (rank["query_heads"], rank["kv_heads"]) == (2, 1)
        assert rank["cache_bytes_per_token"] == 2 * 1 * (16 + 16) * 4
        assert rank["experts"] == list(range(8))


def test_attention_groups_hold_all_heads(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    report = ask(capsys, f"{folders['deepseek_v3']} --tp 4 {DPA} --moe-a2a-backend deepep")
    assert report["layout"]["mesh"] == {
        "world": 4,
        "nnodes": 1,
        "replicas": 1,
        "pp": 1,
        "tp": 4,
        "dp": 4,
        "attention_tp": 1,
        "ep": 4,
        "moe_tp": 1,
        "dense_tp": 4,
        "vocab_tp": 4,
    }
    assert [rank["experts"] for rank in ranks(report)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert {rank["query_heads"] for rank in ranks(report)} == {4}
    assert {tuple(rank["moe_layers"]) for rank in ranks(report)} == {(1,)}
    flags = {change["flag"]: change["value"] for change in report["flags"]}
    assert flags["--ep-size"] == 4
    assert report["layout"]["moe"]["a2a"] == "deepep"
    assert any("runner" in reason for reason in report["layout"]["moe"]["reasons"])


def test_stages_hold_their_layers(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    dense, experts = whole_bytes(folders["mixtral"])
    line = f"{folders['mixtral']} --pp 2 --nnodes 2 --dist-init-addr h:1"
    first, second = ranks(ask(capsys, line))
    assert (first["layers"], second["layers"]) == ([0], [1])
    assert (first["node"], second["node"]) == (0, 1)
    assert first["expert_bytes"] == second["expert_bytes"] == experts // 2
    assert first["dense_bytes"] + second["dense_bytes"] == dense
    assert first["collective_bytes"] > 0


def test_a_plan_for_nodes_needs_no_address(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    line = f"{folders['mixtral']} --pp 2 --nnodes 2"
    placed, planned = ask(capsys, f"{line} --dist-init-addr h:1"), ask(capsys, line)
    assert ranks(planned) == ranks(placed)
    (note,) = set(planned["notes"]) - set(placed["notes"])
    assert note == "a server of several nodes needs --dist-init-addr, unless a launcher tells it"


def test_replicas_are_alike(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    report = ask(capsys, f"{folders['qwen2_moe']} --tp 2 --dp 2")
    found = ranks(report)
    assert [rank["replica"] for rank in found] == [0, 0, 1, 1]
    assert found[0]["total_bytes"] == found[2]["total_bytes"]
    assert report["layout"]["node_bytes"] == [sum(rank["total_bytes"] for rank in found)]


def test_deterministic_mode_cuts_no_expert(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    _, whole = whole_bytes(folders["qwen3_moe"])
    line = f"{folders['qwen3_moe']} --tp 4 --ep 2 {DPA}"
    cut = ask(capsys, line)
    assert {rank["expert_bytes"] for rank in ranks(cut)} == {whole // 4}
    held = ask(capsys, f"{line} --enable-deterministic-inference")
    assert {rank["expert_bytes"] for rank in ranks(held)} == {whole // 2}
    assert [rank["experts"][0] for rank in ranks(held)] == [0, 0, 4, 4]
    assert (cut["layout"]["moe"]["copies"], held["layout"]["moe"]["copies"]) == (1, 2)


@pytest.mark.parametrize(("flags", "cut"), [("--tp 4", 4), (f"--tp 4 {DPA}", 1)])
def test_deterministic_mode_cuts_no_sum(
    flags: str, cut: int, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
):
    """Attention's output projections are cut in `cut`, dense layers in four: 64 channels, 2 layers,
    4 heads with values of 16, an inner size of 96 in the dense layer, 32 in the shared expert."""
    line = f"{folders['deepseek_v3']} {flags} --ep 4"
    usual, held = ask(capsys, line), ask(capsys, f"{line} --enable-deterministic-inference")
    outputs, down = 2 * 4 * 16 * 64 * 4, (96 + 32) * 64 * 4
    more = outputs - outputs // cut + down - down // 4
    for before, after in zip(ranks(usual), ranks(held), strict=True):
        assert after["dense_bytes"] - before["dense_bytes"] == more
        assert after["query_heads"] == before["query_heads"] == 4 // cut
    assert main(["doctor", *line.split(), "--enable-deterministic-inference"]) == 0
    assert "every rank holds whole the weights whose products" in capsys.readouterr().out


def test_redundant_slots(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    line = f"{folders['qwen3_moe']} --tp 3 --dp 3 --enable-dp-attention --ep 3"
    for asked in (0, 1):
        found = ranks(ask(capsys, f"{line} --ep-num-redundant-experts {asked}"))
        assert [rank["experts"] for rank in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
        assert [rank["first_slot"] for rank in found] == [0, 3, 6]
    found = ranks(ask(capsys, f"{line} --ep-num-redundant-experts 2"))
    assert [rank["experts"] for rank in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("family", "flags", "reason"),
    [
        ("qwen3_moe", "--pp 3", "--pp-size 3 is more than the model's 2 layers"),
        ("qwen3_moe", "--tp 3", "cannot be split over 3 ranks"),
        ("qwen3_moe", "--tp 8 --ep 8", "4 ranks of attention|4 with num_key_value_heads 2"),
        ("deepseek_v3", "--tp 8 --ep 8", "num_attention_heads 4 cannot be split over 8 ranks"),
        ("qwen3_moe", "--tp 2 --ep 3", "raise --tp-size to 3 or lower --ep-size"),
        ("qwen3_moe", "--moe-a2a-backend mooncake --deepep-mode normal", "has no normal mode"),
        ("qwen3_moe", "--moe-runner-backend flashinfer_mxfp4", "fp32 weights"),
        ("qwen3_moe", "--context-length 9999", "is longer than the model's max_position"),
        ("qwen3_moe", "--max-total-tokens 999999999999", "needs"),
        ("qwen3_moe", "--gpu-id-step 2", "not built yet: --gpu-id-step 2"),
        ("qwen3_moe", "--quantization awq", "the checkpoint is not quantised"),
    ],
)
def test_what_cannot_work_is_said(
    family: str,
    flags: str,
    reason: str,
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
):
    report = ask(capsys, f"{folders[family]} {flags}", 1)
    assert len(report["problems"]) == 1
    assert re.search("|".join(map(re.escape, reason.split("|"))), report["problems"][0])
    assert main(["doctor", str(folders[family]), *flags.split()]) == 1
    text = capsys.readouterr().out
    assert f"This cannot work:\n  - {report['problems'][0]}\n" in text


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("tiny:nothing", "unknown tiny model 'nothing'"),
        ("no/such/folder", "--model-path no/such/folder is not a folder"),
    ],
)
def test_unknown_model(model: str, reason: str, capsys: pytest.CaptureFixture[str]):
    report = ask(capsys, model, 1)
    assert reason in report["problems"][0]
    assert report["machine"]["memory"]["total_bytes"] == total_memory()


def test_all_wrong_flags_are_listed_without_a_model(capsys: pytest.CaptureFixture[str]):
    report = ask(capsys, "--tp 8 --ep 3 --node-rank 2", 1)
    assert len(report["problems"]) == 2
    assert (report["model"], report["layout"], report["flags"]) == (None, None, [])


def test_weights_that_do_not_fit(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("moesaic.engine.setup.device_memory.total_memory", lambda: 2**20)
    report = ask(capsys, f"{folders['qwen3_moe']} --tp 2", 1)
    (problem,) = report["problems"]
    assert problem.startswith("weights and buffers of the 2 ranks of a node take")
    assert report["layout"]["cache_tokens"] is None
    assert len(ranks(report)) == 2
    monkeypatch.undo()
    monkeypatch.setattr("moesaic.engine.setup.device_memory.free_memory", lambda: 2**20)
    (problem,) = ask(capsys, f"{folders['qwen3_moe']} --tp 2", 1)["problems"]
    assert problem.startswith("nothing is left for a KV cache")


def test_the_gpu_that_is_asked_for(
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    gpus: Callable[[int, int], list[Any]],
):
    """The free memory and the report are those of the chosen GPU, not of the machine."""
    chosen = gpus(2, 8 * GIB)
    words = ["doctor", str(folders["qwen3_moe"]), "--device", "cuda", "--base-gpu-id"]
    assert main([*words, "1"]) == 0
    assert chosen == [torch.device("cuda", 1)]
    text = capsys.readouterr().out
    assert "in the largest step, and its graphs" in text and "a node takes" not in text
    assert "1 rank, a GPU each" in text
    for flags in ("2", "2 --tp 4"):
        report = ask(capsys, " ".join([*words[1:], flags]), 1)
        assert report["problems"] == [
            "--device cuda cannot do this: --base-gpu-id 2: there are 2 GPUs, numbered from 0; "
            "leave it out or give --device cpu"
        ]


def test_the_default_cache_is_half_of_what_is_free(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    fixed = sum(
        rank["total_bytes"] - rank["cache_bytes"]
        for rank in ranks(ask(capsys, f"{folders['qwen3_moe']} --tp 2"))
    )
    monkeypatch.setattr(
        "moesaic.engine.setup.device_memory.free_memory", lambda: fixed + 4 * 100 * 16 * 256
    )
    report = ask(capsys, f"{folders['qwen3_moe']} --tp 2")
    assert report["layout"]["cache_tokens"] == 100 * 16


NATIVE = {"cpu": "native", "cuda": "native"}


def test_backends_without_a_model(capsys: pytest.CaptureFixture[str]):
    backends = ask(capsys, "")["backends"]
    load_backends()
    assert [row["name"] for row in backends["a2a"]] == [*A2A_REGISTRY]
    assert [row["name"] for row in backends["runners"]] == [*RUNNER_REGISTRY]
    assert (backends["weights"], backends["device"]) == ("bf16", "cpu")
    runs = {row["name"]: row for row in backends["a2a"] + backends["runners"]}
    assert runs["deepep"]["runs"] and runs["deepep"]["providers"] == NATIVE
    assert all(row["runs"] for row in backends["a2a"])
    assert not runs["flashinfer_mxfp4"]["runs"]
    assert "does not compute with bf16 weights" in runs["flashinfer_mxfp4"]["reason"]
    assert {row["module"] for row in backends["libraries"]} >= {"deep_ep", "deep_gemm"}


def test_text(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    line = f"{folders['qwen3_moe']} --tp 4 {DPA} --moe-a2a-backend mori --max-total-tokens 1024"
    line += " --elastic-ep-backend mooncake --weight-cache-mode daemon"
    assert main(["doctor", *line.split()]) == 0
    text = capsys.readouterr().out
    for title in ("Machine\n", "All-to-all backends (fp32", "Runner backends", "Layout of"):
        assert title in text
    assert text.endswith("No problem found.\n")
    assert "--ep-size" in text
    rows = [line.split() for line in text.splitlines() if re.match(r" +[0-3] +0 +0", line)]
    assert [row[:9] for row in rows] == [
        [str(r), "0", "0", str(r), str(r), str(r), "0-1", f"{2 * r}-{2 * r + 1}", "4/2"]
        for r in range(4)
    ]
    assert "KV cache of 1024 tokens on every rank, at most 512 bytes a token and rank" in text
    assert re.search(r"  1\.\d MiB of weights are in memory that outlives ranks, and n", text)


def test_nothing_is_loaded(folders: dict[str, Path]):
    """The layout needs no weights: a folder with only a config.json is enough."""
    config = folders["qwen3_moe"] / "config.json"
    bare = folders["qwen3_moe"].parent / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "config.json").write_text(config.read_text())
    assert main(["doctor", str(bare), "--tp", "2"]) == 0


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", {"eos_token_id": 10**30}, "eos_token_id is 10000"),
        ("config.json", {"num_hidden_layers": 1000}, "num_hidden_layers is 1000, but the tensors"),
        ("tokenizer_config.json", {"added_tokens_decoder": []}, "added_tokens_decoder is []"),
        ("tokenizer_config.json", {"chat_template": "{% for"}, "chat template"),
        ("generation_config.json", {"temperature": "hot"}, "temperature is 'hot'"),
        ("model.safetensors.index.json", {"weight_map": {"x": "../passwd"}}, "'../passwd'"),
    ],
)
def test_files_that_a_server_would_refuse(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: dict[str, object],
    told: str,
):
    copy = tmp_path / "copy"
    shutil.copytree(folders["qwen3_moe"], copy)
    before = json.loads((copy / name).read_text()) if (copy / name).is_file() else {}
    (copy / name).write_text(json.dumps(before | content))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    assert main(["doctor", str(copy)]) == 1
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_size(nbytes: int, text: str):
    assert size(nbytes) == text


@pytest.mark.parametrize(
    ("numbers", "text"), [([], "-"), ([3], "3"), ([0, 1, 2, 5], "0-2,5"), ([6, 7, 0], "6-7,0")]
)
def test_spans(numbers: list[int], text: str):
    assert spans(numbers) == text


def test_table():
    assert list(table(("a", "b"), [("1", "200"), ("10", "3")])) == [
        "   a    b",
        "   1  200",
        "  10    3",
    ]
    assert list(table((), [("x", "one"), ("long", "two")])) == ["  x     one", "  long  two"]


def test_ranks_that_share_a_gpu_have_parts_of_it(
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    gpus: Callable[[int, int], list[Any]],
):
    """Two ranks share the memory that weights and buffers leave: each gets half for pages."""
    gpus(1, 2 * GIB)
    given = f"{folders['qwen3_moe']} --device cuda --mem-fraction-static 0.25"
    given += " --max-running-requests 4096 --context-length 2048 --chunked-prefill-size 64"
    groups = "--tp 2 --dp 2 --ep 2 --enable-dp-attention --moe-a2a-backend deepep"
    report = ask(capsys, f"{given} {groups}")
    (first, second), tokens = ranks(report), report["layout"]["cache_tokens"]
    fixed = first["total_bytes"] - first["cache_bytes"]
    assert first["cache_bytes"] == second["cache_bytes"] > 0
    room_left = int(0.25 * (1 << 30)) - fixed
    per_page = first["cache_bytes"] // tokens * 16
    assert tokens == room_left // per_page * 16


GROUPS = "--device cuda --dp {0} --tp {0} --ep {0} --enable-dp-attention --moe-a2a-backend deepep"


@pytest.mark.parametrize(
    ("count", "held", "shares"),
    [
        (4, [[0], [1], [2], [3]], "4 ranks, a GPU each"),
        (
            2,
            [[0, 1], [2, 3]],
            "4 ranks share 2 GPUs under MPS (GPU 0: ranks 0-1, GPU 1: ranks 2-3); each has "
            "at least 1/2 of a GPU's memory",
        ),
    ],
)
def test_what_a_gpu_takes(
    count: int,
    held: list[list[int]],
    shares: str,
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    gpus: Callable[[int, int], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
):
    """A GPU's memory is the sum over its own ranks, not over all ranks of the node."""
    gpus(count, 8 * GIB)
    line = f"{folders['qwen3_moe']} {GROUPS.format(4)} --max-total-tokens 1024"
    report = ask(capsys, line)
    found, each = report["layout"]["gpus"], 4 // count
    assert [gpu["ranks"] for gpu in found] == held
    assert [rank["gpu"] for rank in ranks(report)] == [r // each for r in range(4)]
    for kind in ("total_bytes", "step_bytes"):
        (one,) = {rank[kind] for rank in ranks(report)}
        assert one > 0 and [gpu[kind] for gpu in found] == [one * each] * count
    assert report["notes"] == []
    assert main(["doctor", *line.split()]) == 0
    text = capsys.readouterr().out
    assert f"  {shares}\n" in text
    assert f"  the fullest GPU takes {size(found[0]['total_bytes'])}, about " in text
    assert "  mps daemon    none runs; a server starts its own\n" in text
    monkeypatch.setattr("moesaic.comm.launch.mps_owner.mps_processes", lambda: iter((7,)))
    assert main(["doctor", *line.split()]) == 0
    told = "one runs; a server starts its own unless CUDA_MPS_PIPE_DIRECTORY names it"
    assert f"  mps daemon    {told}\n" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/nowhere")
    assert main(["doctor", *line.split()]) == 0
    told = "none answers in /nowhere, which CUDA_MPS_PIPE_DIRECTORY names; a server starts its own"
    assert f"  mps daemon    {told}\n" in capsys.readouterr().out


def test_ranks_that_would_find_no_mps(
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    gpus: Callable[[int, int], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
):
    gpus(1, 8 * GIB)
    monkeypatch.setenv("PATH", "/nowhere")
    line = GROUPS.format(2)
    for model in ("", folders["qwen3_moe"]):
        report = ask(capsys, f"{model} {line}", 1)
        (problem,) = report["problems"]
        assert problem.startswith(f"{PROGRAM} is not on PATH: ranks that share a GPU need it")
        assert (report["layout"] is None) == (model == "")
    assert main(["doctor", *line.split()]) == 1
    assert f"  mps daemon    {PROGRAM} is not on PATH\n" in capsys.readouterr().out
    ask(capsys, f"{folders['qwen3_moe']} --device cuda")


def test_what_may_not_be_as_one_expects(
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
    gpus: Callable[[int, int], list[Any]],
):
    gpus(1, 80 * GIB)
    told = '{"normal_dispatch":{"num_sms":133,"num_max_nvl_chunked_send_tokens":8}}'
    line = f"{GROUPS.format(9)} --deepep-config {told}"
    wanted = [
        "9 ranks share a GPU, and more than 8 are untested: CUDA may run out of queues, which "
        'it reports as "out of memory"',
        "--deepep-config: nothing is sent in chunks here: "
        "normal_dispatch.num_max_nvl_chunked_send_tokens",
        "--deepep-config: num_sms 133 of normal_dispatch bounds nothing: the GPU has 132 "
        "multiprocessors",
    ]
    assert ask(capsys, line)["notes"] == wanted
    assert main(["doctor", *line.split()]) == 0
    assert "\n".join(["Worth knowing", *(f"  - {note}" for note in wanted)]) in (
        capsys.readouterr().out
    )
