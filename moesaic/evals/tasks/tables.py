"""Small Markdown tables and questions about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moesaic.evals.tasks.chance import pick, some, two, upto
from moesaic.evals.tasks.problem import MARK, Problem
from moesaic.evals.tasks.steps import scan


@dataclass(frozen=True, slots=True)
class Column:
    """`name`: how a sentence calls it; a column of words has `words`, one of numbers a range."""

    head: str
    name: str
    low: int = 0
    high: int = 0
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TableSubject:
    """`row`, `rows`: what a line is; `pair`: two columns, the first small, that are multiplied."""

    row: str
    rows: str
    names: tuple[str, ...]
    columns: tuple[Column, ...]
    pair: tuple[Column, Column]


def _words(head: str, name: str, words: str) -> Column:
    return Column(head, name, words=tuple(words.split()))


SUBJECTS: Final = (
    TableSubject(
        "item",
        "items",
        tuple("Lamp Chair Clock Mirror Vase Rug Desk Shelf Kettle Fan Bowl Pillow".split()),
        (
            Column("Price", "price", 5, 300),
            Column("Stock", "stock", 2, 99),
            Column("Sold", "number sold", 2, 250),
            _words("Colour", "colour", "red blue white black"),
            _words("Hall", "hall", "north south east"),
        ),
        (Column("Price", "price", 2, 12), Column("Stock", "stock", 5, 80)),
    ),
    TableSubject(
        "team",
        "teams",
        tuple("Lions Bears Hawks Sharks Wolves Tigers Eagles Bulls Foxes Owls Rams Colts".split()),
        (
            Column("Points", "number of points", 3, 120),
            Column("Goals", "number of goals", 3, 95),
            Column("Fans", "number of fans", 50, 990),
            _words("League", "league", "A B C"),
            _words("Shirt", "shirt", "green yellow purple grey"),
        ),
        (Column("Wins", "number of wins", 2, 12), Column("Bonus", "bonus", 3, 60)),
    ),
    TableSubject(
        "plant",
        "plants",
        tuple("Fern Rose Tulip Daisy Ivy Maple Oak Basil Mint Cactus Lily Moss".split()),
        (
            Column("Height", "height", 4, 400),
            Column("Leaves", "number of leaves", 3, 300),
            Column("Age", "age", 2, 90),
            _words("Light", "light", "sun shade half"),
            _words("Soil", "soil", "sand clay peat"),
        ),
        (Column("Rows", "number of rows", 2, 12), Column("Per row", "number per row", 4, 70)),
    ),
    TableSubject(
        "city",
        "cities",
        tuple("Arden Belmor Corvia Dunmar Elsin Farro Gilden Hestia Ivara Jorvik Kalmo".split()),
        (
            Column("Height", "height", 5, 900),
            Column("Parks", "number of parks", 2, 90),
            Column("Rainfall", "rainfall", 20, 300),
            _words("Coast", "coast", "west east none"),
            _words("Region", "region", "upper lower middle"),
        ),
        (Column("Lines", "number of lines", 2, 12), Column("Stops", "number of stops", 5, 70)),
    ),
    TableSubject(
        "worker",
        "workers",
        tuple("Adams Baker Clark Davis Evans Foster Green Harris Jones King Lewis Moore".split()),
        (
            Column("Hours", "number of hours", 5, 60),
            Column("Calls", "number of calls", 20, 499),
            Column("Trips", "number of trips", 2, 80),
            _words("Team", "team", "sales press legal"),
            _words("Shift", "shift", "early late night"),
        ),
        (Column("Hours", "number of hours", 2, 12), Column("Wage", "wage", 12, 60)),
    ),
    TableSubject(
        "planet",
        "planets",
        tuple("Zor Quell Nimba Tarvo Ysil Pholo Ruun Xanth Oberi Mekor Vesh Drax".split()),
        (
            Column("Moons", "number of moons", 2, 90),
            Column("Size", "size", 10, 900),
            Column("Bases", "number of bases", 2, 120),
            _words("Air", "air", "thin thick none"),
            _words("Owner", "owner", "crown guild nobody"),
        ),
        (Column("Mines", "number of mines", 2, 12), Column("Ore", "ore per mine", 5, 80)),
    ),
)


@dataclass(frozen=True, slots=True)
class DrawnTable:
    text: str
    names: list[str]
    values: list[list[int | str]]  # by column


def _table(
    rng: random.Random, subject: TableSubject, columns: list[Column], rows: int
) -> DrawnTable:
    names = some(rng, subject.names, rows)
    values: list[list[int | str]] = [
        [pick(rng, c.words) for _ in names]
        if c.words
        else [upto(rng, c.low, c.high) for _ in names]
        for c in columns
    ]
    title = subject.row.capitalize()
    lines = [
        f"| {title} | {' | '.join([c.head for c in columns])} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, *cells in zip(names, *values, strict=True):
        lines.append(f"| {name} | {' | '.join([str(cell) for cell in cells])} |")
    return DrawnTable("\n".join(lines), names, values)


def _columns(
    rng: random.Random, subject: TableSubject, *, numbers: bool
) -> tuple[list[Column], int]:
    """One to three columns in any order, and the place of one of the wanted sort."""
    chosen = some(rng, subject.columns, upto(rng, 1, 3))
    fit = [at for at, c in enumerate(chosen) if bool(c.words) != numbers]
    if fit:
        return chosen, pick(rng, fit)
    wanted = pick(rng, [c for c in subject.columns if bool(c.words) != numbers])
    chosen[-1] = wanted
    return chosen, len(chosen) - 1


def _problem(rng: random.Random, table: str, ask: str, work: str, answer: str) -> Problem:
    prompt = f"{table}\n\n{ask}" if rng.random() < 0.7 else f"{ask}\n\n{table}"
    return Problem("tables", prompt, answer, f"{work}\n{MARK} {answer}")


CELL: Final = (
    "What is the {col} of {name}?",
    "Look up the {col} of {name}.",
    "Which {col} does the table give for {name}?",
    "Read the {col} in the line of {name}.",
    "Find {name} in the table. What is its {col}?",
    "According to the table, what is the {col} of {name}?",
)


def cell(rng: random.Random) -> Problem:
    subject = pick(rng, SUBJECTS)
    columns, at = _columns(rng, subject, numbers=rng.random() < 0.8)
    table = _table(rng, subject, columns, upto(rng, 3, 5))
    row = upto(rng, 0, len(table.names) - 1)
    name, value = table.names[row], str(table.values[at][row])
    ask = pick(rng, CELL).format(col=columns[at].name, name=name)
    return _problem(rng, table.text, ask, f"{name}: {columns[at].head} {value}.", value)


EXTREME: Final = (
    "Which {row} has the {most} {col}?",
    "Name the {row} with the {most} {col}.",
    "The {most} {col} belongs to which {row}?",
    "Of all {rows} in the table, which one has the {most} {col}?",
    "Find the {row} whose {col} is the {most}.",
    "Look at each {col}: which {row} has the {most}?",
)


def extreme(rng: random.Random) -> Problem:
    """The values are copied first, then compared; then the row of the one is looked for."""
    subject = pick(rng, SUBJECTS)
    columns, at = _columns(rng, subject, numbers=True)
    table = _table(rng, subject, columns, upto(rng, 3, 5))
    values = table.values[at]
    if len(set(values)) < len(values):
        return extreme(rng)
    most = rng.random() < 0.5
    value = max(values, key=int) if most else min(values, key=int)
    name = table.names[values.index(value)]
    ask = pick(rng, EXTREME).format(
        row=subject.row,
        rows=subject.rows,
        most=("largest" if most else "smallest"),
        col=columns[at].name,
    )
    listed = ", ".join([f"{n} {v}" for n, v in zip(table.names, values, strict=True)])
    word = "largest" if most else "smallest"
    found = scan(table.names, [str(v) for v in values], str(value))
    work = f"{listed}. The {word} is {value}. {found}"
    return _problem(rng, table.text, ask, work, name)


SUM: Final = (
    "What is the sum of the column {head}?",
    "Add up the column {head}.",
    "Find the total of all numbers under {head}.",
    "How much is {head} for all {rows} together?",
    "Sum the {col} over all {rows}.",
    "What do the entries of {head} add up to?",
)


def total(rng: random.Random) -> Problem:
    subject = pick(rng, SUBJECTS)
    columns, at = _columns(rng, subject, numbers=True)
    table = _table(rng, subject, columns, upto(rng, 3, 4))
    first, *rest = [int(value) for value in table.values[at]]
    steps, sum_ = [], first
    for value in rest:
        steps.append(f"{sum_} + {value} = {sum_ + value}.")
        sum_ += value
    if sum_ >= 1000:
        return total(rng)
    column = columns[at]
    ask = pick(rng, SUM).format(head=column.head, col=column.name, rows=subject.rows)
    return _problem(rng, table.text, ask, " ".join(steps), str(sum_))


LEAD: Final = (
    "How much larger is the {col} of {a} than that of {b}?",
    "By how much is the {col} of {a} above the {col} of {b}?",
    "What is the difference between {a} and {b} in the column {head}?",
    "Take the {col} of {b} from the {col} of {a}. What is left?",
    "Compare {a} and {b}: how far apart are they in {head}?",
    "Find the difference in {col} between {a} and {b}.",
)


def difference(rng: random.Random) -> Problem:
    subject = pick(rng, SUBJECTS)
    columns, at = _columns(rng, subject, numbers=True)
    table = _table(rng, subject, columns, upto(rng, 3, 5))
    column = columns[at]
    pairs = list(zip([int(value) for value in table.values[at]], table.names, strict=True))
    (y, b), (x, a) = sorted(two(rng, pairs))
    if x == y:
        return difference(rng)
    ask = pick(rng, LEAD).format(a=a, b=b, col=column.name, head=column.head)
    work = f"{a} {x}, {b} {y}. {x} - {y} = {x - y}."
    return _problem(rng, table.text, ask, work, str(x - y))


COUNT: Final = (
    "How many {rows} have {test}?",
    "Count the {rows} with {test}.",
    "Give the number of {rows} that have {test}.",
    "For how many {rows} does the table show {test}?",
    "What is the number of {rows} with {test}?",
    "In the table, how many {rows} are there with {test}?",
)
LIST: Final = (
    "Which {rows} have {test}? List them in the order of the table, with commas.",
    "List the {rows} with {test}, in table order, separated by commas.",
    "Name all {rows} that have {test}, from top to bottom, with commas between them.",
    "For which {rows} does the table show {test}? Give a comma list in table order.",
    "Write down every {row} with {test}, as a comma list in the order of the table.",
    "From top to bottom, which {rows} have {test}? Separate them by commas.",
)


def _test(rng: random.Random, column: Column, values: list[int | str]) -> tuple[str, list[bool]]:
    """A condition on a column, and which of its values meet it."""
    if column.words:
        word = pick(rng, values)
        return f"{column.head} = {word}", [value == word for value in values]
    numbers = [int(value) for value in values]
    limit = max(1, pick(rng, sorted(numbers)[:-1]) + upto(rng, -3, 3))
    if rng.random() < 0.5:
        return f"{column.head} above {limit}", [value > limit for value in numbers]
    return f"{column.head} below {limit}", [value < limit for value in numbers]


def matching(rng: random.Random, *, numbers: bool, share: float) -> Problem:
    """Which rows meet a condition; the others ask only how many (a `share` of the problems)."""
    subject = pick(rng, SUBJECTS)
    columns, at = _columns(rng, subject, numbers=numbers)
    table = _table(rng, subject, columns, upto(rng, 4, 5))
    test, meets = _test(rng, columns[at], table.values[at])
    found = [name for name, good in zip(table.names, meets, strict=True) if good]
    listed = ", ".join(found)
    walk = [
        f"{name} {value} {'yes' if good else 'no'}"
        for name, value, good in zip(table.names, table.values[at], meets, strict=True)
    ]
    work = f"{test}: {', '.join(walk)}."
    if rng.random() < share:
        ask = pick(rng, COUNT).format(rows=subject.rows, test=test)
        work += f" Found: {listed or 'none'}. That makes {len(found)}."
        return _problem(rng, table.text, ask, work, str(len(found)))
    if not found:
        return matching(rng, numbers=numbers, share=share)
    ask = pick(rng, LIST).format(row=subject.row, rows=subject.rows, test=test)
    return _problem(rng, table.text, ask, work, listed)


def above(rng: random.Random) -> Problem:
    return matching(rng, numbers=True, share=0.4)


def category(rng: random.Random) -> Problem:
    return matching(rng, numbers=False, share=0.3)


PRODUCT: Final = (
    "Multiply the {p} of {name} by its {q}.",
    "For {name}, what is the {p} times the {q}?",
    "What is the product of {hp} and {hq} in the line of {name}?",
    "Work out {hp} * {hq} for {name}.",
    "Take the {p} and the {q} of {name}. What is their product?",
    "In the line of {name}, how much is {hp} times {hq}?",
)


def product(rng: random.Random) -> Problem:
    subject = pick(rng, SUBJECTS)
    p, q = subject.pair
    others = [c for c in subject.columns if c.head not in (p.head, q.head)]
    columns = [p, q, pick(rng, others)] if rng.random() < 0.6 else [p, q]
    table = _table(rng, subject, columns, upto(rng, 3, 5))
    row = upto(rng, 0, len(table.names) - 1)
    name, a, b = table.names[row], int(table.values[0][row]), int(table.values[1][row])
    ask = pick(rng, PRODUCT).format(p=p.name, q=q.name, hp=p.head, hq=q.head, name=name)
    return _problem(rng, table.text, ask, f"{name}: {a} * {b} = {a * b}.", str(a * b))


KINDS: Final[dict[str, Callable[[random.Random], Problem]]] = {
    "cell": cell,
    "extreme": extreme,
    "total": total,
    "difference": difference,
    "above": above,
    "category": category,
    "product": product,
}
_KINDS: Final = tuple(KINDS.values())


def draw(rng: random.Random) -> Problem:
    return pick(rng, _KINDS)(rng)
