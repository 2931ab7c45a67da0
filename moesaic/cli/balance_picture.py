"""Heat maps of the load of ranks under two placements, as a PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING

import matplotlib

if TYPE_CHECKING:
    from moesaic.balance.compare import Comparison, Row
    from moesaic.balance.problem import Floats


def draw(path: str, comparison: Comparison, before: Row, after: Row) -> None:
    """Ranks across, layers down; colours are the load over its layer's mean."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = [relative_load(comparison, row) for row in (before, after)]
    most = max(float(load.max()) for load in loads)
    layers = loads[0].shape[0]
    size = 12, min(8, max(2.6, 1.8 + 0.16 * layers))
    figure, axes = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    for axis, row, load in zip(axes, (before, after), loads, strict=True):
        image = axis.imshow(load, aspect="auto", cmap="magma", vmin=0, vmax=most)
        title = f"{row.algorithm}, {row.redundant} redundant: max/mean {row.max_over_mean:.3f}"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("rank")
    axes[0].set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="load / mean of its layer")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def relative_load(comparison: Comparison, row: Row) -> Floats:
    """[layers, ranks], summed over the steps that judge."""
    from moesaic.balance.problem import rank_loads

    load_LD = rank_loads(comparison.judge_SLE, row.slots_LP, comparison.ranks).sum(0)
    mean_L1 = load_LD.mean(1, keepdims=True)
    mean_L1[mean_L1 == 0] = 1
    relative: Floats = load_LD / mean_L1
    return relative
