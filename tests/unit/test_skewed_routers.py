"""Routers of dummy weights: how popular each expert is, by drawing tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moesaic.models.skewed_routers import MOST, popularity, row_sizes


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (16, 2), (256, 8)])
def test_popularity_follows_zipfs_law(experts: int, top_k: int) -> None:
    wanted_E = popularity(experts, top_k, 0.7)
    assert wanted_E.sum() == pytest.approx(top_k) and wanted_E.max() <= MOST + 1e-9
    free = wanted_E < MOST
    ratios = wanted_E[free] * (np.flatnonzero(free) + 1) ** 0.7
    assert ratios == pytest.approx(ratios[0]), "but for those at the limit"
    logits_TE = torch.randn(20_000, experts, generator=torch.Generator().manual_seed(1))
    scaled_TE = logits_TE * torch.tensor(row_sizes(experts, top_k, 0.7))
    ids_TK = scaled_TE.topk(top_k).indices
    found_E = torch.bincount(ids_TK.flatten(), minlength=experts).numpy() / len(ids_TK)
    assert np.abs(found_E - wanted_E).max() < 0.03
    assert found_E[:4].sum() > 1.5 * found_E[-4:].sum()


def test_no_exponent_is_no_preference() -> None:
    sizes = np.array(row_sizes(64, 4, 0.0))
    assert sizes.min() > 0.8 and sizes.max() < 1.25
