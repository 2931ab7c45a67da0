"""The sizes of known models, for `--load-format dummy`: their config.json without their weights."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.config.resolve import SHAPE_PREFIX
from moesaic.models.made import cached_folder, parse_name

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "shapes"


def known() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def shape_config(name: str, changes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """config.json of a known model; `changes` take the place of integers in it."""
    if name not in known():
        raise ValueError(f"unknown shape {name!r}; known are {', '.join(known())}")
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    integers = sorted(key for key, value in config.items() if type(value) is int)
    for key in changes or {}:
        if key not in integers:
            raise ValueError(f"shape {name} has no {key!r} to change; it has {', '.join(integers)}")
    return config | dict(changes or {})


def shape_folder(model_path: str) -> str:
    """A folder with nothing but the config.json of `shape:NAME` or `shape:NAME,KEY=INTEGER,…`."""
    name, changes = parse_name(model_path, SHAPE_PREFIX, "shape:mixtral-8x7b,num_hidden_layers=2")
    text = json.dumps(shape_config(name, changes), indent=2)

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(text, encoding="utf-8")

    folder = cached_folder(f"shape-{name}", text.encode(), make)
    logger.info("%s has the sizes of a model and random weights, so it says nothing", model_path)
    return str(folder)
