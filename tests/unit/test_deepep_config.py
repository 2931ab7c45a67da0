"""--deepep-config: allowed values, refusals, and its effect on kernels."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.comm.collectives.group import RankGroup
from moesaic.config import devices
from moesaic.config.deepep import DeepEPConfig, read_deepep_config
from moesaic.config.resolve import resolve
from moesaic.engine.setup.moe_setup import _programs
from moesaic.moe.dispatch.base import CommContext, DispatchConfig
from moesaic.moe.dispatch.deepep import DeviceNormal
from moesaic.moe.dispatch.host.low_latency import DeviceLowLatency
from moesaic.moe.placement import EpLayout
from moesaic.moe.quant.payload import PAYLOAD_FORMATS
from tests.unit.test_config import parse

BOTH = '{"normal_dispatch": {"num_sms": 24}, "normal_combine": {"num_sms": 12}}'
RANKS = "--model-path m --tp 2 --dp 2 --enable-dp-attention --moe-a2a-backend deepep"


def test_what_it_says(tmp_path: Path):
    assert read_deepep_config(BOTH) == DeepEPConfig(24, 12)
    path = tmp_path / "config.json"
    path.write_text('{"normal_combine": {"num_sms": 8, "num_max_nvl_chunked_send_tokens": 16}}')
    idle = ("normal_combine.num_max_nvl_chunked_send_tokens",)
    assert read_deepep_config(str(path)) == DeepEPConfig(0, 8, idle)
    assert list(DeepEPConfig(0, 8, idle).notes(132)) == [
        f"--deepep-config: nothing is sent in chunks here: {idle[0]}"
    ]
    assert list(DeepEPConfig(132, 133).notes(132)) == [
        "--deepep-config: num_sms 133 of normal_combine bounds nothing: the GPU has 132 "
        "multiprocessors"
    ]
    assert list(DeepEPConfig(132, 133).notes(0)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.json", "nowhere.json is neither a JSON object nor a readable file"),
        ("{", "--deepep-config is not valid JSON"),
        (" ", "--deepep-config is empty: give JSON, or the path of a JSON file"),
        ("[1]", "--deepep-config is '[1]': give an object of normal_dispatch and normal_combine"),
        ("{}", "--deepep-config names no num_sms: give one, or leave it out"),
        ('{"normal_dispatch": {}}', "--deepep-config names no num_sms: give one, or leave it out"),
        (
            '{"normal_dispatch": {"num_sms": 8, "num_sms": 9}}',
            "is not valid JSON ('num_sms' is given twice)",
        ),
        ('{"normal_combine": {"num_sms": 1025}}', "is 1025: give a whole number from 1 to 1024"),
        ('{"dispatch": {}}', "'dispatch': give objects normal_dispatch and normal_combine"),
        ('{"normal_dispatch": {"sms": 2}}', "normal_dispatch has no 'sms': give num_sms, "),
        ('{"normal_dispatch": {"num_sms": 0}}', "num_sms of normal_dispatch is 0: give a whole"),
        ('{"normal_dispatch": {"num_sms": true}}', "is True: give a whole number from 1 to 1024"),
    ],
)
def test_what_it_cannot_say(text: str, message: str):
    with pytest.raises(ValueError) as caught:
        read_deepep_config(text)
    assert message in str(caught.value)


def test_where_it_is_refused(monkeypatch: pytest.MonkeyPatch):
    def told(line: str) -> str:
        with pytest.raises(ValueError) as caught:
            resolve(replace(parse(f"{RANKS} {line}"), deepep_config=BOTH))
        return str(caught.value)

    assert "leave it out on cpu" in told("--device cpu")
    assert "is for normal mode: give --moe-a2a-backend deepep" in told("--moe-a2a-backend mori")
    assert "with --deepep-mode normal or auto" in told("--deepep-mode low_latency")
    monkeypatch.setattr(devices, "_torch_cuda", lambda: "13.0")
    monkeypatch.setattr(devices, "_num_gpus", lambda: 1)
    args = resolve(replace(parse(f"{RANKS} --device cuda"), deepep_config=BOTH))
    assert _programs(args) == {"dispatch_programs": 24, "combine_programs": 12}


def test_kernels_of_normal_mode_hear_of_it():
    config = DispatchConfig(
        EpLayout(4), 2, 32, torch.float32, PAYLOAD_FORMATS["fp32"], 4, 4,
        lanes=1, dispatch_programs=24, combine_programs=12,
    )  # fmt: skip
    comm = CommContext(RankGroup.alone(), 1.0)
    normal, low_latency = DeviceNormal(config, comm), DeviceLowLatency(config, comm)
    assert [call.programs for call in normal._calls[0]] == [24, 12, 12]
    assert {call.programs for call in low_latency._calls[0]} == {0}
