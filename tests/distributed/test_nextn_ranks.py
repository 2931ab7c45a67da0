"""The MTP layer cut over ranks gives the logits of the whole one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.comm.mesh import Mesh
from moesaic.models.tiny import make_tiny_checkpoint
from tests.distributed.model_ranks import LENGTHS, ModelCase
from tests.distributed.moe_ranks import Pools
from tests.distributed.nextn_ranks import reference_mtp, serve_mtp

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_nextn_predict_layers": 1}
CASES = [
    ModelCase("deepseek_v3", Mesh(tp=4, dp=2, ep=4, dense_tp=4, vocab_tp=4), "deepep", SIZES),
    ModelCase("deepseek_v3", Mesh(pp=2), "none", SIZES),
    ModelCase("deepseek_v3", Mesh(tp=2, dp=2, ep=2), "deepep", SIZES, waterfill=True),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Tensor]]:
    folder = tmp_path_factory.mktemp("mtp")
    make_tiny_checkpoint("deepseek_v3", folder, changes=SIZES)
    return folder, reference_mtp(folder)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_equal_the_whole(
    case: ModelCase, pools: Pools, whole: tuple[Path, dict[int, Tensor]]
) -> None:
    """On groups that are idle in some steps, and on a last stage that has no embedding."""
    folder, expected = whole
    served = pools(case.mesh.world).run(serve_mtp, case, folder)
    found = {key: logits_V for rank in served for key, logits_V in rank.items()}
    assert sum(map(len, served)) == len(found)
    assert found.keys() == {(s, n + more) for s, n in enumerate(LENGTHS) for more in (-1, 0, 1)}
    for (sequence, position), logits_V in found.items():
        expected_V = expected[sequence][position]
        torch.testing.assert_close(logits_V, expected_V, rtol=1e-4, atol=1e-4)
