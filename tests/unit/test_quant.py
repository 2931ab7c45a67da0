"""Number formats against worked examples, independent definitions and their error bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moesaic.moe.quant import numerics
from moesaic.moe.quant.codecs import Fp8, Nvfp4
from moesaic.moe.quant.payload import PAYLOAD_FORMATS, Payload, PayloadFormat
from moesaic.moe.quant.weights import WEIGHT_FORMATS, ExpertMatrix, WeightFormat, int4_format

WEIGHTS = [
    *WEIGHT_FORMATS.values(),
    int4_format(32),
    int4_format(64, symmetric=False),
]
PAYLOADS = list(PAYLOAD_FORMATS.values())
QUANTISED = [format for format in PAYLOADS if format.scales]
NAN = float("nan")


def label(format: WeightFormat | PayloadFormat) -> str:
    return format.name


each_weight = pytest.mark.parametrize("format", WEIGHTS, ids=label)
each_payload = pytest.mark.parametrize("format", PAYLOADS, ids=label)
each_quantised = pytest.mark.parametrize("format", QUANTISED, ids=label)


def bytes_of(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def samples(rows: int, cols: int) -> dict[str, Tensor]:
    torch.manual_seed(rows * 10007 + cols)
    x = torch.randn(rows, cols)
    outlier = x.clone()
    outlier[rows // 2 :, cols // 3] = 3e4
    return {
        "random": x,
        "tiny": x * 1e-36,
        "subnormal": x * 1e-42,
        "huge": x * 1e37,
        "mixed": x * torch.exp2(torch.randint(-60, 60, (rows, 1))),
        "ragged magnitudes": x * torch.exp2(torch.randint(-12, 12, (rows, cols))),
        "outlier": outlier,
        "zero": torch.zeros(rows, cols),
        "one sided": x.abs() + 3,
        "bf16": x.bfloat16(),
    }


def within(bound: Tensor, x: Tensor, decoded: Tensor) -> None:
    assert bound.dtype == torch.float64 and bound.shape == x.shape
    error = (decoded.double() - x.double()).abs()
    known = bound.isfinite()
    assert bool((error <= bound)[known].all()), float((error / bound)[known].max())


def test_fp8_example() -> None:
    w = torch.tensor([[448.0, 1.0, -4.0]])
    values, scales = numerics.encode_fp8(w, 1, 2)
    assert bytes_of(values) == [0x7E, 0x38, 0xFE]
    assert torch.equal(scales, torch.tensor([[1.0, 4 / 448]]))
    assert torch.equal(numerics.decode_fp8(values, scales, 1, 2), w)


def test_fp8_blocks_of_rows_and_columns() -> None:
    w = torch.tensor([[448.0, 2, 0], [1, 4, 896], [0, 0, 1792]])
    values, scales = numerics.encode_fp8(w, 2, 2)
    assert torch.equal(scales, torch.tensor([[1.0, 2], [1, 4]]))
    expected = [[448.0, 2, 0], [1, 4, 448], [0, 0, 448]]
    assert torch.equal(values.float(), torch.tensor(expected))


def test_int8_example() -> None:
    values, scales = numerics.encode_int8(torch.tensor([[127.0, -3, 0.5], [0, 0, 0], [-254, 3, 1]]))
    assert values.tolist() == [[127, -3, 0], [0, 0, 0], [-127, 2, 0]]
    assert scales.tolist() == [[1], [1], [2]]


def test_int4_examples() -> None:
    packed, scales, zeros = numerics.encode_int4(torch.tensor([[-7.0, 7, 1, 0]]), 4)
    assert bytes_of(packed) == [0xF1, 0x89] and scales.item() == 1 and zeros.item() == 8
    packed, scales, zeros = numerics.encode_int4(torch.tensor([[-2.0, 0, 3, 28]]), 4, False)
    assert bytes_of(packed) == [0x10, 0xF3] and scales.item() == 2 and zeros.item() == 1
    assert numerics.decode_int4(packed, scales, zeros).tolist() == [[-2, 0, 4, 28]]


def test_fp4_example() -> None:
    assert bytes_of(numerics.encode_fp4(torch.tensor([[1.0, -6, 0.25, 5]]))) == [0xF2, 0x60]


def test_nvfp4_example() -> None:
    w = torch.zeros(1, 32)
    w[0, :3] = torch.tensor([12.0, -1, 4])
    values, scales, of_rows = numerics.encode_nvfp4(w, 0.5)
    assert bytes_of(values) == [0x97, 0x04] + [0] * 14
    assert bytes_of(scales) == [0x48, 0x38]  # 4 and, for zeros, 1
    assert of_rows.tolist() == [[0.5]]
    decoded = numerics.decode_nvfp4(values, scales, of_rows)
    assert decoded[0, :3].tolist() == [12, -1, 4]
    computed = numerics.encode_nvfp4(w * 224)[2]
    assert computed.item() == 1.0
    assert numerics.encode_nvfp4(torch.zeros(2, 16))[2].tolist() == [[1], [1]]


def test_mxfp4_example() -> None:
    w = torch.zeros(1, 96)
    w[0, :4] = torch.tensor([24.0, -2, 4, 1])
    w[0, 32:35] = torch.tensor([7.0, 4, 0.5])  # rounds to 8: the next scale
    values, scales = numerics.encode_mxfp4(w)
    assert scales.tolist() == [[129, 128, 127]]
    assert bytes_of(values)[:2] == [0x97, 0x02] and bytes_of(values)[16:18] == [0x46, 0x00]
    decoded = numerics.decode_mxfp4(values, scales)
    assert decoded[0, :4].tolist() == [24, -2, 4, 0]
    assert decoded[0, 32:35].tolist() == [8, 4, 0]


def nearest_fp4(x: float) -> int:
    """The code whose number is nearest, the even one of two, found by trying all."""
    best = min(range(8), key=lambda code: (abs(numerics.FP4_GRID[code] - abs(x)), code % 2))
    return best + (8 if math.copysign(1, x) < 0 else 0)


def test_fp4_is_nearest_with_ties_to_even() -> None:
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    near = [tie * (1 + side * 2**-22) for tie in ties for side in (-1, 1)]
    x = [*ties, *near, *numerics.FP4_GRID, *torch.rand(500).mul(9).tolist(), 1e6, 1e-40]
    x += [-value for value in x]
    codes = numerics.unpack(numerics.encode_fp4(torch.tensor([x])))
    expected = [nearest_fp4(value) for value in torch.tensor(x).tolist()]
    assert codes[0].tolist() == expected


def test_every_fp4_byte_decodes_and_encodes_back() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(2, 128)
    decoded = numerics.decode_fp4(packed)
    codes = [code for byte in range(256) for code in (byte & 15, byte >> 4)]
    expected = [math.copysign(numerics.FP4_GRID[c & 7], -1 if c & 8 else 1) for c in codes]
    assert decoded.flatten().tolist() == expected
    assert torch.equal(numerics.encode_fp4(decoded), packed)


@pytest.mark.parametrize("shape", [(65536, 2), (256, 512), (1, 131071)])
def test_every_fp8_pair_decodes_as_torch_does(shape: tuple[int, int]) -> None:
    """An odd number of values takes another way than an even one."""
    pairs = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(numerics.FP8)
    values = pairs[: math.prod(shape)].view(shape)
    decoded = numerics.decode_fp8(values, torch.ones(shape[0], 1), 1, shape[1])
    torch.testing.assert_close(decoded, values.float(), rtol=0, atol=0, equal_nan=True)


def test_fp8_from_an_odd_address() -> None:
    values = torch.arange(9, dtype=torch.uint8).view(numerics.FP8)[1:].view(2, 4)
    decoded = numerics.decode_fp8(values, torch.ones(2, 1), 1, 4)
    assert torch.equal(decoded, values.float())


def test_e8m0_scales_are_torchs() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(torch.float8_e8m0fnu).float()
    scales = numerics.mxfp4_scales(every)
    torch.testing.assert_close(scales, expected, rtol=0, atol=0, equal_nan=True)


def test_mxfp4_takes_the_smallest_scale_within_half_a_step() -> None:
    for amax in (1.0, 1.5, 1.74, 1.75, 1.99, 2.0, 3.49, 3.5, 6.0, 6.99, 7.0, 2.0**-100, 3e38):
        amax = torch.tensor(amax).item()
        w = torch.zeros(1, 32)
        w[0, 5] = -amax
        _, scales = numerics.encode_mxfp4(w)
        exponent = scales.item() - 127
        assert 3.5 <= amax / 2.0**exponent < 7, amax


@each_weight
@pytest.mark.parametrize("rows, cols", [(3, 128), (130, 384), (257, 128)])
def test_weights_round_trip_within_the_bound(format: WeightFormat, rows: int, cols: int) -> None:
    for name, w in samples(rows, cols).items():
        planes = format.encode(w)
        layout = {key: (tuple(plane.shape), plane.dtype) for key, plane in planes.items()}
        assert layout == format.planes(rows, cols)
        assert sum(plane.nbytes for plane in planes.values()) == format.nbytes(rows, cols)
        decoded = format.decode(planes, torch.empty(rows, cols))
        bound = format.error_bound(w)
        within(bound, w, decoded)
        if format.name != "fp16":  # cannot hold the large ones
            assert bool(decoded.isfinite().all() and bound.isfinite().all()), name
        if name == "zero":
            assert not decoded.any()
        if name == "random" and format.name != "fp32":
            tightness = ((decoded - w).abs() / bound).max()
            assert 0.9 < tightness <= 1, "a bound that nothing comes near proves nothing"


@each_payload
@pytest.mark.parametrize("rows, hidden", [(0, 128), (1, 32), (5, 160), (17, 384)])
def test_payloads_round_trip_within_the_bound(
    format: PayloadFormat, rows: int, hidden: int
) -> None:
    for x in samples(rows, hidden).values():
        payload = format.encode(x)
        within(format.error_bound(x), x, payload.dense(torch.float32))
        assert (len(payload), payload.hidden_size, payload.shape) == (rows, hidden, (rows, hidden))
        assert payload.values.shape == (rows, format.value_width(hidden))
        assert payload.nbytes == rows * format.row_bytes(hidden)
        stored = [payload.values] + ([] if payload.scales is None else [payload.scales])
        assert sum(tensor.nbytes for tensor in stored) == payload.nbytes


@pytest.mark.parametrize("hidden", [1, 100, 129, 300])
@pytest.mark.parametrize("name", ["fp8", "int8", "bf16"])
def test_payloads_of_any_width(name: str, hidden: int) -> None:
    format = PAYLOAD_FORMATS[name]
    for x in samples(7, hidden).values():
        within(format.error_bound(x), x, format.encode(x).dense(torch.float32))


@pytest.mark.parametrize("rows, cols", [(1, 1), (100, 130), (129, 127), (300, 257)])
def test_ragged_fp8_blocks(rows: int, cols: int) -> None:
    format = WEIGHT_FORMATS["fp8_block"]
    for w in samples(rows, cols).values():
        planes = format.encode(w)
        decoded = format.decode(planes, torch.empty(rows, cols))
        within(format.error_bound(w), w, decoded)
        corner = w[128:, 128:].float()
        if corner.numel() and corner.any():
            part = corner[:128, :128].abs().max()
            torch.testing.assert_close(
                planes["scales"][1, 1], (part / 448).clamp(min=numerics.TINY), rtol=1e-6, atol=0
            )


def test_row_bytes() -> None:
    sizes = {name: format.row_bytes(256) for name, format in PAYLOAD_FORMATS.items()}
    assert sizes == {
        "fp32": 1024,
        "fp16": 512,
        "bf16": 512,
        "fp8": 256 + 8,
        "int8": 256 + 4,
        "nvfp4": 128 + 16,
        "mxfp4": 128 + 8,
    }
    groups = {name: format.group(256) for name, format in PAYLOAD_FORMATS.items()}
    assert list(groups.values()) == [0, 0, 0, 128, 256, 16, 32]


@each_weight
def test_what_is_representable_is_kept(format: WeightFormat) -> None:
    """Planes with exact scales and a largest number in every block encode back to themselves."""
    torch.manual_seed(1)
    planes = format.encode(torch.randn(128, 384))
    for name, plane in planes.items():
        if name in ("scales", "global") and plane.dtype == torch.float32:
            plane.copy_(torch.exp2(plane.log2().round()))
    if isinstance(format.codec, Nvfp4):  # its largest value fixes the global scale
        planes["scales"][0, 0] = 448.0
        planes["values"][0, 0] = 0x17
    w = format.decode(planes, torch.empty(128, 384))
    again = format.encode(w)
    assert {key: bytes_of(plane) for key, plane in again.items()} == {
        key: bytes_of(plane) for key, plane in planes.items()
    }


@each_quantised
@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_a_poisoned_row_stays_alone(format: PayloadFormat, poison: float) -> None:
    torch.manual_seed(2)
    x = torch.randn(4, 384)
    clean = format.encode(x).dense(torch.float32)
    x[2, 130] = poison
    decoded = format.encode(x).dense(torch.float32)
    group = format.group(384)
    start = 130 // group * group
    assert bool(decoded[2, start : start + group].isnan().all())
    assert bool(format.error_bound(x)[2, start : start + group].isinf().all())
    decoded[2, start : start + group] = clean[2, start : start + group]
    assert torch.equal(decoded, clean)


@each_weight
def test_a_poisoned_weight_shows(format: WeightFormat) -> None:
    w = torch.randn(130, 384)
    w[3, 5] = NAN
    assert bool(format.decode(format.encode(w), torch.empty(130, 384))[3, 5].isnan())


@each_payload
def test_payload_by_experts_equals_payload_of_rows(format: PayloadFormat) -> None:
    x = torch.randn(3, 5, 160)
    payload = format.encode(x)
    assert payload.shape == (3, 5, 160)
    rows = format.encode(x.flatten(0, 1)).dense(torch.bfloat16)
    assert torch.equal(payload.dense(torch.bfloat16).flatten(0, 1), rows)


@each_payload
def test_select_takes_values_and_scales(format: PayloadFormat) -> None:
    x = torch.randn(6, 64) * torch.exp2(torch.arange(6.0)).unsqueeze(1)
    for index in ([4, 0, 4], []):
        chosen = torch.tensor(index, dtype=torch.int64)
        payload = format.encode(x).select(chosen)
        assert len(payload) == len(index)
        expected = format.encode(x[chosen]).dense(torch.float32)
        assert torch.equal(payload.dense(torch.float32), expected)


@each_payload
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dense_rounds_once_into_out(format: PayloadFormat, dtype: torch.dtype) -> None:
    payload = format.encode(torch.randn(4, 96))
    expected = payload.dense(torch.float32).to(dtype)
    wide = torch.full((4, 100), 7.0, dtype=dtype)
    out = payload.dense(dtype, wide[:, 2:98])
    assert out.data_ptr() == wide[:, 2:].data_ptr() and out.dtype == dtype
    assert torch.equal(out, expected) and torch.equal(payload.dense(dtype), expected)
    assert bool((wide[:, :2] == 7).all() and (wide[:, 98:] == 7).all())
    with pytest.raises(ValueError, match="is wanted"):
        payload.dense(dtype, torch.empty(4, 95, dtype=dtype))


def test_global_scale_of_a_payload() -> None:
    format = PAYLOAD_FORMATS["nvfp4"]
    x = torch.randn(3, 64) * 1e5
    assert bool((format.encode(x).dense(torch.float32).abs() <= 6 * 448).all())
    payload = format.encode(x, global_scale=128.0)
    within(format.error_bound(x, 128.0), x, payload.dense(torch.float32))
    assert float(((payload.dense(torch.float32) - x).abs() / x.abs().max()).max()) < 0.2
    assert payload.select(torch.tensor([1])).global_scale == 128.0
    with pytest.raises(ValueError, match="fp8 has no global scale"):
        PAYLOAD_FORMATS["fp8"].encode(x, global_scale=2.0)


@each_quantised
def test_no_payload_without_its_scales(format: PayloadFormat) -> None:
    payload = format.encode(torch.randn(4, 64))
    values, scales = payload.values, payload.scales
    for wrong in (None, scales[:3], scales.repeat(1, 2), scales.to(torch.float64), scales[0]):
        with pytest.raises(ValueError, match=f"payload {format.name}"):
            Payload(values, wrong, format)
    with pytest.raises(ValueError, match="must be"):
        Payload(values.to(torch.float64), scales, format)


def test_no_superfluous_scales() -> None:
    with pytest.raises(ValueError, match="bf16 has no scales"):
        Payload(torch.ones(2, 4).bfloat16(), torch.ones(2, 1), PAYLOAD_FORMATS["bf16"])
    with pytest.raises(ValueError, match=r"must be torch.bfloat16"):
        Payload(torch.ones(2, 4), None, PAYLOAD_FORMATS["bf16"])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden size 72 .* multiple of 16"):
        PAYLOAD_FORMATS["nvfp4"].encode(torch.ones(1, 72))
    with pytest.raises(ValueError, match=r"hidden size 48 .* multiple of 32"):
        PAYLOAD_FORMATS["mxfp4"].check(48)
    with pytest.raises(ValueError, match=r"192 columns .* multiple of 128"):
        WEIGHT_FORMATS["int4_w4a16"].check(64, 192)
    WEIGHT_FORMATS["fp8_block"].check(100, 100)
    with pytest.raises(ValueError, match=r"shards of 192 .* multiple of 128"):
        WEIGHT_FORMATS["fp8_block"].check_cut(192)
    WEIGHT_FORMATS["mxfp4"].check_cut(96)


@each_weight
def test_a_slice_is_a_view_that_decodes_to_the_part(format: WeightFormat) -> None:
    w = torch.randn(300, 384)
    planes = format.encode(w)
    whole = format.decode(planes, torch.empty(300, 384))
    for rows, cols in (
        (slice(128, 256), slice(0, 384)),
        (slice(0, 300), slice(128, 256)),
        (slice(256, 300), slice(256, None)),
        (slice(None, 128), slice(128, None)),
    ):
        part = format.slice(planes, rows, cols)
        expected = whole[rows, cols]
        assert torch.equal(format.decode(part, torch.empty(expected.shape)), expected)
        for name, plane in part.items():
            assert plane.untyped_storage().data_ptr() == planes[name].untyped_storage().data_ptr()
        shapes = {name: (tuple(plane.shape), plane.dtype) for name, plane in part.items()}
        assert shapes == format.planes(*expected.shape)


def test_cuts_inside_a_block_are_refused() -> None:
    w = torch.randn(256, 256)
    everything = slice(None)
    for name, rows, cols, multiple in (
        ("fp8_block", slice(0, 64), everything, 128),
        ("fp8_block", everything, slice(64, 256), 128),
        ("int4_w4a16", everything, slice(0, 64), 128),
        ("nvfp4", everything, slice(0, 24), 16),
        ("mxfp4", everything, slice(48, 256), 32),
    ):
        format = WEIGHT_FORMATS[name]
        with pytest.raises(ValueError, match=f"multiples of {multiple}$"):
            format.slice(format.encode(w), rows, cols)
    format = WEIGHT_FORMATS["fp8_channel"]
    assert format.slice(format.encode(w), slice(3, 5), slice(7, 8))["scales"].shape == (2, 1)


def test_fp8_scales_per_tensor_are_repeated() -> None:
    w = torch.tensor([[448.0, 1], [2, 896]])
    planes = WEIGHT_FORMATS["fp8_tensor"].encode(w)
    assert planes["scales"].tolist() == [[2], [2]]
    assert WEIGHT_FORMATS["fp8_channel"].encode(w)["scales"].tolist() == [[1], [2]]
    assert Fp8(rows=2, cols=2).encode(w)[1].tolist() == [[2]]


@each_weight
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_matrix_decodes_each_part_of_one_expert(
    format: WeightFormat, dtype: torch.dtype
) -> None:
    matrix = ExpertMatrix(format, experts=3, parts=2, rows=130, cols=128, dtype=dtype)
    assert matrix.shape == (3, 260, 128)
    torch.manual_seed(3)
    expected = torch.empty(3, 2, 130, 128, dtype=dtype)
    for expert in range(3):
        for part in range(2):
            encoded = format.encode(torch.randn(130, 128) * 10.0**part)
            for name, view in matrix.part(expert, part).items():
                view.copy_(encoded[name])
            format.decode(encoded, expected[expert, part])
    for expert in range(3):
        assert torch.equal(matrix.dense(expert), expected[expert].flatten(0, 1))
    out = torch.empty(260, 128, dtype=dtype)
    assert matrix.dense(1, out) is out and torch.equal(out, expected[1].flatten(0, 1))
    if format.quantised:
        assert matrix.plain is None
        assert matrix.nbytes == 6 * format.nbytes(130, 128)
    else:
        assert matrix.plain is not None and matrix.plain.dtype == dtype
        assert torch.equal(matrix.plain, expected.flatten(1, 2))
        assert matrix.dense(0).data_ptr() == matrix.plain.data_ptr()


def test_declared_activations() -> None:
    activations = {name: format.activation for name, format in WEIGHT_FORMATS.items()}
    assert {name: value for name, value in activations.items() if value} == {
        "fp8_block": "fp8",
        "fp8_channel": "fp8",
        "fp8_tensor": "fp8",
        "int8_w8a8": "int8",
        "nvfp4": "nvfp4",
    }
    assert all(value is None or value in PAYLOAD_FORMATS for value in activations.values())
