"""Arguments and files of the GPU benchmarks, without a GPU."""

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bench import experts_large, gpu, moe_layer
from bench.moe_layer_gpu import Point, Shape, limit, merged
from moesaic.kernels.triton.experts_product import LargeConfig

POINT = Point("qwen3_30b", "bf16", "uniform", 8, 60, 100.0, 90.0, {}, 1e-3)


def test_files_are_named_by_the_gpu():
    assert gpu.named("linear", "NVIDIA H200") == "h200_linear"
    assert gpu.named("moe_layer", "NVIDIA A100-SXM4-80GB") == "a100_sxm4_80gb_moe_layer"


def test_the_limit_of_a_layer_counts_bytes_and_operations(monkeypatch: pytest.MonkeyPatch):
    """bf16 weights have two bytes, fp8 one and a scale of four bytes for each block of 128 x 128;
    rows of two bytes are read and written."""
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda: 1.0)
    monkeypatch.setattr(gpu, "matrix_rate", lambda dtype: 1e30)
    shape, numbers, rows = Shape(8, 2, 256, 128), 3 * 256 * 128, 4 * 5 * 256
    assert limit(shape, "bf16", tokens=5, touched=7) == 7 * 2 * numbers + rows
    assert limit(shape, "fp8", tokens=5, touched=7) == 7 * (numbers + 4 * 6) + rows
    monkeypatch.setattr(gpu, "matrix_rate", lambda dtype: 1e-3)
    assert limit(shape, "bf16", tokens=5, touched=7) == pytest.approx(2 * 5 * 2 * numbers * 1e3)


def test_a_run_of_a_part_loses_no_points(tmp_path: Path):
    path = tmp_path / "found.json"
    points = [replace(POINT, tokens=tokens) for tokens in (1, 8, 32)]
    assert merged(path, points) == [asdict(point) for point in points]
    path.write_text(json.dumps(merged(path, points)))
    rows = merged(path, [replace(POINT, us=95.0), replace(POINT, dtype="fp8")])
    assert [(row["dtype"], row["tokens"], row["us"]) for row in rows] == [
        ("bf16", 1, 100.0),
        ("bf16", 8, 95.0),
        ("bf16", 32, 100.0),
        ("fp8", 8, 100.0),
    ]


def test_the_device_of_the_layer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["--device", "cuda"], ["--device=cuda", "--tokens", "8"]):
        with pytest.raises(SystemExit, match="needs a CUDA device"):
            moe_layer.main(words)
    with pytest.raises(SystemExit):
        moe_layer.main(["--device", "cuda", "--tokens", "0"])
    assert "'0' is no whole number above 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        moe_layer.main(["--device", "gpu"])
    assert "argument --device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        moe_layer.main(["--help"])
    assert "--device {cpu,cuda}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        moe_layer.main(["--device", "cuda", "--help"])
    assert "--routings" in capsys.readouterr().out


def test_configurations_of_many_rows_are_ones_that_exist() -> None:
    for changes in experts_large.CONFIGS.values():
        replace(LargeConfig(), **changes)


def parsers(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "argparse.ArgumentParser":
            yield node


def test_every_benchmark_is_named_by_how_it_is_called() -> None:
    """Every parser has a name: with `python -m` argparse would print the file's."""
    bench = Path(gpu.__file__).parent
    found = [(path.name, one) for path in bench.glob("*.py") for one in parsers(path)]
    assert len(found) > 20
    assert [name for name, one in found if not one.args] == []
