"""Conversions and comparisons of quantities; `dates` has the problems about time."""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from moesaic.evals.tasks import dates
from moesaic.evals.tasks.common import Draw, evenly, pick, pick_two, randint, solved
from moesaic.evals.tasks.dates import TOWNS
from moesaic.evals.tasks.problem import Problem
from moesaic.evals.tasks.wordings import read_wordings


class Unit(NamedTuple):
    """A big unit, which has `factor` small ones."""

    big: str
    singular: str
    factor: int
    small: str
    max_number: int  # of big units in a problem
    things: str
    verb: str
    comparative: str


UNITS: Final = tuple(
    Unit(*row)
    for row in (
        ("km", "km", 1000, "m", 9, "road river canal trail tunnel", "measures", "longer"),
        ("m", "m", 100, "cm", 99, "rope fence wall cable ribbon", "measures", "longer"),
        ("cm", "cm", 10, "mm", 300, "screw nail ruler strip chain", "measures", "longer"),
        ("kg", "kg", 1000, "g", 9, "stone sack parcel cheese suitcase", "weighs", "heavier"),
        ("litres", "litre", 1000, "ml", 9, "tank bucket barrel jug pot", "holds", "larger"),
        ("hours", "hour", 60, "minutes", 24, "flight concert film drive show", "lasts", "longer"),
        ("minutes", "minute", 60, "seconds", 60, "song race clip dive speech", "lasts", "longer"),
        ("days", "day", 24, "hours", 30, "voyage storm journey strike hike", "lasts", "longer"),
        ("weeks", "week", 7, "days", 52, "holiday course project tour camp", "lasts", "longer"),
    )
)
THINGS: Final = {
    unit.big: tuple(
        f"{sort} {thing}"
        for sort in "new strange famous plain second first rare typical".split()
        for thing in unit.things.split()
    )
    for unit in UNITS
}
DOZEN_THINGS: Final = tuple("eggs cups roses spoons candles bottles bulbs plates forks".split())
ASKS: Final = read_wordings("""
    down: The {thing} near {town} {verb} {n} {big}. How many {small} is that?
    | Convert {n} {big} to {small} for the {thing} of {town}.
    | A {thing} in {town} {verb} {n} {big}. What is this in {small}?
    | A {thing} from {town}: {n} {big}. Give the same in {small}.
    | Express {n} {big} in {small}; it is what a {thing} in {town} has.
    | How many {small} are {n} {big}, the size of a {thing} in {town}?
    mixed: The {thing} near {town} {verb} {n} {big} {r} {small}. How many {small} is that?
    | Write {n} {big} {r} {small} in {small} only: that is a {thing} of {town}.
    | A {thing} from {town}: {n} {big} and {r} {small}. Give it all in {small}.
    | Convert {n} {big} {r} {small} to {small} for the {thing} of {town}.
    | A {thing} in {town} {verb} {n} {big} and {r} {small}. What is this in {small}?
    | How many {small} are {n} {big} {r} {small}, the size of a {thing} in {town}?
    unmixed: Write {t} {small} as {big} and {small}, like 2 {big} 3 {small}. It is a {thing} of \
        {town}.
    | The {thing} near {town} {verb} {t} {small}. Give it in full {big} and {small}.
    | A {thing} from {town}: {t} {small}. How many full {big}, and how many {small} remain?
    | Split {t} {small}, a {thing} in {town}, into {big} and {small}.
    | How many {big} and {small} are {t} {small}, the size of a {thing} in {town}?
    | Turn {t} {small} into {big} and {small} for the {thing} of {town}.
    dozens: How many {things} are {n} dozen {things} and {r} more in {town}?
    | A shop in {town} has {n} dozen {things} and {r} single ones. How many {things} is that?
    | A cook in {town} orders {n} dozen {things} and then {r} more. How many {things} in all?
    | Count the {things}: {n} dozen came from {town} and {r} from elsewhere.
    | {n} dozen {things} and {r} loose {things} leave {town}. Give the number of {things}.
    | Find the number of {things} in {n} dozen and {r}, all from {town}.
    which: Which {thing} is {more}: the one in {town} with {p} or the one in {other} with {q}?
    | The {thing} of {town} has {p}, the {thing} of {other} has {q}. Name the {more} measure.
    | {town} has a {thing} of {p}, {other} one of {q}. Which of the two measures is {more}?
    | Compare a {thing} of {p} in {town} with one of {q} in {other}: which size is {more}?
    | A {thing} of {p} ({town}) or a {thing} of {q} ({other}): which measure is {more}?
    | Of {p} ({thing} in {town}) and {q} ({thing} in {other}), which is {more}?
    gap: How many {small} {more} is the {thing} of {town} ({p}) than that of {other} ({q})?
    | The {thing} of {town} has {p}, that of {other} has {q}. Find the difference in {small}.
    | By how many {small} do {p} (a {thing} in {town}) and {q} (one in {other}) differ?
    | {town} has a {thing} of {p}, {other} one of {q}. How many {small} lie between them?
    | In {small}, how far apart are {p} and {q}, the sizes of the {thing} in {town} and {other}?
    | A {thing} has {p} in {town} and {q} in {other}. Give the difference in {small}.
""")


