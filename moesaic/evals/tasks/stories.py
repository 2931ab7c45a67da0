"""What the word problems tell: themes, each with starts, events and questions that combine freely.

In the texts N is the main person and S the same person at the head of a sentence (maybe "He"), O
another person, T the things; A and B are the numbers of the text, C = A * B; X is the quantity
before a step and Y the one after it. The rule of a part says which calculation it stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class StoryPart:
    """`rule`: a key of words.RULES; `texts`: wordings of one meaning; `work`: its worked steps."""

    rule: str
    texts: tuple[str, ...]
    work: str = ""


@dataclass(frozen=True, slots=True)
class Theme:
    things: tuple[str, ...]
    starts: tuple[StoryPart, ...]
    events: tuple[StoryPart, ...]
    ends: tuple[StoryPart, ...]


BOYS: Final = tuple(
    "Tom Ben Max Leo Sam Paul Omar Luis Ivan Finn Noah Hugo Karl Amir Jack Yuri Dan Peter".split()
)
GIRLS: Final = tuple(
    "Ann Mia Zoe Eva Lily Nina Rosa Ella Ida Sara Maya Lucy Vera Jane Aisha Kim Clara Olga".split()
)

HAS: Final = (
    StoryPart(
        "set",
        (
            "{N} has {A} {T}.",
            "{N} starts the day with {A} {T}.",
            "There are {A} {T} on {N}'s table.",
            "In the morning {N} has {A} {T}.",
        ),
    ),
    StoryPart(
        "set_times",
        (
            "{N} has {A} boxes with {B} {T} each.",
            "{N} has {A} bags of {B} {T}.",
            "There are {A} trays on {N}'s table, each with {B} {T}.",
        ),
        "{N} has {A} * {B} = {Y} {T}.",
    ),
    StoryPart(
        "set_sum",
        (
            "{N} has {A} small {T} and {B} large {T}.",
            "On {N}'s table there are {A} old {T} and {B} new ones.",
            "{N} has {A} {T} in one bag and {B} {T} in another.",
        ),
        "{N} has {A} + {B} = {Y} {T}.",
    ),
)
ASK: Final = StoryPart(
    "ask",
    (
        "How many {T} does {N} have now?",
        "How many {T} does {N} have in the end?",
        "Find the number of {T} that {N} has now.",
        "What is the number of {T} {N} has at the end?",
        "In the end, how many {T} are there?",
        "Work out how many {T} there are now.",
    ),
)
SPLIT: Final = StoryPart(
    "split",
    (
        "{S} shares all {T} equally among {A} friends. How many {T} does each friend get?",
        "{S} then divides the {T} equally between {A} children. How many {T} are there for each?",
        "All of them go to {A} neighbours in equal parts. How many {T} does each neighbour get?",
    ),
    "Each gets {X} / {A} = {Y} {T}.",
)
PACK: Final = StoryPart(
    "split",
    (
        "{S} packs all {T} into boxes of {A}. How many boxes are full?",
        "{S} puts all of them into bags, {A} in each bag. How many bags does {N} need?",
        "A box holds {A} {T}. How many boxes does {N} need for all of them?",
    ),
    "{N} needs {X} / {A} = {Y}.",
)
ABOVE: Final = StoryPart(
    "above",
    (
        "{O} has {A} {T}. How many more {T} than {O} does {N} have now?",
        "{O} has only {A} {T}. By how many {T} is {N} ahead of {O}?",
        "{O} has {A} {T}. {N} now has more. How many more {T} does {N} have?",
    ),
    "{N} has {X} - {A} = {Y} more.",
)
BELOW: Final = StoryPart(
    "below",
    (
        "{N} wants to have {A} {T}. How many {T} are still missing?",
        "{O} has {A} {T}. How many more {T} does {N} need to have as many as {O}?",
        "{S} needs {A} {T} in all. How many more must {N} get?",
    ),
    "{N} still needs {A} - {X} = {Y} {T}.",
)
JOIN: Final = StoryPart(
    "join",
    (
        "{O} has {A} {T}. How many {T} do {N} and {O} have together now?",
        "{O} comes with {A} {T}. How many {T} do the two have in total?",
        "{O} also has {A} {T}. What is the total number of {T} of {N} and {O} now?",
    ),
    "Together they have {X} + {A} = {Y} {T}.",
)
PRICE: Final = StoryPart(
    "price",
    (
        "{S} sells all of them for ${A} each. How many dollars does {N} get?",
        "Each of them is then sold for ${A}. How many dollars is that in all?",
        "{S} sells all {T} at a price of ${A} each. How much money in dollars does {N} take in?",
    ),
    "{N} gets {X} * {A} = {Y} dollars.",
)

COLLECTION: Final = Theme(
    tuple("stickers marbles stamps cards shells coins pens beads buttons badges comics".split()),
    HAS,
    (
        StoryPart(
            "add",
            (
                "{S} buys {A} more {T}.",
                "{S} finds {A} {T} in the attic.",
                "{S} wins {A} {T} in a game.",
                "{S} gets {A} {T} from an uncle.",
            ),
            "Now {N} has {X} + {A} = {Y} {T}.",
        ),
        StoryPart(
            "take",
            (
                "{S} gives {A} {T} to a cousin.",
                "{S} loses {A} {T} on the way to school.",
                "{S} swaps {A} {T} for a whistle.",
            ),
            "Now {N} has {X} - {A} = {Y} {T}.",
        ),
        StoryPart(
            "add_times",
            (
                "{S} buys {A} packs of {B} {T}.",
                "{S} gets {A} packets with {B} {T} each.",
                "Each of {A} friends brings {B} {T} and {N} receives all of them.",
            ),
            "{N} gets {A} * {B} = {C} {T}. Now {N} has {X} + {C} = {Y} {T}.",
        ),
        StoryPart(
            "take_times",
            (
                "{S} gives {A} cousins {B} {T} each.",
                "{S} loses {A} games and with each game {B} {T}.",
            ),
            "{N} loses {A} * {B} = {C} {T}. Now {N} has {X} - {C} = {Y} {T}.",
        ),
    ),
    (ASK, SPLIT, PACK, ABOVE, BELOW, JOIN),
)
BAKERY: Final = Theme(
    tuple("rolls muffins cookies buns pies tarts pancakes waffles bagels".split()),
    HAS,
    (
        StoryPart(
            "add",
            (
                "{S} bakes {A} more {T}.",
                "{S} makes {A} fresh {T}.",
                "The oven yields {A} {T} more.",
            ),
            "With the new ones there are {X} + {A} = {Y} {T}.",
        ),
        StoryPart(
            "take",
            (
                "{S} sells {A} {T} before noon.",
                "Hungry guests eat {A} {T}.",
                "{S} burns {A} {T} and throws them away.",
            ),
            "That leaves {X} - {A} = {Y} {T}.",
        ),
        StoryPart(
            "add_times",
            (
                "{S} bakes {A} trays of {B} {T}.",
                "{S} fills the oven {A} times and bakes {B} {T} each time.",
            ),
            "{N} bakes {A} * {B} = {C} {T}. With them there are {X} + {C} = {Y} {T}.",
        ),
        StoryPart(
            "take_times",
            ("{S} sells {A} bags of {B} {T}.", "At each of {A} tables guests eat {B} {T}."),
            "{A} * {B} = {C} {T} are gone. That leaves {X} - {C} = {Y} {T}.",
        ),
    ),
    (ASK, PACK, BELOW, PRICE),
)
HARVEST: Final = Theme(
    tuple("apples pears plums lemons cherries limes peaches figs oranges apricots".split()),
    (
        StoryPart(
            "set",
            (
                "{N} picks {A} {T} in the garden.",
                "{N} has a basket with {A} {T}.",
                "On Monday {N} harvests {A} {T}.",
            ),
        ),
        StoryPart(
            "set_times",
            (
                "{N} fills {A} baskets with {B} {T} each.",
                "{N} picks {A} trees clean and finds {B} {T} on each tree.",
            ),
            "{N} picks {A} * {B} = {Y} {T}.",
        ),
    ),
    (
        StoryPart(
            "add",
            ("Then {N} picks {A} more {T}.", "In the afternoon {N} harvests {A} {T} more."),
            "Then there are {X} + {A} = {Y} {T}.",
        ),
        StoryPart(
            "take",
            (
                "{A} of the {T} are rotten and {N} throws them away.",
                "Birds eat {A} of the {T}.",
                "{S} cooks jam and uses {A} {T}.",
            ),
            "There remain {X} - {A} = {Y} {T}.",
        ),
        StoryPart(
            "add_times",
            (
                "{S} harvests {A} more trees with {B} {T} on each tree.",
                "Then {N} picks {A} more baskets of {B} {T}.",
            ),
            "That gives {A} * {B} = {C} {T}. Then there are {X} + {C} = {Y} {T}.",
        ),
        StoryPart(
            "take_times",
            ("{S} uses {A} {T} for each of {B} cakes.", "{S} sells {A} sacks with {B} {T} each."),
            "{A} * {B} = {C} {T} are used. There remain {X} - {C} = {Y} {T}.",
        ),
    ),
    (ASK, SPLIT, PACK, PRICE, JOIN, ABOVE),
)
