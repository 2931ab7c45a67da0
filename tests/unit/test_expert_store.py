"""Experts by slot: bytes move, slot tables are updated in place. E experts · T tokens · K chosen ·
H hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moesaic.moe.context import MoeContext
from moesaic.moe.expert_store import INWARD, OUTWARD, ExpertShape, ExpertStore
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import FusedMoE
from moesaic.moe.placement import Placement, SlotMap
from moesaic.moe.quant.weights import WEIGHT_FORMATS
from moesaic.moe.registry import MoeProblem
from moesaic.moe.topk import TopK, TopKConfig
from tests.moe_oracle import Experts, config_of, reference

E, H, INNER, K, REDUNDANT = 6, 128, 128, 2, 2
EXPERTS = Experts.random(E, H, INNER)
FORMATS = ("fp32", "fp8_block", "int8_w8a16", "int4_w4a16", "nvfp4", "mxfp4")
FIRST = Placement.trivial(E, REDUNDANT)
SWAPPED = Placement(E, (3, 1, 2, 0, 4, 5, 0, 1))
CPU = torch.device("cpu")


def make_layer(weights: str, placement: Placement, max_replicas: int = 3) -> FusedMoE:
    problem = MoeProblem(weights=WEIGHT_FORMATS[weights], dtype="fp32", payload="fp32")
    context = MoeContext.make(problem, torch.float32, max_replicas=max_replicas)
    return FusedMoE(config_of(EXPERTS, K), context, placement=placement)


def tokens(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, H, generator=generator), torch.randn(count, E, generator=generator)


def routed(layer: FusedMoE, logits_TE: Tensor) -> TopKOutput:
    return TopK(TopKConfig(K, renormalize=True))(logits_TE, slot_map=layer.slot_map)


@pytest.mark.parametrize("weights", FORMATS)
def test_two_experts_change_slots(weights: str) -> None:
    """Swapping slots 0 and 3 and the slot map keeps the outputs, which equal a fresh layer's."""
    layer, fresh = make_layer(weights, FIRST), make_layer(weights, SWAPPED)
    EXPERTS.fill(layer)
    EXPERTS.fill(fresh)
    x_TH, logits_TE = tokens(9)
    before = layer(x_TH, routed(layer, logits_TE))
    sums = [layer.store.checksum(slot) for slot in range(layer.store.num_slots)]
    held = [view.clone() for view in layer.store.read(0)]
    layer.store.write(0, layer.store.read(3))
    layer.store.write(3, held)
    layer.update_placement(SWAPPED)
    topk = routed(layer, logits_TE)
    assert torch.equal(topk.ids_TK, routed(fresh, logits_TE).ids_TK)
    assert torch.equal(layer(x_TH, topk), fresh(x_TH, topk))
    assert torch.allclose(layer(x_TH, topk), before, atol=1e-6)
    assert layer.local_experts == SWAPPED.slots
    moved = [layer.store.checksum(slot) for slot in range(layer.store.num_slots)]
    assert moved == [sums[3], *sums[1:3], sums[0], *sums[4:]] and sums[0] != sums[3]
    assert moved == [fresh.store.checksum(slot) for slot in range(fresh.store.num_slots)]


def test_a_moved_expert_computes_what_the_oracle_says() -> None:
    layer = make_layer("fp32", FIRST)
    EXPERTS.fill(layer)
    layer.store.write(6, layer.store.read(5))
    layer.update_placement(Placement(E, (0, 1, 2, 3, 4, 5, 5, 1)))
    x_TH, logits_TE = tokens(20)
    logical = TopK(TopKConfig(K, renormalize=True))(logits_TE)
    topk = routed(layer, logits_TE)
    assert 6 in topk.ids_TK and 5 in topk.ids_TK
    error = (layer(x_TH, topk).double() - reference(EXPERTS, x_TH, logical)).abs().max()
    assert float(error) < 100 * 2.0**-23


def test_a_slot_is_all_its_tensors() -> None:
    shape = ExpertShape(3, H, INNER, torch.float32, inward_bias=True, outward_bias=True)
    store = ExpertStore(WEIGHT_FORMATS["nvfp4"], shape)
    generator = torch.Generator().manual_seed(0)
    for slot in range(3):
        for view in store.read(slot):
            view.random_(0, 255, generator=generator)
    views, weights = store.read(1), store.weights
    matrices = weights.w13_eJH.nbytes + weights.w2_eHI.nbytes
    assert weights.b13_eJ is not None and weights.b2_eH is not None
    total = matrices + weights.b13_eJ.nbytes + weights.b2_eH.nbytes + 3 * 16  # plus input scales
    assert all(view.dtype == torch.uint8 and view.dim() == 1 for view in views)
    assert sum(len(view) for view in views) * 3 == total
    sums = [store.checksum(slot) for slot in range(3)]
    views[-1][0] ^= 1
    assert store.checksum(1) != sums[1] and store.checksum(2) == sums[2]
    with pytest.raises(ValueError, match=r"slot 0 holds tensors of .* bytes, but"):
        store.write(0, views[:-1])


