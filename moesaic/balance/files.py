"""Files of recorded routing and of placements, in SGLang's formats.

Loads: `logical_count` [steps, layers, experts] or a recorder's dump of passes, as torch saves them
(.pt) or in JSON, or top-k ids of tokens as `data` in .npz. Placements: `physical_to_logical_map`
[layers, slots] in JSON, and nothing else, as SGLang's `--init-expert-location` reads them.

A .pt file is a pickle. Only this module opens any, with a reader that makes tensors and plain
containers of it and refuses all else, so that no code in it is run.
S steps · L layers · E experts · P slots · T tokens · K chosen experts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from moesaic.balance.pass_records import PLACEMENT_KEY, Files, array_in, loads_of_passes
from moesaic.balance.problem import Floats, Ints

LOAD_KEY: Final = "logical_count"
PRIVATE: Final = 0o600
# One wrong id of a trace must not ask for all memory.
MOST_EXPERTS: Final = 1 << 16


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _read_npz(path: Path) -> Any:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _read_torch(path: Path) -> Any:
    import torch

    return torch.load(path, map_location="cpu", weights_only=True, mmap=False)


READERS: Final[dict[str, Callable[[Path], Any]]] = {
    ".json": _read_json,
    ".npz": _read_npz,
    ".pt": _read_torch,
}


def read_content(path: Path) -> Any:
    """What a file holds; ValueError with what to do about one that cannot be read."""
    if not path.exists():
        raise ValueError(f"there is no file {path}")
    if path.suffix not in READERS:
        raise ValueError(f"{path}: give a file that ends in {', '.join(READERS)}")
    try:
        return READERS[path.suffix](path)
    except Exception as error:  # zipfile, numpy and torch raise many kinds
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} cannot be read: {reason}") from None


def read_file(path: Path) -> Mapping[str, Any]:
    """The values of a file by name."""
    found = read_content(path)
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} holds a {type(found).__name__}: it must hold values by name")
    return found


def read_folder(path: Path) -> Files:
    """The files in which several ranks have recorded their passes."""
    files = {file: read_file(file) for file in sorted(path.glob("*.pt"))}
    wrong = [file for file, found in files.items() if "records" not in found]
    if not files or wrong:
        raise ValueError(
            f"{path} has {len(files)} .pt files, {len(wrong)} without records: a folder must have "
            "the files of one dump in mode per_pass or per_token, and nothing else"
        )
    return files


def read_loads(path: Path, experts: int | None = None, step_tokens: int = 16) -> Floats:
    """[S, L, E] of a file, or of a folder with the files of all ranks. `experts`: of the model,
    where a trace may not have met the last ones; `step_tokens`: tokens of a trace that make a
    step."""
    if path.is_dir():
        return _checked(loads_of_passes(read_folder(path), path), path, experts)
    return loads_in(read_file(path), path, experts, step_tokens)


def loads_in(
    found: Mapping[str, Any], path: Path, experts: int | None = None, step_tokens: int = 16
) -> Floats:
    """What `read_loads` gives, of values that have been read. `path` names their source."""
    if LOAD_KEY in found:
        loads = array_in(found[LOAD_KEY], path, LOAD_KEY)
        loads = loads[None] if loads.ndim == 2 else loads
    elif "records" in found:
        loads = loads_of_passes({path: found}, path)
    elif "data" in found:
        loads = loads_of_trace(array_in(found["data"], path, "data"), experts, step_tokens)
    else:
        raise ValueError(
            f"{path} has {', '.join(map(str, found)) or 'nothing'}: it needs {LOAD_KEY} (counts), "
            "records (a recorder's passes) or data (top-k ids)"
        )
    return _checked(loads, path, experts)


def _checked(loads: Any, path: Path, experts: int | None) -> Floats:
    if loads.ndim != 3:
        raise ValueError(
            f"{path}: {LOAD_KEY} of shape {list(loads.shape)}: give steps × layers × experts"
        )
    if experts is not None and loads.shape[2] != experts:
        raise ValueError(f"{path} is of {loads.shape[2]} experts, --num-experts of {experts}")
    found: Floats = loads.astype(np.float32)
    return found


def loads_of_trace(ids: Ints, experts: int | None, step_tokens: int) -> Floats:
    """Counts in steps of some tokens, from ids [T, K] of one layer or [L, T, K]; -1 is none."""
    ids_LTK = ids[None] if ids.ndim == 2 else ids
    if ids_LTK.ndim != 3 or 0 in ids_LTK.shape or ids_LTK.dtype.kind not in "iu":
        raise ValueError(f"a trace of shape {list(ids.shape)}: give ids of [tokens, top-k]")
    most = int(ids_LTK.max()) + 1
    if most > MOST_EXPERTS:
        raise ValueError(f"a trace has expert {most - 1}: no model has over {MOST_EXPERTS}")
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
    slots_LP = array_in(found[PLACEMENT_KEY], path, PLACEMENT_KEY)
    if slots_LP.ndim != 2 or slots_LP.dtype.kind not in "iu":
        raise ValueError(f"{path}: {PLACEMENT_KEY} must be whole numbers, layers × slots")
    return slots_LP.astype(np.int64)


def write_placement(path: Path, slots_LP: Ints) -> None:
    """For SGLang's `--init-expert-location`; readable by json alone."""
    path.write_text(json.dumps({PLACEMENT_KEY: slots_LP.tolist()}) + "\n", encoding="utf-8")


def write_dump(path: Path, content: Mapping[str, Any]) -> None:
    """Saves values by name for torch.load, whole or not at all, for its owner alone. Arrays of
    numpy become tensors."""
    import torch

    partial = path.with_name(f".{path.name}.part")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
    try:
        with open(file, "wb") as stream:
            torch.save(_with_tensors(content), stream)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _with_tensors(value: Any) -> Any:
    import torch

    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, Mapping):
        return {key: _with_tensors(one) for key, one in value.items()}
    return [_with_tensors(one) for one in value] if isinstance(value, list) else value
