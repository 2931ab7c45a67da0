"""The config.json files of known models, for `--load-format dummy`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.config.resolve import SHAPE_PREFIX
from moesaic.models.generated import cached_folder, parse_model_name, with_changes

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "shapes"


def known() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def shape_config(name: str, changes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """config.json of a known model; `changes` replace integers in it."""
    if name not in known():
        raise ValueError(f"unknown shape {name!r}; known are {', '.join(known())}")
    config: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return with_changes(config, changes or {}, f"shape {name}")


def shape_folder(model_path: str) -> str:
    """Makes a folder with only the config.json of `shape:NAME` or `shape:NAME,KEY=INTEGER,…`."""
    name, changes = parse_model_name(
        model_path, SHAPE_PREFIX, "shape:mixtral-8x7b,num_hidden_layers=2"
    )
    text = json.dumps(shape_config(name, changes), indent=2)

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(text, encoding="utf-8")

    folder = cached_folder(f"shape-{name}", text.encode(), make)
    logger.info("%s has the sizes of a model and random weights, so its text is noise", model_path)
    return str(folder)
