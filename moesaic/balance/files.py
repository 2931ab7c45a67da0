"""Files of recorded routing and of placements, in SGLang's formats.

Loads: `logical_count` [steps, layers, experts] or a recorder's dump of passes in JSON, or top-k ids
of tokens as `data` in .npz. Placements: `physical_to_logical_map` [layers, slots] in JSON, and
nothing else, as SGLang's `--init-expert-location` reads them. Files of torch (.pt) are pickles,
which this package never opens: TO_JSON turns them into JSON.
S steps · L layers · E experts · P slots · T tokens · K chosen experts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moesaic.balance.problem import Floats, Ints

PLACEMENT_KEY: Final = "physical_to_logical_map"
LOAD_KEY: Final = "logical_count"
TO_JSON: Final = (
    "import json, sys, torch; json.dump(torch.load(sys.argv[1], weights_only=True), "
    "open(sys.argv[2], 'w'), default=lambda tensor: tensor.tolist())"
)
"""A program for `python -c`, with the two files as arguments."""


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


READERS: Final[dict[str, Callable[[Path], Any]]] = {
    ".json": _read_json,
    ".npz": _read_npz,
}


def read_file(path: Path) -> Mapping[str, Any]:
    """The values of a file by name; ValueError with what to do about one that cannot be read."""
    if path.suffix == ".pt":
        raise ValueError(
            f"{path} is a pickle, which is not opened here: turn it into JSON with "
            f'python -c "{TO_JSON}" {path} {path.with_suffix(".json")}'
        )
    if path.suffix not in READERS:
        raise ValueError(f"{path}: give a file that ends in {', '.join(READERS)}")
    try:
        found = READERS[path.suffix](path)
    except Exception as error:  # zipfile and numpy raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read: {reason}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}: it must hold values by name")
    return found


def read_loads(path: Path, experts: int | None = None, step_tokens: int = 16) -> Floats:
    """[S, L, E]. `experts`: of the model, where a trace may not have met the last ones;
    `step_tokens`: tokens of a trace that make a step."""
    return loads_in(read_file(path), path, experts, step_tokens)


def loads_in(
    found: Mapping[str, Any], path: Path, experts: int | None = None, step_tokens: int = 16
) -> Floats:
    """What `read_loads` gives, of values that have been read. `path` names their source."""
    if LOAD_KEY in found:
        loads = _array(found[LOAD_KEY], path, LOAD_KEY)
        loads = loads[None] if loads.ndim == 2 else loads
    elif "records" in found:
        loads = _loads_of_passes(found, path)
    elif "data" in found:
        loads = loads_of_trace(_array(found["data"], path, "data"), experts, step_tokens)
    else:
        raise ValueError(
            f"{path} has {', '.join(map(str, found)) or 'nothing'}: it needs {LOAD_KEY} (counts), "
            "records (a recorder's passes) or data (top-k ids)"
        )
    if loads.ndim != 3:
        raise ValueError(
            f"{path}: {LOAD_KEY} of shape {list(loads.shape)}: give steps × layers × experts"
        )
    if experts is not None and loads.shape[2] != experts:
        raise ValueError(f"{path} is of {loads.shape[2]} experts, --num-experts of {experts}")
    return loads.astype(np.float32)


def _array(value: Any, path: Path, name: str) -> Any:
    try:
        found = np.asarray(value)
        if found.dtype.kind not in "iuf":
            raise ValueError
    except ValueError:
        raise ValueError(f"{path}: {name} is no array of numbers") from None
    return found


def _loads_of_passes(found: Mapping[str, Any], path: Path) -> Any:
    """Counts of slots become counts of experts by the placement that the dump ends with."""
    if "last_physical_to_logical_map" not in found or not found["records"]:
        raise ValueError(f"{path} has no passes, or no last_physical_to_logical_map: record again")
    slots_LP = _array(found["last_physical_to_logical_map"], path, "last_physical_to_logical_map")
    by_pass: dict[int, Any] = {}
    for record in found["records"]:
        counts_LP = _array(record["global_physical_count"], path, "global_physical_count")
        if counts_LP.shape != slots_LP.shape:
            raise ValueError(
                f"{path}: a pass has counts of {list(counts_LP.shape)}, the placement is of "
                f"{list(slots_LP.shape)} (layers × slots)"
            )
        key = int(record["forward_pass_id"])
        by_pass[key] = by_pass.get(key, 0) + counts_LP
    layers, experts = len(slots_LP), int(slots_LP.max()) + 1
    loads = np.zeros((len(by_pass), layers, experts))
    for step, counts_LP in zip(loads, by_pass.values(), strict=True):
        np.add.at(step, (np.arange(layers)[:, None], slots_LP), counts_LP)
    return loads


def loads_of_trace(ids: Ints, experts: int | None, step_tokens: int) -> Floats:
    """Counts in steps of some tokens, from ids [T, K] of one layer or [L, T, K]; -1 is none."""
    ids_LTK = ids[None] if ids.ndim == 2 else ids
    if ids_LTK.ndim != 3 or 0 in ids_LTK.shape or ids_LTK.dtype.kind not in "iu":
        raise ValueError(f"a trace of shape {list(ids.shape)}: give ids of [tokens, top-k]")
    most = int(ids_LTK.max()) + 1
    experts = experts or most
    if most > experts:
        raise ValueError(f"a trace has expert {most - 1}: --num-experts {experts} is too small")
    layers, tokens, _ = ids_LTK.shape
    loads = np.zeros((-(-tokens // step_tokens), layers, experts), np.float32)
    layer, token, chosen = np.nonzero(ids_LTK >= 0)
    np.add.at(loads, (token // step_tokens, layer, ids_LTK[layer, token, chosen]), 1)
    return loads


def read_placement(path: Path) -> Ints:
    """[L, P]: the expert of each slot."""
    return placement_in(read_file(path), path)


def placement_in(found: Mapping[str, Any], path: Path) -> Ints:
    """What `read_placement` gives, of values that have been read. `path` names their source."""
    if PLACEMENT_KEY not in found:
        raise ValueError(f"{path} has no {PLACEMENT_KEY}: write one with moesaic balance --out")
    slots_LP = _array(found[PLACEMENT_KEY], path, PLACEMENT_KEY)
    if slots_LP.ndim != 2 or slots_LP.dtype.kind not in "iu":
        raise ValueError(f"{path}: {PLACEMENT_KEY} must be whole numbers, layers × slots")
    return slots_LP.astype(np.int64)


def write_placement(path: Path, slots_LP: Ints) -> None:
    """For SGLang's `--init-expert-location`; readable by json alone."""
    path.write_text(json.dumps({PLACEMENT_KEY: slots_LP.tolist()}) + "\n", encoding="utf-8")
