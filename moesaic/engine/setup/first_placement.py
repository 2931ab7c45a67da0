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
from moesaic.balance.files import loads_in, placement_in, read_file
from moesaic.balance.pass_records import PLACEMENT_KEY
from moesaic.balance.problem import BalanceProblem, Ints, check_placement
from moesaic.config import ServerArgs
from moesaic.moe.placement import Placement

logger = logging.getLogger(__name__)

FLAG: Final = "--init-expert-location"
TRIVIAL: Final = "trivial"


def first_placements(
    args: ServerArgs, moe_layers: Sequence[int], num_layers: int, experts: int, slots: int
) -> dict[int, Placement]:
    """By layer; empty if all are trivial. ValueError if the flag does not fit the model.
    `moe_layers`: the numbers of its layers with experts, of `num_layers` in all."""
    if args.init_expert_location == TRIVIAL or not moe_layers:
        return {}
    source, found = _read(args.init_expert_location)
    if PLACEMENT_KEY in found:
        slots_LP = _rows(placement_in(found, source), moe_layers, num_layers, source)
    else:
        slots_LP = _planned(args, found, source, moe_layers, num_layers, experts, slots)
    try:
        check_placement(slots_LP, len(moe_layers), experts, slots)
    except ValueError as error:
        raise ValueError(
            f"{FLAG}: {source}: {error}; the model has {experts} experts, and "
            f"--ep-num-redundant-experts is {args.ep_num_redundant_experts}"
        ) from None
    rows = zip(moe_layers, slots_LP.tolist(), strict=True)
    return {layer: Placement(experts, tuple(row)) for layer, row in rows}


def _read(text: str) -> tuple[Path, Mapping[str, Any]]:
    """The values of a file or of inline JSON, and a name for their source."""
    if not text.lstrip().startswith("{"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(
                f"{FLAG} {text}: there is no such file: give trivial, a file, or JSON in braces"
            )
        return path, read_file(path)
    try:
        return Path("the JSON"), json.loads(text)
    except ValueError as error:
        raise ValueError(f"{FLAG}: this is no JSON: {error}") from None


def _rows(values: Any, moe_layers: Sequence[int], num_layers: int, source: Path) -> Any:
    """One row for each layer with experts. A file may have rows for all layers, as SGLang's do."""
    if len(values) == len(moe_layers):
        return values
    if len(values) == num_layers:
        return values[list(moe_layers)]
    raise ValueError(
        f"{FLAG}: {source} is of {len(values)} layers, but the model has {num_layers}, of which "
        f"{len(moe_layers)} have experts: it belongs to another model"
    )


def _planned(
    args: ServerArgs,
    found: Mapping[str, Any],
    source: Path,
    moe_layers: Sequence[int],
    num_layers: int,
    experts: int,
    slots: int,
) -> Ints:
    """A plan from recorded loads."""
    try:
        loads_SLE = loads_in(found, source)
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}, or {PLACEMENT_KEY}") from None
    if loads_SLE.shape[2] != experts:
        raise ValueError(
            f"{FLAG}: {source} is of {loads_SLE.shape[2]} experts, but the model has {experts}: it "
            "belongs to another model"
        )
    total_LE = _rows(loads_SLE.sum(0), moe_layers, num_layers, source)
    problem = BalanceProblem(total_LE[None], slots, args.ep_size)
    plan = make_plan(args.eplb_algorithm, problem)
    logger.info("eplb: first placement by %s from %s: %s", plan.algorithm, source, plan.reason)
    return plan.slots_LP
