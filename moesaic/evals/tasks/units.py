"""Conversions, clock times, weekdays, dates and years."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from moesaic.evals.tasks import moments
from moesaic.evals.tasks.chance import pick, two, upto
from moesaic.evals.tasks.moments import TOWNS, unit_problem
from moesaic.evals.tasks.problem import Problem

# big unit, one of it, how many small ones it has, small unit, the most big ones, what is measured,
# how one says so, comparative
UNITS: Final = (
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
THINGS: Final = {
    unit[0]: tuple(
        f"{sort} {thing}"
        for sort in "new strange famous plain second first rare typical".split()
        for thing in unit[5].split()
    )
    for unit in UNITS
}


DOWN: Final = (
    "The {thing} near {town} {verb} {n} {big}. How many {small} is that?",
    "Convert {n} {big} to {small} for the {thing} of {town}.",
    "A {thing} in {town} {verb} {n} {big}. What is this in {small}?",
    "A {thing} from {town}: {n} {big}. Give the same in {small}.",
    "Express {n} {big} in {small}; it is what a {thing} in {town} has.",
    "How many {small} are {n} {big}, the size of a {thing} in {town}?",
)


def smaller(rng: random.Random) -> Problem:
    """A big unit in small ones."""
    big, one, factor, small, most, _, verb, _ = pick(rng, UNITS)
    n = upto(rng, 2, most)
    prompt = pick(rng, DOWN).format(
        n=n, big=big, small=small, verb=verb, thing=pick(rng, THINGS[big]), town=pick(rng, TOWNS)
    )
    total = n * factor
    work = f"1 {one} = {factor} {small}. {n} * {factor} = {total}."
    return unit_problem(prompt, work, f"{total} {small}")


def bigger(rng: random.Random) -> Problem:
    """Small units in a big one, without a rest."""
    big, one, factor, small, most, _, verb, _ = pick(rng, UNITS)
    n = upto(rng, 2, most)
    total = n * factor
    prompt = pick(rng, DOWN).format(
        n=total,
        big=small,
        small=big,
        verb=verb,
        thing=pick(rng, THINGS[big]),
        town=pick(rng, TOWNS),
    )
    work = f"{factor} {small} = 1 {one}. {total} / {factor} = {n}."
    return unit_problem(prompt, work, f"{n} {big}")


MIXED: Final = (
    "The {thing} near {town} {verb} {n} {big} {r} {small}. How many {small} is that?",
    "Write {n} {big} {r} {small} in {small} only: that is a {thing} of {town}.",
    "A {thing} from {town}: {n} {big} and {r} {small}. Give it all in {small}.",
    "Convert {n} {big} {r} {small} to {small} for the {thing} of {town}.",
    "A {thing} in {town} {verb} {n} {big} and {r} {small}. What is this in {small}?",
    "How many {small} are {n} {big} {r} {small}, the size of a {thing} in {town}?",
)


def mixed(rng: random.Random) -> Problem:
    """3 km 250 m in m."""
    big, _, factor, small, most, _, verb, _ = pick(rng, UNITS)
    n, r = upto(rng, 2, most), upto(rng, 2, factor - 1)
    prompt = pick(rng, MIXED).format(
        n=n,
        r=r,
        big=big,
        small=small,
        verb=verb,
        thing=pick(rng, THINGS[big]),
        town=pick(rng, TOWNS),
    )
    total = n * factor
    work = f"{n} * {factor} = {total}. {total} + {r} = {total + r}."
    return unit_problem(prompt, work, f"{total + r} {small}")


UNMIXED: Final = (
    "Write {t} {small} as {big} and {small}, like 2 {big} 3 {small}. It is a {thing} of {town}.",
    "The {thing} near {town} {verb} {t} {small}. Give it in full {big} and {small}.",
    "A {thing} from {town}: {t} {small}. How many full {big}, and how many {small} remain?",
    "Split {t} {small}, a {thing} in {town}, into {big} and {small}.",
    "How many {big} and {small} are {t} {small}, the size of a {thing} in {town}?",
    "Turn {t} {small} into {big} and {small} for the {thing} of {town}.",
)


def unmixed(rng: random.Random) -> Problem:
    """3250 m in km and m."""
    big, _, factor, small, most, _, verb, _ = pick(rng, UNITS)
    n, r = upto(rng, 2, most), upto(rng, 2, factor - 1)
    total = n * factor + r
    prompt = pick(rng, UNMIXED).format(
        t=total,
        big=big,
        small=small,
        verb=verb,
        thing=pick(rng, THINGS[big]),
        town=pick(rng, TOWNS),
    )
    work = f"{n} * {factor} = {n * factor}. {total} - {n * factor} = {r}."
    return unit_problem(prompt, work, f"{n} {big} {r} {small}")


DOZENS: Final = (
    "How many {things} are {n} dozen {things} and {r} more in {town}?",
    "A shop in {town} has {n} dozen {things} and {r} single ones. How many {things} is that?",
    "A cook in {town} orders {n} dozen {things} and then {r} more. How many {things} in all?",
    "Count the {things}: {n} dozen came from {town} and {r} from elsewhere.",
    "{n} dozen {things} and {r} loose {things} leave {town}. Give the number of {things}.",
    "Find the number of {things} in {n} dozen and {r}, all from {town}.",
)
DOZEN_THINGS: Final = tuple("eggs cups roses spoons candles bottles bulbs plates forks".split())


def dozens(rng: random.Random) -> Problem:
    n, r, things = upto(rng, 2, 30), upto(rng, 2, 99), pick(rng, DOZEN_THINGS)
    prompt = pick(rng, DOZENS).format(n=n, r=r, things=things, town=pick(rng, TOWNS))
    work = f"{n} * 12 = {n * 12}. {n * 12} + {r} = {n * 12 + r}."
    return unit_problem(prompt, work, f"{n * 12 + r} {things}")


WHICH: Final = (
    "Which {thing} is {more}: the one in {town} with {p} or the one in {other} with {q}?",
    "The {thing} of {town} has {p}, the {thing} of {other} has {q}. Name the {more} measure.",
    "{town} has a {thing} of {p}, {other} one of {q}. Which of the two measures is {more}?",
    "Compare a {thing} of {p} in {town} with one of {q} in {other}: which size is {more}?",
    "A {thing} of {p} ({town}) or a {thing} of {q} ({other}): which measure is {more}?",
    "Of {p} ({thing} in {town}) and {q} ({thing} in {other}), which is {more}?",
)
GAP: Final = (
    "How many {small} {more} is the {thing} of {town} ({p}) than that of {other} ({q})?",
    "The {thing} of {town} has {p}, that of {other} has {q}. Find the difference in {small}.",
    "By how many {small} do {p} (a {thing} in {town}) and {q} (one in {other}) differ?",
    "{town} has a {thing} of {p}, {other} one of {q}. How many {small} lie between them?",
    "In {small}, how far apart are {p} and {q}, the sizes of the {thing} in {town} and {other}?",
    "A {thing} has {p} in {town} and {q} in {other}. Give the difference in {small}.",
)


def compare(rng: random.Random) -> Problem:
    """Two quantities in different units: the larger one."""
    big, _, factor, small, most, _, _, more = pick(rng, UNITS)
    n = upto(rng, 2, most)
    total = n * factor
    gap = upto(rng, 1, max(2, total // 3))
    rest = total + gap if rng.random() < 0.5 and total + gap < 10_000 else total - gap
    p, q = f"{n} {big}", f"{rest} {small}"
    left, right = (p, q) if rng.random() < 0.5 else (q, p)
    town, other = two(rng, TOWNS)
    prompt = pick(rng, WHICH).format(
        more=more, thing=pick(rng, THINGS[big]), p=left, q=right, town=town, other=other
    )
    word = "more" if total > rest else "less"
    work = f"{n} * {factor} = {total}. {total} {small} and {rest} {small}: the first is {word}."
    return unit_problem(prompt, work, p if total > rest else q)


def gap(rng: random.Random) -> Problem:
    """Two quantities in different units: the difference in the smaller unit."""
    big, _, factor, small, most, _, _, more = pick(rng, UNITS)
    n = upto(rng, 2, most)
    total = n * factor
    rest = upto(rng, max(2, total - 999), total - 2)
    town, other = two(rng, TOWNS)
    prompt = pick(rng, GAP).format(
        more=more,
        thing=pick(rng, THINGS[big]),
        p=f"{n} {big}",
        q=f"{rest} {small}",
        small=small,
        town=town,
        other=other,
    )
    work = f"{n} * {factor} = {total}. {total} - {rest} = {total - rest}."
    return unit_problem(prompt, work, f"{total - rest} {small}")


KINDS: Final[dict[str, Callable[[random.Random], Problem]]] = {
    "smaller": smaller,
    "bigger": bigger,
    "mixed": mixed,
    "unmixed": unmixed,
    "dozens": dozens,
    "compare": compare,
    "gap": gap,
    **moments.KINDS,
}
_KINDS: Final = tuple(KINDS.values())


def draw(rng: random.Random) -> Problem:
    return pick(rng, _KINDS)(rng)
