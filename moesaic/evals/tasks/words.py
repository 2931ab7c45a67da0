"""Grade-school word problems of two to four steps, some with an irrelevant number."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Final

from moesaic.evals.tasks.common import Draw, evenly, pick, pick_two, randint, sample, solved
from moesaic.evals.tasks.problem import Problem
from moesaic.evals.tasks.relations import CHAINS, GROUPS, ComparisonChain
from moesaic.evals.tasks.stories import BOYS, GIRLS, THEMES, Theme
from moesaic.evals.tasks.wordings import Part

NAMES: Final = BOYS + GIRLS
PRONOUN: Final = dict.fromkeys(BOYS, "He") | dict.fromkeys(GIRLS, "She")
STEPS: Final = (2, 2, 3, 3, 4)  # drawn from evenly
DISTRACTED: Final = 0.4
ASIDES: Final = (
    ("{N} lives at number {D} of a long street.", 2, 199),
    ("The temperature outside is {D} degrees.", 5, 35),
    ("A hat in a shop window costs ${D}, but nobody buys it.", 5, 90),
    ("The radio plays song number {D} of the charts.", 2, 100),
    ("It is day {D} of the month.", 2, 28),
    ("A sign says that line {D} is late today.", 2, 300),
)
DISTRACTORS: Final = ASIDES + (
    ("{N} is in grade {D}.", 2, 9),
    ("{O} is {D} years old.", 5, 80),
    ("{N} has known {O} for {D} years.", 2, 15),
    ("{N}'s shoe size is {D}.", 30, 46),
    ("{O} watches a film of {D} minutes.", 70, 180),
    ("{O} lives on floor {D} of a tower.", 2, 40),
)
DIVISORS: Final = tuple(
    tuple(k for k in range(2, 13) if number % k == 0 and 2 <= number // k < 100)
    for number in range(1000)
)

# A rule draws the numbers A and B of a text and changes the quantity x; None if no numbers fit.
Numbers = tuple[int, int, int]  # A, B, the new quantity
Rule = Callable[[random.Random, int], Numbers | None]


def _set(rng: random.Random, x: int) -> Numbers | None:
    a = randint(rng, 12, 160)
    return a, 0, a


def _set_times(rng: random.Random, x: int) -> Numbers | None:
    a, b = randint(rng, 2, 12), randint(rng, 3, 20)
    return a, b, a * b


def _set_sum(rng: random.Random, x: int) -> Numbers | None:
    a, b = randint(rng, 5, 90), randint(rng, 5, 90)
    return a, b, a + b


def _add(rng: random.Random, x: int) -> Numbers | None:
    a = randint(rng, 2, 99)
    return (a, 0, x + a) if x + a < 1000 else None


def _take(rng: random.Random, x: int) -> Numbers | None:
    if x < 5:
        return None
    a = randint(rng, 2, min(x - 2, 99))
    return a, 0, x - a


def _add_times(rng: random.Random, x: int) -> Numbers | None:
    a, b = randint(rng, 2, 12), randint(rng, 2, 12)
    return (a, b, x + a * b) if x + a * b < 1000 else None


def _take_times(rng: random.Random, x: int) -> Numbers | None:
    if x < 8:
        return None
    a = randint(rng, 2, min(12, x // 2 - 1))
    b = randint(rng, 2, min(12, (x - 2) // a))
    return a, b, x - a * b


def _split(rng: random.Random, x: int) -> Numbers | None:
    if not DIVISORS[x]:
        return None
    a = pick(rng, DIVISORS[x])
    return a, 0, x // a


def _price(rng: random.Random, x: int) -> Numbers | None:
    if x > 99:
        return None
    a = randint(rng, 2, min(12, 999 // x))
    return a, 0, x * a


def _below(rng: random.Random, x: int) -> Numbers | None:
    if x > 800:
        return None
    a = x + randint(rng, 2, 150)
    return a, 0, a - x


def _ask(rng: random.Random, x: int) -> Numbers | None:
    return 0, 0, x


RULES: Final[dict[str, tuple[int, Rule]]] = {  # with the number of steps
    "set": (0, _set),
    "set_times": (1, _set_times),
    "set_sum": (1, _set_sum),
    "add": (1, _add),
    "take": (1, _take),
    "add_times": (2, _add_times),
    "take_times": (2, _take_times),
    "ask": (0, _ask),
    "split": (1, _split),
    "price": (1, _price),
    "above": (1, _take),
    "below": (1, _below),
    "join": (1, _add),
}


def _shapes(theme: Theme) -> dict[int, tuple[tuple[Part, ...], ...]]:
    """By number of steps: every combination of a start, one to three events and an end."""
    found: dict[int, list[tuple[Part, ...]]] = {2: [], 3: [], 4: []}
    for start, end, number in product(theme.starts, theme.ends, (1, 2, 3)):
        for events in product(theme.events, repeat=number):
            parts = (start, *events, end)
            steps = sum(RULES[part.name][0] for part in parts)
            if steps in found:
                found[steps].append(parts)
    return {steps: tuple(shapes) for steps, shapes in found.items()}


SHAPES: Final = {name: _shapes(theme) for name, theme in THEMES.items()}


def _numbers(rng: random.Random, parts: tuple[Part, ...]) -> list[Numbers] | None:
    x, drawn = 0, []
    for part in parts:
        numbers = RULES[part.name][1](rng, x)
        if numbers is None:
            return None
        x = numbers[2]
        drawn.append(numbers)
    return drawn


def _distractor(rng: random.Random, name: str, other: str) -> str:
    text, low, high = pick(rng, DISTRACTORS)
    return text.format(N=name, O=other, D=randint(rng, low, high))


def _story(rng: random.Random, theme: str) -> Problem:
    """A quantity, what happens to it, and a question."""
    shapes = SHAPES[theme][pick(rng, STEPS)]
    parts = pick(rng, shapes)
    while (drawn := _numbers(rng, parts)) is None:
        parts = pick(rng, shapes)
    name, other = pick_two(rng, NAMES)
    things = pick(rng, THEMES[theme].things)
    distracted = randint(rng, 1, len(parts) - 1) if rng.random() < DISTRACTED else 0
    texts, works, x = [], [], 0
    fields: dict[str, str | int] = {"N": name, "O": other, "T": things}
    named = False  # whether the last sentence is about N, so a pronoun is clear
    for at, (part, (a, b, y)) in enumerate(zip(parts, drawn, strict=True)):
        if at == distracted and at:
            texts.append(_distractor(rng, name, other))
            named = False
        text = pick(rng, part.texts)
        head = PRONOUN[name] if named and rng.random() < 0.6 else name
        fields.update(S=head, A=a, B=b, C=a * b, X=x, Y=y)
        texts.append(text.format_map(fields))
        named = "{N}" in text or "{S}" in text
        if part.work:
            works.append(part.work.format_map(fields))
        x = y
    return _problem(texts, works, x)


def _problem(texts: list[str], works: list[str], answer: int) -> Problem:
    return solved("words", " ".join(texts), str(answer), " ".join(works))


def _aside(rng: random.Random, texts: list[str], name: str) -> None:
    if rng.random() < DISTRACTED:
        text, low, high = pick(rng, ASIDES)
        texts.insert(randint(rng, 1, len(texts)), text.format(N=name, D=randint(rng, low, high)))


def _link(
    rng: random.Random, chain: ComparisonChain, x: int
) -> tuple[tuple[str, ...], str, int, int]:
    """How the next person compares with x: wordings, sign, difference and new value."""
    chance = rng.random()
    if chance < 0.25 and x * 2 <= chain.max_value and x < 100:
        a = randint(rng, 2, min(5, chain.max_value // x))
        return chain.times, "*", a, x * a
    if (chance < 0.6 and x > 6) or x + 40 > chain.max_value:
        a = randint(rng, 2, min(x - 3, 40))
        return chain.less, "-", a, x - a
    a = randint(rng, 2, 40)
    return chain.more, "+", a, x + a


def _chained(rng: random.Random, kind: str) -> Problem:
    """People compared one after the other, and a question about one or two of them."""
    chain, people = CHAINS[kind], sample(rng, NAMES, 4)
    things = pick(rng, chain.things)
    steps = pick(rng, STEPS)
    links = min(steps - (rng.random() < 0.6), 3)
    values = [randint(rng, 5, chain.max_first)]
    texts = [pick(rng, chain.first).format(P=people[0], T=things, A=values[0])]
    works = []
    for before, after in pairwise(people[: links + 1]):
        wordings, sign, a, y = _link(rng, chain, values[-1])
        texts.append(pick(rng, wordings).format(P=before, Q=after, T=things, A=a))
        step = f"{values[-1]} {sign} {a} = {y}"
        works.append(chain.result.format(Q=after, T=things, sum=step))
        values.append(y)
    _aside(rng, texts, people[0])
    if links == steps:
        texts.append(pick(rng, chain.ask).format(P=people[links], T=things))
        return _problem(texts, works, values[links])
    first = randint(rng, 0, links - 1)
    (x, p), (y, q) = (values[first], people[first]), (values[links], people[links])
    if abs(x - y) < 2 or rng.random() < 0.6:
        texts.append(pick(rng, chain.both).format(P=p, Q=q, T=things))
        works.append(f"{p}: {x}. {q}: {y}.")
        works.append(f"Together it is {x} + {y} = {x + y}.")
        return _problem(texts, works, x + y)
    (y, q), (x, p) = sorted(((x, p), (y, q)))
    texts.append(pick(rng, chain.lead).format(P=p, Q=q, T=things))
    works.append(f"{p}: {x}. {q}: {y}.")
    works.append(f"The difference is {x} - {y} = {x - y}.")
    return _problem(texts, works, x - y)


def _grouped(rng: random.Random, kind: str) -> Problem:
    """Two groups: their sum, their difference, or what is left of an amount."""
    group, name = GROUPS[kind], pick(rng, NAMES)
    steps = pick(rng, STEPS)
    single = steps == 2 or (steps == 3 and rng.random() < 0.5)
    a, b = randint(rng, 2, 12), randint(rng, 3, 20)
    d, e = (randint(rng, 3, 90), 1) if single else (randint(rng, 2, 12), randint(rng, 2, 12))
    x, y, unit = a * b, d * e, group.unit
    texts = [pick(rng, group.first).format(P=name, A=a, B=b)]
    texts.append(pick(rng, group.single if single else group.second).format(P=name, D=d, E=e))
    works = [f"First it is {a} * {b} = {x} {unit}."]
    if not single:
        works.append(f"Then it is {d} * {e} = {y} {unit}.")
    _aside(rng, texts, name)
    if steps == 3 and not single and x > y + 1 and rng.random() < 0.5:
        texts.append(pick(rng, group.gap).format(P=name))
        works.append(f"The difference is {x} - {y} = {x - y} {unit}.")
        return _problem(texts, works, x - y)
    works.append(f"Together it is {x} + {y} = {x + y} {unit}.")
    if steps == 3 - single:
        texts.append(pick(rng, group.total).format(P=name))
        return _problem(texts, works, x + y)
    most = x + y + randint(rng, 2, 200)
    texts.append(pick(rng, group.paid).format(P=name, M=most))
    works.append(f"The rest is {most} - {x + y} = {most - x - y} {unit}.")
    return _problem(texts, works, most - x - y)


KINDS: Final[dict[str, Draw]] = {
    **{kind: partial(_story, theme=kind) for kind in THEMES},
    **{kind: partial(_chained, kind=kind) for kind in CHAINS},
    **{kind: partial(_grouped, kind=kind) for kind in GROUPS},
}
draw: Final = evenly(KINDS)
