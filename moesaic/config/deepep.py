"""--deepep-config: what normal mode's kernels may take of a GPU, in the JSON that SGLang takes.

    {"normal_dispatch": {"num_sms": 24}, "normal_combine": {"num_sms": 24}}

Sizes of chunks are known by name and have nothing to size here: kernels write rows straight to
where they are computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PHASES: Final = {"normal_dispatch": "dispatch", "normal_combine": "combine"}
NUM_SMS: Final = "num_sms"
CHUNKS: Final = tuple(
    f"num_max_{link}_chunked_{way}_tokens" for link in ("nvl", "rdma") for way in ("send", "recv")
)
LARGEST: Final = {NUM_SMS: 1024, **dict.fromkeys(CHUNKS, 1 << 20)}
"""Above what any GPU or step has: a slip of the pen."""


@dataclass(frozen=True, slots=True)
class DeepEPConfig:
    """Multiprocessors that each way may take, 0 for as many as serve. `idle`: what was given and
    does nothing here."""

    dispatch: int = 0
    combine: int = 0
    idle: tuple[str, ...] = ()

    def notes(self, processors: int) -> Iterator[str]:
        """What of it changes nothing on a GPU with so many multiprocessors; 0: not known."""
        if self.idle:
            yield f"--deepep-config: nothing here is sent in chunks: {', '.join(self.idle)}"
        for name, way in PHASES.items():
            if processors and (given := getattr(self, way)) > processors:
                yield (
                    f"--deepep-config: {NUM_SMS} {given} of {name} bounds nothing: the GPU has "
                    f"{processors} multiprocessors"
                )


def read_deepep_config(text: str) -> DeepEPConfig:
    """`text`: JSON, or the path of a file with it."""
    phases = _parse(text)
    sms, idle = {}, []
    for name, values in phases.items():
        if name not in PHASES or not isinstance(values, dict):
            raise ValueError(f"--deepep-config: {name!r}: give objects {' and '.join(PHASES)}")
        for key, value in values.items():
            if key not in LARGEST:
                raise ValueError(
                    f"--deepep-config: {name} has no {key!r}: give {', '.join(LARGEST)}"
                )
            if type(value) is not int or not 1 <= value <= LARGEST[key]:
                raise ValueError(
                    f"--deepep-config: {key} of {name} is {value!r}: give a whole number from 1 to "
                    f"{LARGEST[key]}"
                )
            if key == NUM_SMS:
                sms[PHASES[name]] = value
            else:
                idle.append(f"{name}.{key}")
    if not sms and not idle:
        raise ValueError(f"--deepep-config names no {NUM_SMS}: give one, or leave it out")
    return DeepEPConfig(**sms, idle=tuple(idle))


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        raise ValueError("--deepep-config is empty: give JSON, or the path of a file with it")
    if not text.lstrip().startswith(("{", "[")):
        path = Path(text).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--deepep-config {path} is neither an object in JSON nor a file that can be read: "
                f"{error}"
            ) from error
    try:
        found = json.loads(text, object_pairs_hook=_no_key_twice)
    except ValueError as error:
        raise ValueError(
            f"--deepep-config cannot be read as JSON ({error}): {text[:60]!r}"
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"--deepep-config is {text[:60]!r}: give an object of {' and '.join(PHASES)}"
        )
    return found


def _no_key_twice(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} is given twice")
    return dict(pairs)