def _ask(rng: random.Random, kind: str, unit: Unit, **fields: str | int) -> str:
    wording = pick(rng, ASKS[kind])
    thing = pick(rng, THINGS[unit.big])
    town = fields.pop("town", None) or pick(rng, TOWNS)
    named = {"big": unit.big, "small": unit.small, "verb": unit.verb, "more": unit.comparative}
    return wording.format_map({**named, "thing": thing, "town": town, **fields})


def _smaller(rng: random.Random) -> Problem:
    """A big unit in small ones."""
    unit = pick(rng, UNITS)
    n = randint(rng, 2, unit.max_number)
    prompt = _ask(rng, "down", unit, n=n)
    factor, small, total = unit.factor, unit.small, n * unit.factor
    work = f"1 {unit.singular} = {factor} {small}. {n} * {factor} = {total}."
    return solved("units", prompt, f"{total} {small}", work)


def _bigger(rng: random.Random) -> Problem:
    """Small units in a big one, without a rest."""
    unit = pick(rng, UNITS)
    n = randint(rng, 2, unit.max_number)
    factor, total = unit.factor, n * unit.factor
    prompt = _ask(rng, "down", unit, n=total, big=unit.small, small=unit.big)
    work = f"{factor} {unit.small} = 1 {unit.singular}. {total} / {factor} = {n}."
    return solved("units", prompt, f"{n} {unit.big}", work)


def _mixed(rng: random.Random) -> Problem:
    """3 km 250 m in m."""
    unit = pick(rng, UNITS)
    n, r = randint(rng, 2, unit.max_number), randint(rng, 2, unit.factor - 1)
    prompt = _ask(rng, "mixed", unit, n=n, r=r)
    total = n * unit.factor
    work = f"{n} * {unit.factor} = {total}. {total} + {r} = {total + r}."
    return solved("units", prompt, f"{total + r} {unit.small}", work)


def _unmixed(rng: random.Random) -> Problem:
    """3250 m in km and m."""
    unit = pick(rng, UNITS)
    n, r = randint(rng, 2, unit.max_number), randint(rng, 2, unit.factor - 1)
    whole = n * unit.factor
    prompt = _ask(rng, "unmixed", unit, t=whole + r)
    work = f"{n} * {unit.factor} = {whole}. {whole + r} - {whole} = {r}."
    return solved("units", prompt, f"{n} {unit.big} {r} {unit.small}", work)


def _dozens(rng: random.Random) -> Problem:
    n, r, things = randint(rng, 2, 30), randint(rng, 2, 99), pick(rng, DOZEN_THINGS)
    prompt = pick(rng, ASKS["dozens"]).format(n=n, r=r, things=things, town=pick(rng, TOWNS))
    work = f"{n} * 12 = {n * 12}. {n * 12} + {r} = {n * 12 + r}."
    return solved("units", prompt, f"{n * 12 + r} {things}", work)


def _compare(rng: random.Random) -> Problem:
    """Two quantities in different units: the larger one."""
    unit = pick(rng, UNITS)
    small, factor, n = unit.small, unit.factor, randint(rng, 2, unit.max_number)
    total = n * factor
    gap = randint(rng, 1, max(2, total // 3))
    rest = total + gap if rng.random() < 0.5 and total + gap < 10_000 else total - gap
    p, q = f"{n} {unit.big}", f"{rest} {small}"
    left, right = (p, q) if rng.random() < 0.5 else (q, p)
    town, other = pick_two(rng, TOWNS)
    prompt = _ask(rng, "which", unit, p=left, q=right, town=town, other=other)
    word = "more" if total > rest else "less"
    work = f"{n} * {factor} = {total}. {total} {small} and {rest} {small}: the first is {word}."
    return solved("units", prompt, p if total > rest else q, work)


def _gap(rng: random.Random) -> Problem:
    """Two quantities in different units: the difference in the smaller unit."""
    unit = pick(rng, UNITS)
    small, factor, n = unit.small, unit.factor, randint(rng, 2, unit.max_number)
    total = n * factor
    rest = randint(rng, max(2, total - 999), total - 2)
    town, other = pick_two(rng, TOWNS)
    p, q = f"{n} {unit.big}", f"{rest} {small}"
    prompt = _ask(rng, "gap", unit, p=p, q=q, town=town, other=other)
    work = f"{n} * {factor} = {total}. {total} - {rest} = {total - rest}."
    return solved("units", prompt, f"{total - rest} {small}", work)


KINDS: Final[dict[str, Draw]] = {
    "smaller": _smaller,
    "bigger": _bigger,
    "mixed": _mixed,
    "unmixed": _unmixed,
    "dozens": _dozens,
    "compare": _compare,
    "gap": _gap,
    **dates.KINDS,
}
draw: Final = evenly(KINDS)
