"""--init-expert-location: where experts reside when a service starts.

S steps · L layers · E experts · P slots.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moesaic.balance.algorithms import make_plan
from moesaic.balance.files import loads_in, placement_in, read_file, read_loads
from moesaic.balance.pass_records import PLACEMENT_KEY
from moesaic.balance.problem import BalanceProblem, Floats, Ints, check_placement
from moesaic.config import ServerArgs
from moesaic.moe.placement import Placement

logger = logging.getLogger(__name__)

FLAG: Final = "--init-expert-location"
TRIVIAL: Final = "trivial"


def first_placements(
    args: ServerArgs, moe_layers: Sequence[int], num_layers: int, experts: int, slots: int
) -> dict[int, Placement]:
    """The placement of each layer; empty if all are trivial. ValueError if the flag does not fit
    the model. `moe_layers`: the numbers of its layers with experts, of `num_layers` in all."""
    if args.init_expert_location == TRIVIAL or not moe_layers:
        return {}
    try:
        source, found = _read(args.init_expert_location)
        if PLACEMENT_KEY in found:
            slots_LP = _rows(placement_in(found, source), moe_layers, num_layers, source)
            _check_slots(slots_LP.shape[1], experts, slots, source)
        else:
            total_LE = _rows(_loads(found, source, experts), moe_layers, num_layers, source)
            _check_counted(total_LE, moe_layers, source)
            slots_LP = _planned(args, total_LE, slots, source)
        check_placement(slots_LP, len(moe_layers), experts, slots)
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None
    rows = zip(moe_layers, slots_LP.tolist(), strict=True)
    return {layer: Placement(experts, tuple(row)) for layer, row in rows}


def fixes_slots(args: ServerArgs) -> bool:
    """Whether the flag is a placement, which has a number of slots of its own."""
    location = args.init_expert_location
    return location != TRIVIAL and PLACEMENT_KEY in _read(location)[1]


def _read(text: str) -> tuple[Path, Mapping[str, Any]]:
    """The values of a file or of inline JSON, and a name for their source. A folder of a recorder's
    files has none of its own."""
    if not text.lstrip().startswith("{"):
        path = Path(text)
        if not path.exists():
            raise ValueError(f"there is no file {text}: give trivial, a file, or JSON in braces")
        return path, {} if path.is_dir() else read_file(path)
    try:
        return Path("the JSON"), json.loads(text)
    except ValueError as error:
        raise ValueError(f"this is no JSON: {error}") from None


def _check_slots(found: int, experts: int, slots: int, source: Path) -> None:
    if found != slots:
        fits = f": give --ep-num-redundant-experts {found - experts}" if found >= experts else ""
        raise ValueError(f"{source} has {found} slots in a layer, but there are {slots}{fits}")


def _rows(values: Any, moe_layers: Sequence[int], num_layers: int, source: Path) -> Any:
    """One row for each layer with experts. A file may have rows for all layers, as SGLang's do."""
    if len(values) == len(moe_layers):
        return values
    if len(values) == num_layers:
        return values[list(moe_layers)]
    raise ValueError(
        f"{source} is of {len(values)} layers, but the model has {num_layers}, of which "
        f"{len(moe_layers)} have experts: it belongs to another model"
    )


def _loads(found: Mapping[str, Any], source: Path, experts: int) -> Floats:
    """[L, E]: the tokens that were counted in all."""
    try:
        loads_SLE = read_loads(source) if source.is_dir() else loads_in(found, source)
    except ValueError as error:
        raise ValueError(f"{error}, or {PLACEMENT_KEY}") from None
    if loads_SLE.shape[2] != experts:
        raise ValueError(
            f"{source} is of {loads_SLE.shape[2]} experts, but the model has {experts}: it belongs "
            "to another model"
        )
    if not loads_SLE.any():
        raise ValueError(f"{source} has counted no tokens: record some")
    return loads_SLE.sum(0)


def _check_counted(total_LE: Floats, moe_layers: Sequence[int], source: Path) -> None:
    """Every layer computes every token, so that one without counts had no experts there."""
    empty = [layer for layer, row in zip(moe_layers, total_LE, strict=True) if not row.any()]
    if empty:
        raise ValueError(
            f"{source} has no tokens of layer {empty[0]}, which has experts here: it belongs to "
            "another model"
        )


def _planned(args: ServerArgs, total_LE: Floats, slots: int, source: Path) -> Ints:
    """A plan from recorded loads."""
    problem = BalanceProblem(total_LE[None], slots, args.ep_size)
    plan = make_plan(args.eplb_algorithm, problem)
    logger.info("eplb: first placement by %s from %s: %s", plan.algorithm, source, plan.reason)
    return plan.slots_LP
