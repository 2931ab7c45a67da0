"""--deepep-config: how many SMs normal mode's kernels may use, in SGLang's JSON.

    {"normal_dispatch": {"num_sms": 24}, "normal_combine": {"num_sms": 24}}

Chunk sizes are accepted and ignored: kernels write rows straight to where they are computed.
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
    f"num_max_{link}_chunked_{end}_tokens" for link in ("nvl", "rdma") for end in ("send", "recv")
)
# Above what any GPU or step has.
LARGEST: Final = {NUM_SMS: 1024, **dict.fromkeys(CHUNKS, 1 << 20)}


@dataclass(frozen=True, slots=True)
class DeepEPConfig:
    """The most SMs that dispatch and combine may use; 0: no limit."""

    dispatch: int = 0
    combine: int = 0
    ignored: tuple[str, ...] = ()  # keys that have no effect

    def notes(self, processors: int) -> Iterator[str]:
        """Settings that have no effect on a GPU with this many SMs; 0: not known."""
        if self.ignored:
            yield f"--deepep-config: nothing is sent in chunks here: {', '.join(self.ignored)}"
        for name, phase in PHASES.items():
            if processors and (given := getattr(self, phase)) > processors:
                yield (
                    f"--deepep-config: {NUM_SMS} {given} of {name} bounds nothing: the GPU has "
                    f"{processors} multiprocessors"
                )


def read_deepep_config(text: str) -> DeepEPConfig:
    """Read JSON, or the JSON file at a path."""
    phases = _parse(text)
    sms, ignored = {}, []
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
                ignored.append(f"{name}.{key}")
    if not sms and not ignored:
        raise ValueError(f"--deepep-config names no {NUM_SMS}: give one, or leave it out")
    return DeepEPConfig(**sms, ignored=tuple(ignored))


def _parse(text: str) -> dict[str, Any]:
    if not text.strip():
        raise ValueError("--deepep-config is empty: give JSON, or the path of a JSON file")
    if not text.lstrip().startswith(("{", "[")):
        path = Path(text).expanduser()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--deepep-config {path} is neither a JSON object nor a readable file: {error}"
            ) from error
    try:
        found = json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as error:
        raise ValueError(f"--deepep-config is not valid JSON ({error}): {text[:60]!r}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"--deepep-config is {text[:60]!r}: give an object of {' and '.join(PHASES)}"
        )
    return found


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ValueError(f"{twice[0]!r} is given twice")
    return dict(pairs)
