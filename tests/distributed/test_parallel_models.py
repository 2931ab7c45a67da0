"""Models cut over ranks give the logits of the whole model: every family, every way to cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.comm.mesh import Mesh
from moesaic.models.tiny import make_tiny_checkpoint
from tests.distributed.model_ranks import LENGTHS, ModelCase, Served, reference, serve
from tests.distributed.moe_ranks import Pools

HEADS = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
MANY = HEADS | {"head_dim": 16}
UNEVEN = {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3}
SHARED = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
MLA = {"num_hidden_layers": 4, "num_attention_heads": 7}
THIRDS = {"moe_intermediate_size": 48}
TWO = Mesh(tp=2, ep=2, dense_tp=2, vocab_tp=2)

CASES = [
    ModelCase("mixtral", Mesh(tp=2, dense_tp=2, vocab_tp=2), changes=UNEVEN | {"head_dim": 16}),
    ModelCase("mixtral", Mesh(tp=4, ep=2, dense_tp=4, vocab_tp=4), changes=SHARED),
    ModelCase("mixtral", Mesh(pp=3), changes=HEADS),
    ModelCase("qwen2_moe", Mesh(tp=4, dp=2, ep=4, dense_tp=4, vocab_tp=4), "deepep", HEADS),
    ModelCase("qwen2_moe", Mesh(tp=2, dp=2, ep=2), "none", HEADS),
    ModelCase("qwen2_moe", Mesh(tp=3, dense_tp=3, vocab_tp=3), "none", HEADS | THIRDS),
    ModelCase("qwen3_moe", replace(TWO, pp=2), "deepep", MANY, tied=True),
    ModelCase("qwen3_moe", Mesh(tp=4, dp=2, ep=4, dense_tp=2, vocab_tp=4), "mori", MANY, tied=True),
    ModelCase("qwen3_moe", Mesh(tp=2, ep=2, dense_tp=1, vocab_tp=2), "flashinfer", MANY, tied=True),
    ModelCase("deepseek_v2", Mesh(tp=3, dense_tp=3, vocab_tp=1), changes=MLA | THIRDS),
    ModelCase("deepseek_v2", Mesh(tp=4, dp=2, ep=2, dense_tp=4, vocab_tp=2), "none", MLA),
    ModelCase("deepseek_v3", Mesh(tp=4, dp=4, ep=4, dense_tp=4, vocab_tp=4), "deepep", MLA),
    ModelCase("deepseek_v3", Mesh(tp=2, dp=2, pp=2, ep=2), "deepep", MLA),
    ModelCase("deepseek_v3", TWO, "deepep", MLA, deterministic=True),
    ModelCase("gpt_oss", TWO, "flashinfer", UNEVEN),
    ModelCase("gpt_oss", Mesh(tp=4, dp=2, ep=2, dense_tp=2, vocab_tp=4), "none", SHARED),
]  # fmt: skip

Folders = Callable[[ModelCase], tuple[Path, dict[int, Tensor]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A case's checkpoint, and what the whole model says of it."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def make(case: ModelCase) -> tuple[Path, dict[int, Tensor]]:
        key = f"{case.family} {sorted(case.changes.items())} {case.tied}"
        if key not in made:
            folder = make_tiny_checkpoint(case.family, root / str(len(made)), changes=case.changes)
            if case.tied:
                config = json.loads((folder / "config.json").read_text())
                config["tie_word_embeddings"] = True
                (folder / "config.json").write_text(json.dumps(config))
            made[key] = folder, reference(folder)
        return made[key]

    return make


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_equal_the_whole(case: ModelCase, pools: Pools, folders: Folders) -> None:
    folder, whole = folders(case)
    served: list[Served] = pools(case.mesh.world).run(serve, case, folder)
    for rank in served:
        last = rank.place.stage == case.mesh.pp - 1 and rank.place.attention_rank == 0
        mine = [s for s in range(len(LENGTHS)) if s % case.mesh.dp == rank.place.dp_rank]
        wanted = {(s, LENGTHS[s] + more) for s in mine for more in (-1, 0, 1)} if last else set()
        assert rank.logits.keys() == wanted
        for (sequence, position), logits_V in rank.logits.items():
            expected_V = whole[sequence][position]
            torch.testing.assert_close(logits_V, expected_V, rtol=1e-4, atol=1e-4)
            assert logits_V.argmax() == expected_V.argmax()


def test_a_rank_holds_its_part(pools: Pools, folders: Folders) -> None:
    """Mixtral: vocabulary 258, hidden 64, 8 heads and 2 of keys and values of 8 channels, 8 experts
    of 96, 4 layers; on 4 ranks of which pairs share a key/value head and halves of an expert."""
    case = CASES[1]
    folder, _ = folders(case)
    served: list[Served] = pools(4).run(serve, case, folder)
    attention = 64 * (2 * 8 + 8 + 8) + (2 * 8) * 64
    experts = 4 * 3 * 64 * 48
    layer = attention + experts + 8 * 64 + 2 * 64
    vocabulary = (64, 65, 64, 65)
    assert [rank.nbytes for rank in served] == [
        4 * (4 * layer + 2 * rows * 64 + 64) for rows in vocabulary
    ]
    assert [(rank.cache_heads, rank.cache_layers) for rank in served] == [(1, 4)] * 4


def test_uneven_heads_and_stages(pools: Pools, folders: Folders) -> None:
    for case, heads, layers in ((CASES[0], (1, 2), (4, 4)), (CASES[2], (4, 4, 4), (1, 1, 2))):
        served: list[Served] = pools(case.mesh.world).run(serve, case, folders(case)[0])
        assert tuple(rank.cache_heads for rank in served) == heads
        assert tuple(rank.cache_layers for rank in served) == layers
