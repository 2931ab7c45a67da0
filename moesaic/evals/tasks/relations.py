"""Word problems about how quantities relate: chains of comparisons, and two groups.

P, Q, R are people; A, B, D, E are the numbers of the text; M is an amount to compare with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moesaic.evals.tasks.wordings import read_wordings


@dataclass(frozen=True, slots=True)
class ComparisonChain:
    """People compared one after the other, Q with P by A."""

    things: tuple[str, ...]
    max_first: int
    max_value: int
    result: str
    first: tuple[str, ...]
    more: tuple[str, ...]
    less: tuple[str, ...]
    times: tuple[str, ...]
    ask: tuple[str, ...]  # about one person
    both: tuple[str, ...]  # about two people together
    lead: tuple[str, ...]  # by how much P is above Q


@dataclass(frozen=True, slots=True)
class GroupStory:
    """A groups of B, and then D groups of E (`second`) or only D more (`single`)."""

    unit: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    single: tuple[str, ...]
    total: tuple[str, ...]
    gap: tuple[str, ...]
    paid: tuple[str, ...]  # what M is, and what is left of it


CHAINS: Final[dict[str, ComparisonChain]] = {
    "ages": ComparisonChain(
        things=("years",),
        max_first=25,
        max_value=99,
        result="{Q} is {sum} years old.",
        **read_wordings("""
        first: {P} is {A} years old.
        | {P} has just turned {A} years old.
        | The age of {P} is {A} years.
        more: {Q} is {A} years older than {P}.
        | {Q} was born {A} years before {P}.
        less: {Q} is {A} years younger than {P}.
        | {Q} was born {A} years after {P}.
        times: {Q} is {A} times as old as {P}.
        ask: How old is {P}?
        | Find the age of {P} in years.
        | How many years old is {P}?
        both: How old are {P} and {Q} together?
        | What is the sum of the ages of {P} and {Q}?
        | Add the ages of {P} and {Q}: how many years is that?
        lead: How many years older than {Q} is {P}?
        | By how many years is {P} older than {Q}?
        """),
    ),
    "owners": ComparisonChain(
        things=tuple("stickers books pens marbles cards shells coins stamps".split()),
        max_first=60,
        max_value=400,
        result="{Q} has {sum} {T}.",
        **read_wordings("""
        first: {P} has {A} {T}.
        | {P} owns {A} {T}.
        | There are {A} {T} in {P}'s bag.
        more: {Q} has {A} more {T} than {P}.
        | {Q} has {A} {T} more than {P}.
        less: {Q} has {A} fewer {T} than {P}.
        | {Q} has {A} {T} fewer than {P}.
        times: {Q} has {A} times as many {T} as {P}.
        ask: How many {T} does {P} have?
        | Find the number of {T} that {P} has.
        | Work out how many {T} {P} owns.
        both: How many {T} do {P} and {Q} have together?
        | What is the total number of {T} of {P} and {Q}?
        | How many {T} do {P} and {Q} have in all?
        lead: How many more {T} does {P} have than {Q}?
        | By how many {T} is {P} ahead of {Q}?
        """),
    ),
}

GROUPS: Final[dict[str, GroupStory]] = {
    "buying": GroupStory(
        "dollars",
        **read_wordings("""
        first: {P} buys {A} books for ${B} each.
        | {P} orders {A} shirts at ${B} each.
        | {P} takes {A} games that cost ${B} each.
        second: {P} also buys {D} pens for ${E} each.
        | {P} also orders {D} cakes at ${E} each.
        | In the next shop {P} buys {D} maps for ${E} each.
        single: {P} also buys a lamp for ${D}.
        | A bag for ${D} is added to the bill.
        total: How many dollars does {P} pay in total?
        | What does everything cost in dollars?
        | How much is the whole bill in dollars?
        gap: How many dollars does {P} pay more for the first purchase than for the second?
        | By how many dollars is the first purchase dearer than the second?
        paid: {P} pays with ${M}. How many dollars does {P} get back?
        | {P} had ${M} before. How many dollars are left?
        | The purse held ${M}. How many dollars remain in it?
        """),
    ),
    "seats": GroupStory(
        "seats",
        **read_wordings("""
        first: In a hall there are {A} rows of {B} seats.
        | A room has {A} tables with {B} seats each.
        | {P} sets up {A} rows with {B} seats in each.
        second: On the balcony there are {D} rows of {E} seats.
        | Next to them stand {D} sofas with {E} seats each.
        single: On the balcony there are {D} more seats.
        | {P} brings {D} single seats.
        total: How many seats are there in total?
        | How many people can sit down?
        | Find the number of all seats.
        gap: How many more seats are in the first part than in the second?
        paid: {M} people come. How many of them find no seat?
        | {P} wants to seat {M} guests. How many seats are missing?
        """),
    ),
    "feed": GroupStory(
        "kg",
        **read_wordings("""
        first: {P} has {A} cows, and each eats {B} kg of hay.
        | In a zoo {A} elephants eat {B} kg of leaves each.
        second: There are also {D} goats that eat {E} kg each.
        | Besides, {D} zebras eat {E} kg each.
        single: A camel eats {D} kg.
        | The smaller animals eat {D} kg in all.
        total: How many kg do all animals eat together?
        | How much food is eaten in total, in kg?
        | How many kg of food are needed for all?
        gap: How many kg does the first group eat more than the second?
        paid: There are {M} kg in the barn. How many kg are left when all have eaten?
        | {P} brings {M} kg. How many kg remain when all have eaten?
        """),
    ),
    "saving": GroupStory(
        "dollars",
        **read_wordings("""
        first: {P} saves ${A} a week for {B} weeks.
        | For {A} weeks {P} puts ${B} a week into a jar.
        second: After that {P} saves ${D} a week for {E} weeks.
        | In summer {P} works {D} days for ${E} a day and keeps it all.
        single: On a birthday {P} gets ${D} more.
        | {P} already had ${D} at the start.
        total: How many dollars does {P} have in total?
        | How much money does {P} then have, in dollars?
        | Find the sum of all the money in dollars.
        gap: How many dollars more does {P} save in the first time than in the second?
        paid: A bike costs ${M}. How many dollars are still missing?
        | {P} is saving for a trip that costs ${M}. How many dollars does {P} still need?
        """),
    ),
}