def test_input_scales_belong_to_slots() -> None:
    shape = ExpertShape(2, H, INNER, torch.float32)
    store = ExpertStore(WEIGHT_FORMATS["nvfp4"], shape)
    assert store.has_input_scales and store.largest_input_scales == [0.0, 0.0]
    store.note_input_scale(0.25, slot=0, product=INWARD)
    store.note_input_scale(0.125, slot=0, product=INWARD)
    store.note_input_scale(0.5, slot=1, product=OUTWARD)
    assert store.largest_input_scales == [0.25, 0.5]
    store.write(1, store.read(0))
    assert store.largest_input_scales == [0.25, 0.0]
    assert not ExpertStore(WEIGHT_FORMATS["fp32"], shape).has_input_scales


@pytest.mark.parametrize("first", [Placement.trivial(4), Placement(4, (3, 2, 1, 0))])
def test_a_table_is_updated_in_place(first: Placement) -> None:
    """The table keeps the address that a graph captured, even if it began as the identity."""
    second = Placement(4, (1, 0, 3, 2))
    slot_map, ids = SlotMap(first, max_replicas=2), torch.tensor([[0, 1], [2, -1], [3, 0]])
    table = slot_map.table_on(CPU)
    assert table is not None and table.slots_EX.shape == (4, 2)
    addresses = (table.slots_EX.data_ptr(), table.count_E.data_ptr())
    assert slot_map(ids).tolist() == SlotMap(first)(ids).tolist()
    slot_map.update(second)
    assert slot_map.table_on(CPU) is table and slot_map.placement is second
    assert (table.slots_EX.data_ptr(), table.count_E.data_ptr()) == addresses
    assert slot_map(ids).tolist() == SlotMap(second)(ids).tolist() == [[1, 0], [3, -1], [2, 1]]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Placement(3, (0, 1, 2, 1, 1, 1)), "4 replicas does not fit .* 3 for each expert"),
        (Placement(3, (0, 1, 2, 1)), "3 experts in 4 slots does not fit a layer with 3 experts in"),
        (Placement(2, (0, 1, 0, 1, 0, 1)), "2 experts in 6 slots does not fit a layer with 3"),
    ],
)
def test_what_does_not_fit_is_refused(placement: Placement, message: str) -> None:
    slot_map = SlotMap(Placement(3, (0, 1, 2, 0, 1, 2)), max_replicas=3)
    with pytest.raises(ValueError, match=message):
        slot_map.update(placement)
    assert slot_map.placement.slots == (0, 1, 2, 0, 1, 2)


def test_a_fixed_identity_is_not_updated() -> None:
    slot_map = SlotMap(Placement.trivial(3))
    assert slot_map.table_on(CPU) is None
    with pytest.raises(ValueError, match="build it with max_replicas"):
        slot_map.update(Placement(3, (0, 2, 1)))
    with pytest.raises(ValueError, match="2 replicas does not fit"):
        SlotMap(Placement(2, (0, 1, 0)), max_replicas=1)


def test_counts_belong_to_a_placement() -> None:
    layer = make_layer("fp32", FIRST)
    EXPERTS.fill(layer)
    x_TH, logits_TE = tokens(5)
    layer(x_TH, routed(layer, logits_TE))
    assert layer.load.placement_version == 0 and sum(layer.load.tokens) == 5 * K
    layer.update_placement(SWAPPED)
    assert layer.load.placement_version == 1
    slots, experts = layer.load.tokens[: layer.layout.slots_per_rank], layer.load.tokens[-E:]
    assert sum(slots) == 0 and sum(experts) == 5 * K, "what was counted belongs to the experts now"


def test_layers_may_have_placements_of_their_own() -> None:
    context = replace(MoeContext.single(torch.float32), placements={1: Placement(3, (2, 1, 0))})
    assert context.placement(3, 0) == Placement.trivial(3)
    assert context.placement(3, 1).slots == (2, 1, 0)
    layers = [FusedMoE(replace(config_of(EXPERTS, K), num_experts=3), context, n) for n in (0, 1)]
    assert [layer.local_experts for layer in layers] == [(0, 1, 2), (2, 1, 0)]
