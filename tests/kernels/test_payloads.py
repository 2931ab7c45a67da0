"""Rows as they travel: as the formats of moe.quant.payload say."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels.payloads import encode_fp4, encode_rows
from moesaic.moe.quant.payload import PAYLOAD_FORMATS


@pytest.mark.parametrize("name", PAYLOAD_FORMATS)
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_the_bits_of_the_formats(name: str, rows: int) -> None:
    x_TH = torch.randn(rows, 192) * torch.logspace(-4, 4, 192)
    x_TH[1:2, :64], x_TH[2:3, 5], x_TH[3:4, 70] = 0, torch.nan, -torch.inf
    scale = 0.03 if name == "nvfp4" else 1.0
    wanted = PAYLOAD_FORMATS[name].encode(x_TH, scale)
    values, scales = encode_rows(x_TH, name, scale)
    assert values.dtype == wanted.values.dtype
    assert torch.equal(values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert (scales is None) == (wanted.scales is None)
    if scales is not None:
        assert scales.dtype == wanted.scales.dtype
        assert torch.equal(scales.view(torch.uint8), wanted.scales.view(torch.uint8))


def test_the_example_of_fp4() -> None:
    assert encode_fp4(torch.tensor([[1.0, -6.0, 0.25, 5.0]])).tolist() == [[0xF2, 0x60]]


def test_an_unknown_payload_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown payload 'fp7': use one of fp32, .* mxfp4"):
        encode_rows(torch.zeros(1, 32), "fp7")
