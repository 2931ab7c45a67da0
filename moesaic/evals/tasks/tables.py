"""Small Markdown tables and questions about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from moesaic.evals.tasks.common import Draw, evenly, pick, pick_two, randint, sample, scan, solved
from moesaic.evals.tasks.problem import Problem
from moesaic.evals.tasks.wordings import SEPARATOR, Part, read_parts, read_wordings


@dataclass(frozen=True, slots=True)
class Column:
    """A column of words, or of numbers from `low` to `high`."""

    head: str
    name: str  # in a sentence
    low: int = 0
    high: int = 0
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableSubject:
    """What a table is about."""

    row: str  # what a line is
    rows: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]
    factors: tuple[Column, Column]  # to be multiplied; the first has small numbers


def _column(text: str) -> Column:
    head, name, values = text.split(", ")
    low, dash, high = values.partition("-")
    if dash:
        return Column(head, name, int(low), int(high))
    return Column(head, name, words=tuple(values.split()))


def _subject(part: Part) -> TableSubject:
    rows, names, *columns = part.texts
    p, q = part.work.split(SEPARATOR)
    factors = _column(p), _column(q)
    found = tuple(map(_column, columns))
    return TableSubject(part.name, rows, tuple(names.split()), found, factors)


# What a line is, and several; their names; head, name and values of columns; = two factors.
SUBJECTS: Final = tuple(
    _subject(part)
    for part in read_parts("""
    item: items | Lamp Chair Clock Mirror Vase Rug Desk Shelf Kettle Fan Bowl Pillow
    | Price, price, 5-300 | Stock, stock, 2-99 | Sold, number sold, 2-250
    | Colour, colour, red blue white black | Hall, hall, north south east
    = Price, price, 2-12 | Stock, stock, 5-80
    team: teams | Lions Bears Hawks Sharks Wolves Tigers Eagles Bulls Foxes Owls Rams Colts
    | Points, number of points, 3-120 | Goals, number of goals, 3-95 | Fans, number of fans, 50-990
    | League, league, A B C | Shirt, shirt, green yellow purple grey
    = Wins, number of wins, 2-12 | Bonus, bonus, 3-60
    plant: plants | Fern Rose Tulip Daisy Ivy Maple Oak Basil Mint Cactus Lily Moss
    | Height, height, 4-400 | Leaves, number of leaves, 3-300 | Age, age, 2-90
    | Light, light, sun shade half | Soil, soil, sand clay peat
    = Rows, number of rows, 2-12 | Per row, number per row, 4-70
    city: cities | Arden Belmor Corvia Dunmar Elsin Farro Gilden Hestia Ivara Jorvik Kalmo
    | Height, height, 5-900 | Parks, number of parks, 2-90 | Rainfall, rainfall, 20-300
    | Coast, coast, west east none | Region, region, upper lower middle
    = Lines, number of lines, 2-12 | Stops, number of stops, 5-70
    worker: workers | Adams Baker Clark Davis Evans Foster Green Harris Jones King Lewis Moore
    | Hours, number of hours, 5-60 | Calls, number of calls, 20-499 | Trips, number of trips, 2-80
    | Team, team, sales press legal | Shift, shift, early late night
    = Hours, number of hours, 2-12 | Wage, wage, 12-60
    planet: planets | Zor Quell Nimba Tarvo Ysil Pholo Ruun Xanth Oberi Mekor Vesh Drax
    | Moons, number of moons, 2-90 | Size, size, 10-900 | Bases, number of bases, 2-120
    | Air, air, thin thick none | Owner, owner, crown guild nobody
    = Mines, number of mines, 2-12 | Ore, ore per mine, 5-80
    """)
)
ASKS: Final = read_wordings("""
    cell: What is the {col} of {name}?
    | Look up the {col} of {name}.
    | Which {col} does the table give for {name}?
    | Read the {col} in the line of {name}.
    | Find {name} in the table. What is its {col}?
    | According to the table, what is the {col} of {name}?
    extreme: Which {row} has the {most} {col}?
    | Name the {row} with the {most} {col}.
    | The {most} {col} belongs to which {row}?
    | Of all {rows} in the table, which one has the {most} {col}?
    | Find the {row} whose {col} is the {most}.
    | Look at each {col}: which {row} has the {most}?
    total: What is the sum of the column {head}?
    | Add up the column {head}.
    | Find the total of all numbers under {head}.
    | How much is {head} for all {rows} together?
    | Sum the {col} over all {rows}.
    | What do the entries of {head} add up to?
    difference: How much larger is the {col} of {a} than that of {b}?
    | By how much is the {col} of {a} above the {col} of {b}?
    | What is the difference between {a} and {b} in the column {head}?
    | Take the {col} of {b} from the {col} of {a}. What is left?
    | Compare {a} and {b}: how far apart are they in {head}?
    | Find the difference in {col} between {a} and {b}.
    count: How many {rows} have {test}?
    | Count the {rows} with {test}.
    | Give the number of {rows} that have {test}.
    | For how many {rows} does the table show {test}?
    | What is the number of {rows} with {test}?
    | In the table, how many {rows} are there with {test}?
    list: Which {rows} have {test}? List them in the order of the table, with commas.
    | List the {rows} with {test}, in table order, separated by commas.
    | Name all {rows} that have {test}, from top to bottom, with commas between them.
    | For which {rows} does the table show {test}? Give a comma list in table order.
    | Write down every {row} with {test}, as a comma list in the order of the table.
    | From top to bottom, which {rows} have {test}? Separate them by commas.
    product: Multiply the {p} of {name} by its {q}.
    | For {name}, what is the {p} times the {q}?
    | What is the product of {hp} and {hq} in the line of {name}?
    | Work out {hp} * {hq} for {name}.
    | Take the {p} and the {q} of {name}. What is their product?
    | In the line of {name}, how much is {hp} times {hq}?
