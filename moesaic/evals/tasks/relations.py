"""Word problems about how quantities stand to each other: chains of comparisons, and two groups.

P, Q, R are people; A, B, D, E the numbers of the text; X and Y the values before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ComparisonChain:
    """`more`, `less`, `times`: how Q compares with P by A; `value`: what is said of a result;
    `ask`: of one person; `both`: of two people together; `lead`: how far P is above Q."""

    things: tuple[str, ...]
    first: tuple[str, ...]
    more: tuple[str, ...]
    less: tuple[str, ...]
    times: tuple[str, ...]
    value: str
    ask: tuple[str, ...]
    both: tuple[str, ...]
    lead: tuple[str, ...]
    high: int  # of the first number
    most: int  # that anybody has


@dataclass(frozen=True, slots=True)
class GroupStory:
    """A groups of B, and D groups of E or only D more; `paid`: what M is and what is asked then."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    single: tuple[str, ...]
    unit: str
    total: tuple[str, ...]
    gap: tuple[str, ...]
    paid: tuple[str, ...]


CHAINS: Final[dict[str, ComparisonChain]] = {
    "ages": ComparisonChain(
        ("years",),
        (
            "{P} is {A} years old.",
            "{P} has just turned {A} years old.",
            "The age of {P} is {A} years.",
        ),
        ("{Q} is {A} years older than {P}.", "{Q} was born {A} years before {P}."),
        ("{Q} is {A} years younger than {P}.", "{Q} was born {A} years after {P}."),
        ("{Q} is {A} times as old as {P}.",),
        "{Q} is {sum} years old.",
        ("How old is {P}?", "Find the age of {P} in years.", "How many years old is {P}?"),
        (
            "How old are {P} and {Q} together?",
            "What is the sum of the ages of {P} and {Q}?",
            "Add the ages of {P} and {Q}: how many years is that?",
        ),
        ("How many years older than {Q} is {P}?", "By how many years is {P} older than {Q}?"),
        25,
        99,
    ),
    "owners": ComparisonChain(
        tuple("stickers books pens marbles cards shells coins stamps".split()),
        ("{P} has {A} {T}.", "{P} owns {A} {T}.", "There are {A} {T} in {P}'s bag."),
        ("{Q} has {A} more {T} than {P}.", "{Q} has {A} {T} more than {P}."),
        ("{Q} has {A} fewer {T} than {P}.", "{Q} has {A} {T} fewer than {P}."),
        ("{Q} has {A} times as many {T} as {P}.",),
        "{Q} has {sum} {T}.",
        (
            "How many {T} does {P} have?",
            "Find the number of {T} that {P} has.",
            "Work out how many {T} {P} owns.",
        ),
        (
            "How many {T} do {P} and {Q} have together?",
            "What is the total number of {T} of {P} and {Q}?",
            "How many {T} do {P} and {Q} have in all?",
        ),
        (
            "How many more {T} does {P} have than {Q}?",
            "By how many {T} is {P} ahead of {Q}?",
        ),
        60,
        400,
    ),
}

GROUPS: Final[dict[str, GroupStory]] = {
    "buying": GroupStory(
        (
            "{P} buys {A} books for ${B} each.",
            "{P} orders {A} shirts at ${B} each.",
            "{P} takes {A} games that cost ${B} each.",
        ),
        (
            "{P} also buys {D} pens for ${E} each.",
            "{P} also orders {D} cakes at ${E} each.",
            "In the next shop {P} buys {D} maps for ${E} each.",
        ),
        ("{P} also buys a lamp for ${D}.", "A bag for ${D} is added to the bill."),
        "dollars",
        (
            "How many dollars does {P} pay in total?",
            "What does everything cost in dollars?",
            "How much is the whole bill in dollars?",
        ),
        (
            "How many dollars does {P} pay more for the first purchase than for the second?",
            "By how many dollars is the first purchase dearer than the second?",
        ),
        (
            "{P} pays with ${M}. How many dollars does {P} get back?",
            "{P} had ${M} before. How many dollars are left?",
            "The purse held ${M}. How many dollars remain in it?",
        ),
    ),
    "seats": GroupStory(
        (
            "In a hall there are {A} rows of {B} seats.",
            "A room has {A} tables with {B} seats each.",
            "{P} sets up {A} rows with {B} seats in each.",
        ),
        (
            "On the balcony there are {D} rows of {E} seats.",
            "Next to them stand {D} sofas with {E} seats each.",
        ),
        ("On the balcony there are {D} more seats.", "{P} brings {D} single seats."),
        "seats",
        (
            "How many seats are there in total?",
            "How many people can sit down?",
            "Find the number of all seats.",
        ),
        ("How many more seats are in the first part than in the second?",),
        (
            "{M} people come. How many of them find no seat?",
            "{P} wants to seat {M} guests. How many seats are missing?",
        ),
    ),
    "feed": GroupStory(
        (
            "{P} has {A} cows, and each eats {B} kg of hay.",
            "In a zoo {A} elephants eat {B} kg of leaves each.",
        ),
        (
            "There are also {D} goats that eat {E} kg each.",
            "Besides, {D} zebras eat {E} kg each.",
        ),
        ("A camel eats {D} kg.", "The smaller animals eat {D} kg in all."),
        "kg",
        (
            "How many kg do all animals eat together?",
            "How much food is eaten in total, in kg?",
            "How many kg of food are needed for all?",
        ),
        ("How many kg does the first group eat more than the second?",),
        (
            "There are {M} kg in the barn. How many kg are left when all have eaten?",
            "{P} brings {M} kg. How many kg remain when all have eaten?",
        ),
    ),
    "saving": GroupStory(
        (
            "{P} saves ${A} a week for {B} weeks.",
            "For {A} weeks {P} puts ${B} a week into a jar.",
        ),
        (
            "After that {P} saves ${D} a week for {E} weeks.",
            "In summer {P} works {D} days for ${E} a day and keeps it all.",
        ),
        ("On a birthday {P} gets ${D} more.", "{P} already had ${D} at the start."),
        "dollars",
        (
            "How many dollars does {P} have in total?",
            "How much money does {P} then have, in dollars?",
            "Find the sum of all the money in dollars.",
        ),
        ("How many dollars more does {P} save in the first time than in the second?",),
        (
            "A bike costs ${M}. How many dollars are still missing?",
            "{P} is saving for a trip that costs ${M}. How many dollars does {P} still need?",
        ),
    ),
}
