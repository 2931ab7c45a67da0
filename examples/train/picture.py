"""The loss curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw_losses(log: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [entry["step"] for entry in log]
    for key, label in (("loss", "next token"), ("nextn", "the token after it (MTP layer)")):
        axes.plot(steps, [entry[key] for entry in log], label=label, linewidth=0.8)
    axes.set(xlabel="step", ylabel="loss (nats a token; prompts count a tenth)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