""")


@dataclass(frozen=True, slots=True)
class DrawnTable:
    """A table, and the values of the column that is asked about."""

    subject: TableSubject
    column: Column
    names: list[str]
    values: list[int | str]
    text: str

    def numbers(self) -> list[int]:
        return [int(value) for value in self.values]


def _columns(
    rng: random.Random, subject: TableSubject, *, numbers: bool
) -> tuple[list[Column], int]:
    """One to three columns in any order, and the position of one of numbers, or of words."""
    chosen = sample(rng, subject.columns, randint(rng, 1, 3))
    fit = [at for at, c in enumerate(chosen) if bool(c.words) != numbers]
    if fit:
        return chosen, pick(rng, fit)
    chosen[-1] = pick(rng, [c for c in subject.columns if bool(c.words) != numbers])
    return chosen, len(chosen) - 1


def _rows(
    rng: random.Random, subject: TableSubject, columns: Sequence[Column], number: int
) -> tuple[list[str], list[list[int | str]], str]:
    """Names, values by column, and the text of a table."""
    names = sample(rng, subject.names, number)
    values: list[list[int | str]] = [
        [pick(rng, c.words) for _ in names]
        if c.words
        else [randint(rng, c.low, c.high) for _ in names]
        for c in columns
    ]
    heads = [subject.row.capitalize(), *(c.head for c in columns)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, *cells in zip(names, *values, strict=True):
        lines.append(f"| {name} | {' | '.join([str(cell) for cell in cells])} |")
    return names, values, "\n".join(lines)


def _table(rng: random.Random, low: int, high: int, numbers: float = 1.0) -> DrawnTable:
    """A table of `low` to `high` rows; the question is about numbers with this probability."""
    subject = pick(rng, SUBJECTS)
    is_number = rng.random() < numbers if 0 < numbers < 1 else bool(numbers)
    columns, at = _columns(rng, subject, numbers=is_number)
    names, values, text = _rows(rng, subject, columns, randint(rng, low, high))
    return DrawnTable(subject, columns[at], names, values[at], text)


def _problem(rng: random.Random, table: str, ask: str, work: str, answer: str) -> Problem:
    prompt = f"{table}\n\n{ask}" if rng.random() < 0.7 else f"{ask}\n\n{table}"
    return solved("tables", prompt, answer, work)


def _cell(rng: random.Random) -> Problem:
    table = _table(rng, 3, 5, numbers=0.8)
    row = randint(rng, 0, len(table.names) - 1)
    name, value = table.names[row], str(table.values[row])
    ask = pick(rng, ASKS["cell"]).format(col=table.column.name, name=name)
    return _problem(rng, table.text, ask, f"{name}: {table.column.head} {value}.", value)


def _extreme(rng: random.Random) -> Problem:
    """The solution copies and compares the values, then looks for the row of the found one."""
    table = _table(rng, 3, 5)
    subject, names, values = table.subject, table.names, table.numbers()
    if len(set(values)) < len(values):
        return _extreme(rng)
    most, best = ("largest", max) if rng.random() < 0.5 else ("smallest", min)
    value = best(values)
    ask = pick(rng, ASKS["extreme"]).format(
        row=subject.row, rows=subject.rows, most=most, col=table.column.name
    )
    listed = ", ".join([f"{n} {v}" for n, v in zip(names, values, strict=True)])
    found = scan(names, [str(v) for v in values], str(value))
    work = f"{listed}. The {most} is {value}. {found}"
    return _problem(rng, table.text, ask, work, names[values.index(value)])


def _total(rng: random.Random) -> Problem:
    table = _table(rng, 3, 4)
    total, *rest = table.numbers()
    steps = []
    for value in rest:
        steps.append(f"{total} + {value} = {total + value}.")
        total += value
    if total >= 1000:
        return _total(rng)
    column = table.column
    ask = pick(rng, ASKS["total"]).format(
        head=column.head, col=column.name, rows=table.subject.rows
    )
    return _problem(rng, table.text, ask, " ".join(steps), str(total))


def _difference(rng: random.Random) -> Problem:
    table = _table(rng, 3, 5)
    pairs = list(zip(table.numbers(), table.names, strict=True))
    (y, b), (x, a) = sorted(pick_two(rng, pairs))
    if x == y:
        return _difference(rng)
    column = table.column
    ask = pick(rng, ASKS["difference"]).format(a=a, b=b, col=column.name, head=column.head)
    work = f"{a} {x}, {b} {y}. {x} - {y} = {x - y}."
    return _problem(rng, table.text, ask, work, str(x - y))


def _condition(rng: random.Random, table: DrawnTable) -> tuple[str, list[bool]]:
    """A condition on a column, and which of its values meet it."""
    head = table.column.head
    if table.column.words:
        word = pick(rng, table.values)
        return f"{head} = {word}", [value == word for value in table.values]
    numbers = table.numbers()
    limit = max(1, pick(rng, sorted(numbers)[:-1]) + randint(rng, -3, 3))
    if rng.random() < 0.5:
        return f"{head} above {limit}", [value > limit for value in numbers]
    return f"{head} below {limit}", [value < limit for value in numbers]


def _matching(rng: random.Random, *, numbers: bool, counted: float) -> Problem:
    """Which rows meet a condition, or with the probability `counted` how many."""
    table = _table(rng, 4, 5, numbers)
    subject = table.subject
    test, meets = _condition(rng, table)
    found = [name for name, good in zip(table.names, meets, strict=True) if good]
    listed = ", ".join(found)
    walk = [
        f"{name} {value} {'yes' if good else 'no'}"
        for name, value, good in zip(table.names, table.values, meets, strict=True)
    ]
    work = f"{test}: {', '.join(walk)}."
    if rng.random() < counted:
        ask = pick(rng, ASKS["count"]).format(rows=subject.rows, test=test)
        work += f" Found: {listed or 'none'}. That makes {len(found)}."
        return _problem(rng, table.text, ask, work, str(len(found)))
    if not found:
        return _matching(rng, numbers=numbers, counted=counted)
    ask = pick(rng, ASKS["list"]).format(row=subject.row, rows=subject.rows, test=test)
    return _problem(rng, table.text, ask, work, listed)


def _product(rng: random.Random) -> Problem:
    subject = pick(rng, SUBJECTS)
    p, q = subject.factors
    others = [c for c in subject.columns if c.head not in (p.head, q.head)]
    columns = [p, q, pick(rng, others)] if rng.random() < 0.6 else [p, q]
    names, values, text = _rows(rng, subject, columns, randint(rng, 3, 5))
    row = randint(rng, 0, len(names) - 1)
    name, a, b = names[row], int(values[0][row]), int(values[1][row])
    ask = pick(rng, ASKS["product"]).format(p=p.name, q=q.name, hp=p.head, hq=q.head, name=name)
    return _problem(rng, text, ask, f"{name}: {a} * {b} = {a * b}.", str(a * b))


KINDS: Final[dict[str, Draw]] = {
    "cell": _cell,
    "extreme": _extreme,
    "total": _total,
    "difference": _difference,
    "above": partial(_matching, numbers=True, counted=0.4),
    "category": partial(_matching, numbers=False, counted=0.3),
    "product": _product,
}
draw: Final = evenly(KINDS)
