"""Shared experts among the routed ones: where they are, who takes them, how even ranks become."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moesaic.comm.collectives.collective import SingleRank
from moesaic.models.config import BuildContext, RawConfig
from moesaic.models.quantize import QuantizeJob, quantize
from moesaic.models.registry import build_model
from moesaic.models.schemes import detect_scheme
from moesaic.models.tiny import make_tiny_checkpoint
from moesaic.models.weights import load_weights
from moesaic.moe.context import MoeContext
from moesaic.moe.formats import TopKOutput
from moesaic.moe.layer import MoeConfig
from moesaic.moe.placement import EpLayout, Placement, SlotMap
from moesaic.moe.quant.weights import WEIGHT_FORMATS, WeightFormat
from moesaic.moe.replicas import SourceRank, replica_choice
from moesaic.moe.step_split import StepSplit
from moesaic.moe.topk import with_shared_experts


def everywhere(experts: int, redundant: int, ranks: int, shared: int = 1) -> Placement:
    return Placement.trivial(experts, redundant).with_everywhere(shared, ranks)


def test_each_rank_has_a_slot_for_each_shared_expert() -> None:
    assert everywhere(4, 0, 2).slots == (0, 1, 4, 2, 3, 4)
    assert everywhere(3, 1, 2, shared=2) == Placement(5, (0, 1, 3, 4, 2, 0, 3, 4))
    context = MoeContext.single(torch.float32)
    assert context.placement(5, num_shared=2) == Placement.trivial(5), "one rank has all once"


def test_every_token_takes_them_and_padding_does_not() -> None:
    chosen = TopKOutput(torch.tensor([[3, 0], [-1, -1]]), torch.tensor([[0.5, 0.25], [0.0, 0.0]]))
    found = with_shared_experts(chosen, range(4, 5), None, None)
    assert found.ids_TK.tolist() == [[3, 0, 4], [-1, -1, -1]]
    assert found.weights_TK.tolist() == [[0.5, 0.25, 1.0], [0.0, 0.0, 0.0]]
    gate_T1 = torch.tensor([[0.75], [torch.nan]])
    slot_map = SlotMap(Placement(6, (0, 1, 2, 3, 5, 4)))
    found = with_shared_experts(chosen, range(4, 6), gate_T1, slot_map)
    assert found.ids_TK.tolist() == [[3, 0, 5, 4], [-1, -1, -1, -1]]
    assert found.weights_TK.tolist() == [[0.5, 0.25, 0.75, 0.75], [0.0] * 4]
    nobody = TopKOutput(torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2))
    found = with_shared_experts(nobody, range(4, 5), None, None)
    assert found.ids_TK.shape == found.weights_TK.shape == (0, 3)
    assert found.ids_TK.dtype == torch.int32


def test_decode_steps_take_the_own_slot() -> None:
    """But for ranks with the same tokens: one of them computes a token's shared expert."""
    placement, ids = everywhere(4, 2, 3), torch.full((300, 1), 4)
    for rank in range(3):
        source = SourceRank(EpLayout(len(placement.slots), 3, 1, rank))
        choice = replica_choice("lp", source, replicated=False, first_shared=4)
        assert set(SlotMap(placement, 3, choice)(ids).flatten().tolist()) == {3 * rank + 2}
        replicas_of_0 = choice(placement)[0]
        assert sorted(replicas_of_0) == [0, 6], "of routed experts, all"
        alike = replica_choice("lp", source, replicated=True, first_shared=4)
        taken = SlotMap(placement, 3, alike)(ids).flatten().bincount(minlength=9)
        assert taken[[2, 5, 8]].tolist() == pytest.approx([100] * 3, abs=2)
    elsewhere = Placement(5, (0, 1, 4, 2, 3, 0))  # experts have moved: rank 1 has none
    source = SourceRank(EpLayout(6, 2, 1, 1))
    near = replica_choice("lp", source, replicated=False, first_shared=4)
    assert near(elsewhere)[4] == (2,)


@pytest.mark.parametrize(
    ("routed", "expected"),
    [
        ([0] * 8, [8, 8]),  # one expert takes all: its rank computes no shared rows
        ([0] * 6 + [2] * 4, [10, 10]),
        ([0, 1, 2, 3], [4, 4]),
        ([3], [1, 1]),
        ([], [0, 0]),
    ],
)
def test_prompts_send_shared_rows_to_the_rank_with_least(
    routed: list[int], expected: list[int]
) -> None:
    placement = everywhere(4, 0, 2)
    split = StepSplit(placement, EpLayout(6, 2), SingleRank())
    ids_T1 = torch.tensor(routed, dtype=torch.int64).view(-1, 1)
    chosen = TopKOutput(ids_T1, torch.ones(len(routed), 1))
    slots_TK = split(with_shared_experts(chosen, range(4, 5), None, None).ids_TK)
    assert (slots_TK // 3).flatten().bincount(minlength=2).tolist() == expected
    experts = torch.tensor(placement.slots)[slots_TK]
    assert experts[:, 0].tolist() == routed and experts[:, 1].tolist() == [4] * len(routed)


def test_a_module_of_several_shared_experts() -> None:
    config = MoeConfig(8, 64, 32, 2).with_shared(96, "shared_experts")
    assert (config.num_experts, config.top_k, config.num_shared) == (11, 5, 3)
    assert (config.num_routed, config.routed_top_k) == (8, 2)
    with pytest.raises(ValueError, match="has 80 intermediate channels, which is no multiple of"):
        MoeConfig(8, 64, 32, 2).with_shared(80, "shared_expert")


def load(folder: Path, format: WeightFormat | None) -> None:
    context = replace(MoeContext.single(torch.float32, format), waterfill=True)
    load_weights(build_model(RawConfig.read(folder), BuildContext(64, context)), folder)


def test_shared_experts_keep_the_numbers_of_a_checkpoint(tmp_path: Path) -> None:
    """One that quantises routed experts alone has no place for them among those."""
    source, target = make_tiny_checkpoint("deepseek_v3", tmp_path / "source"), tmp_path / "experts"
    load(source, WEIGHT_FORMATS["int8_w8a8"])  # as --quantization asks for
    quantize(source, target, QuantizeJob("int8_w8a8", experts_only=True))
    format = detect_scheme(RawConfig.read(target), target).expert_format
    with pytest.raises(ValueError, match=r"--enable-waterfill: .*layers.1.mlp.shared_experts.gate"):
        load(target, format)
    quantize(source, tmp_path / "all", QuantizeJob("int8_w8a8"))
    load(tmp_path / "all", format)
