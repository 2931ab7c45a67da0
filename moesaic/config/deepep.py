"""--deepep-config: what normal mode's kernels may take of a GPU, in the JSON that SGLang takes.

    {"normal_dispatch": {"num_sms": 24}, "normal_combine": {"num_sms": 24}}

Sizes of chunks are known by name and have nothing to size here: kernels write rows straight to
where they are computed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PHASES: Final = {"normal_dispatch": "dispatch", "normal_combine": "combine"}
NUM_SMS: Final = "num_sms"
CHUNKS: Final = tuple(
    f"num_max_{link}_chunked_{way}_tokens" for link in ("nvl", "rdma") for way in ("send", "recv")
)


@dataclass(frozen=True, slots=True)
class DeepEPConfig:
    """Multiprocessors that each way may take, 0 for as many as serve. `idle`: what was given and
    does nothing here."""

    dispatch: int = 0
    combine: int = 0
    idle: tuple[str, ...] = ()


def read_deepep_config(text: str) -> DeepEPConfig:
    """`text`: JSON, or the path of a file with it."""
    phases = _parse(text)
    sms, idle = {}, []
    for name, values in phases.items():
        if name not in PHASES or not isinstance(values, dict):
            raise ValueError(f"--deepep-config: {name!r}: give objects {' and '.join(PHASES)}")
        for key, value in values.items():
            if key not in (NUM_SMS, *CHUNKS):
                raise ValueError(
                    f"--deepep-config: {name} has no {key!r}: give {', '.join((NUM_SMS, *CHUNKS))}"
                )
            if type(value) is not int or value < 1:
                raise ValueError(
                    f"--deepep-config: {key} of {name} is {value!r}: give a whole number from 1 on"
                )
            if key == NUM_SMS:
                sms[PHASES[name]] = value
            else:
                idle.append(f"{name}.{key}")
    return DeepEPConfig(**sms, idle=tuple(idle))


def _parse(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        path = Path(text).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--deepep-config {path} is neither JSON nor a file that can be read: {error}"
            ) from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--deepep-config is not JSON ({error}): {text[:60]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--deepep-config is no object of {' and '.join(PHASES)}: {text[:60]!r}")
    return found
