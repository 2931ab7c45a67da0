"""Entries in several layouts, and a question about one or two of them.

Keys are distinct, and so are values. One problem in ten asks for a missing entry; other problems
state the rule for that case as well, so it does not give the answer away."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from moesaic.evals.tasks.common import Draw, pick, randint, sample, scan, solved
from moesaic.evals.tasks.problem import Problem
from moesaic.evals.tasks.wordings import read_wordings

NAMES: Final = tuple(
    "Ana Ben Cleo Dan Eva Finn Gina Hugo Ida Jon Kira Leo Mia Nils Olga Paul Rosa Sam Tina Udo "
    "Vera Will Yara Zoe Alma Bruno Carla David Emil Flora Greta Hanna Ivan Julia Karl Lena Marco "
    "Nora Oskar Petra Ralf Sofia Tom Ursula Victor Wanda".split()
)
THINGS: Final = tuple(
    "saw drill hammer ladder rope brush bucket shovel rake hose pump valve motor fuse cable plug "
    "switch sensor screen camera printer scanner router laptop tablet charger battery filter "
    "magnet lens mirror candle kettle pan knife fork spoon plate bowl jar blanket pillow curtain "
    "carpet basket helmet glove jacket scarf belt".split()
)
WORDS: Final = tuple(
    "red blue green amber violet silver golden copper ivory coral north south east west upper "
    "lower inner outer fast slow warm cold quiet loud plain sharp round flat light heavy early "
    "late fresh dry spring summer autumn winter oak pine maple cedar birch willow".split()
)
PARTS: Final = ("cache", "retry", "queue", "batch", "page", "log", "token", "disk", "port", "node")
LIMITS: Final = ("size", "limit", "count", "mode", "delay", "level", "depth", "width", "rate")
SETTINGS: Final = tuple(f"{part}_{limit}" for part in PARTS for limit in LIMITS)
LETTERS: Final = "ABCDEFGHJKLMNPQRSTUVWXYZ"
RANGES: Final = (range(10, 100), range(100, 1000), range(1000, 10000))

Values = Callable[[random.Random, int], list[str]]
_problem = partial(solved, "lookup")


def _distinct(rng: random.Random, low: int, high: int, number: int) -> list[int]:
    found: dict[int, None] = {}
    while len(found) < number:
        found[randint(rng, low, high)] = None
    return list(found)


def _numbers(rng: random.Random, number: int) -> list[str]:
    span = pick(rng, RANGES)
    return [str(value) for value in _distinct(rng, span.start, span.stop - 1, number)]


def _between(low: int, high: int, prefix: str = "") -> Values:
    return lambda rng, count: [f"{prefix}{value}" for value in _distinct(rng, low, high, count)]


def _codes(rng: random.Random, number: int) -> list[str]:
    """A letter and one or two digits, as B7 or K42."""
    places = _distinct(rng, 0, 24 * 60 - 1, number)
    return [f"{LETTERS[place % 24]}{place // 24 + 1}" for place in places]


def _long_codes(rng: random.Random, number: int) -> list[str]:
    places = _distinct(rng, 0, 24 * 24 * 90 - 1, number)
    return [
        f"{LETTERS[place % 24]}{LETTERS[place // 24 % 24]}-{place // 576 + 10}" for place in places
    ]


def _of(pool: Sequence[str]) -> Values:
    return lambda rng, number: sample(rng, pool, number)


PHONES: Final = _between(1000, 9999)
ROOMS: Final = _between(10, 499)
ARTICLES: Final = _between(1000, 9999, "sku-")


@dataclass(frozen=True, slots=True)
class Scene:
    """One layout of entries, with wordings that suit no other scene."""

    keys: tuple[Values, ...]
    values: tuple[Values, ...]
    noun: str  # what a value is
    key: str  # what a key is
    value_asks: tuple[str, ...]
    key_asks: tuple[str, ...]
    intros: tuple[str, ...]
    entry: tuple[str, str, str]  # before the key, between key and value, behind the value
    gaps: tuple[str, ...] = ("\n",)
    ends: tuple[str, str] = ("", "")  # around all entries
    plural: str = ""

    @property
    def nouns(self) -> str:
        return self.plural or f"{self.noun}s"


ABSENT: Final = "not listed"
ASKS: Final = read_wordings("""
    value: What is the {noun} of {k}?
    | Give the {noun} of {k}.
    | Look up {k} and write down the {noun}.
    | Find the {noun} that belongs to {k}.
    | Which {noun} belongs to {k}?
    key: Which {key} has the {noun} {v}?
    | Name the {key} whose {noun} is {v}.
    | Find the {key} with the {noun} {v}.
    | The {noun} {v} belongs to which {key}?
    | To which {key} does the {noun} {v} belong?
    both: What are the {nouns} of {a} and {b} in this order?
    | Give the {nouns} of {a} and {b} in the order asked.
    | Look up {a} and then {b} and write both {nouns}.
    | Write the {noun} of {a} and then the {noun} of {b}.
    | Find the {noun} of {a} first and the {noun} of {b} second.
    | Which {nouns} belong to {a} and to {b} in this order?
    comma: Put a comma between them.
    | Separate the two with a comma.
    | Answer with a comma between the two.
    absent: If it is not there, answer "not listed".
    | Say not listed if you cannot find it.
    | Where there is no such entry, write "not listed".
    | Without an entry for it the answer is: not listed.
    | Answer "not listed" if no entry fits.
""")

JSON: Final = Scene(
    keys=(_of(THINGS), _of(NAMES)),
    values=(_numbers,),
    noun="value",
    key="field",
    value_asks=("What does the object hold under {k}?", 'Read the field "{k}" of the object.'),
    key_asks=("Under which field does the object hold {v}?", "Which field holds {v}?"),
    intros=("JSON:", "The reply of the server:", "Object:", "Parse this object."),
    entry=('"', '": ', ""),
    gaps=(", ",),
    ends=("{", "}"),
)
SCENES: Final = (
    Scene(
        keys=(_of(THINGS), _of(WORDS)),
        values=(_numbers, _codes, _long_codes, _of(NAMES)),
        noun="value",
        key="key",
        value_asks=("What stands behind {k}?", "Read off the value on the line of {k}."),
        key_asks=("What stands in front of {v}?", "On the line of which key is {v}?"),
        intros=("Card:", "Notes from the desk:", "Read these lines.", "File:"),
        entry=("", ": ", ""),
    ),
    Scene(
        keys=(_of(SETTINGS),),
        values=(_numbers, _of(WORDS)),
        noun="value",
        key="setting",
        value_asks=("To what is {k} set?", "What does the config set {k} to?"),
        key_asks=("Which setting is set to {v}?", "What is set to {v} in the config?"),
        intros=("Config:", "[server]", "The config reads:", "# settings"),
        entry=("", "=", ""),
        gaps=("\n", "; ", " "),
    ),
    JSON,
    replace(JSON, values=(_long_codes, _of(WORDS)), entry=('"', '": "', '"')),
    Scene(
        keys=(_of(NAMES),),
        values=(ROOMS,),
        noun="room",
        key="person",
        value_asks=("In which room does {k} sit?", "Where does {k} sit? Give the room."),
        key_asks=("Who sits in room {v}?", "Whom do you find in room {v}?"),
        intros=("Our office:", "Who sits where:", "About the office:", "The plan of the floor:"),
        entry=("", " sits in room ", "."),
        gaps=("\n", " "),
    ),
    Scene(
        keys=(_of(NAMES),),
        values=(PHONES,),
        noun="phone number",
        key="person",
        value_asks=("Under which number can I call {k}?", "I want to call {k}. What do I dial?"),
        key_asks=("Who answers when I dial {v}?", "Whom do I reach under {v}?"),
        intros=("Phone book:", "From the phone book:", "Numbers of the team:", "Directory:"),
        entry=("Call ", " under ", "."),
        gaps=("\n", " "),
    ),
    Scene(
        keys=(ARTICLES,),
        values=(_codes,),
        noun="shelf",
        plural="shelves",
        key="article",
        value_asks=("On which shelf is {k}?", "Where in the store is {k}? Give the shelf."),
        key_asks=("Which article lies on shelf {v}?", "What lies on shelf {v}?"),
        intros=("Inventory:", "Stock of the store:", "Store plan:", "Goods by shelf:"),
        entry=("", " -> shelf ", ""),
    ),
)


def _frame(rng: random.Random, intros: Sequence[str], entries: str, question: str) -> str:
    form = rng.random()
    if form < 0.5:
        return f"{pick(rng, intros)}\n{entries}\n{question}"
    if form < 0.75:
        return f"{entries}\n\n{question}"
    return f"{question}\n{pick(rng, intros)}\n{entries}"


def _entries(rng: random.Random, spare: int = 0) -> tuple[Scene, list[str], list[str], str]:
    """A scene, keys, values and the text; `spare` more keys and values are not in the text."""
    scene = pick(rng, SCENES)
    number = randint(rng, 4, 10)
    keys = pick(rng, scene.keys)(rng, number + spare)
    values = pick(rng, scene.values)(rng, number + spare)
    before, between, behind = scene.entry
    entries = [f"{before}{keys[n]}{between}{values[n]}{behind}" for n in range(number)]
    text = f"{scene.ends[0]}{pick(rng, scene.gaps).join(entries)}{scene.ends[1]}"
    return scene, keys, values, text


def _value_ask(rng: random.Random, scene: Scene, key: str) -> str:
    return pick(rng, ASKS["value"] + scene.value_asks).format(noun=scene.noun, k=key)


def _key_ask(rng: random.Random, scene: Scene, value: str) -> str:
    return pick(rng, ASKS["key"] + scene.key_asks).format(noun=scene.noun, key=scene.key, v=value)


def _ruled(rng: random.Random, question: str) -> str:
    return f"{question} {pick(rng, ASKS['absent'])}" if rng.random() < 0.3 else question


def _value(rng: random.Random) -> Problem:
    scene, keys, values, text = _entries(rng)
    place = randint(rng, 0, len(keys) - 1)
    question = _ruled(rng, _value_ask(rng, scene, keys[place]))
    return _problem(_frame(rng, scene.intros, text, question), values[place])


def _key(rng: random.Random) -> Problem:
    scene, keys, values, text = _entries(rng)
    place = randint(rng, 0, len(keys) - 1)
    question = _ruled(rng, _key_ask(rng, scene, values[place]))
    prompt = _frame(rng, scene.intros, text, question)
    return _problem(prompt, keys[place], scan(keys, values, values[place]))


def _both(rng: random.Random) -> Problem:
    scene, keys, values, text = _entries(rng)
    first, second = sample(rng, range(len(keys)), 2)
    ask = pick(rng, ASKS["both"]).format(
        noun=scene.noun, nouns=scene.nouns, a=keys[first], b=keys[second]
    )
    prompt = _frame(rng, scene.intros, text, f"{ask} {pick(rng, ASKS['comma'])}")
    return _problem(prompt, f"{values[first]}, {values[second]}")


def _missing(rng: random.Random) -> Problem:
    scene, keys, values, text = _entries(rng, spare=1)
    if rng.random() < 0.7:
        question, work = _value_ask(rng, scene, keys[-1]), ""
    else:
        question, work = _key_ask(rng, scene, values[-1]), scan(keys[:-1], values[:-1], values[-1])
    prompt = _frame(rng, scene.intros, text, f"{question} {pick(rng, ASKS['absent'])}")
    return _problem(prompt, ABSENT, work)


@dataclass(frozen=True, slots=True)
class FactChain:
    """Two facts in a row: {a} leads to {b}, and {b} leads to {c}."""

    starts: Values
    middles: Values
    ends: Values
    near: str
    far: str
    asks: tuple[str, ...]
    intros: tuple[str, ...]
    gaps: tuple[str, ...] = ("\n", " ")
    link: str = " "  # between the two facts of the solution
    own: bool = False  # {a} may have an end of its own, which no question is about


CHAINS: Final = (
    FactChain(
        starts=_of(NAMES[:23]),
        middles=_of(NAMES[23:]),
        ends=ROOMS,
        near="{a} reports to {b}.",
        far="{b} sits in room {c}.",
        asks=(
            "In which room sits the one {a} reports to?",
            "What is the room of the person {a} reports to?",
            "To whom does {a} report, and in which room does that person sit? Give the room.",
            "{a} wants to see the one {a} reports to. Which room is it?",
            "Give the room of the one to whom {a} reports.",
            "Find the person {a} reports to and give that person's room.",
        ),
        intros=("Our team:", "Who is who:", "About the people here:"),
        own=True,
    ),
    FactChain(
        starts=_of(THINGS),
        middles=_codes,
        ends=_numbers,
        near="The {a} is in box {b}.",
        far="Box {b} weighs {c} grams.",
        asks=(
            "How many grams does the box with the {a} weigh?",
            "What is the weight in grams of the box that holds the {a}?",
            "Find the box with the {a} and give its weight in grams.",
            "The {a} is in one of the boxes. How many grams does that box weigh?",
            "Give the number of grams of the box in which the {a} is.",
            "I take the box with the {a}. How many grams do I carry?",
        ),
        intros=("Packing note:", "Boxes:", "What we packed:"),
    ),
    FactChain(
        starts=_of(SETTINGS),
        middles=_of(WORDS),
        ends=_numbers,
        near="{a}=${b}",
        far="{b}={c}",
        asks=(
            "Which number does {a} get in the end?",
            "Resolve {a} to its number.",
            "{a} points to another name. Which number has that name?",
            "What is the number behind {a}?",
            "Follow {a} to its number and write the number down.",
            "Find the name that {a} refers to and give its number.",
        ),
        intros=("Config:", "# settings", "The config reads:"),
        gaps=("\n", "; "),
        link="; ",
    ),
    FactChain(
        starts=ARTICLES,
        middles=_of(NAMES),
        ends=PHONES,
        near="{a} -> owner {b}",
        far="{b} -> phone {c}",
        asks=(
            "Which phone number has the owner of {a}?",
            "What is the phone number of the owner of {a}?",
            "I must call the owner of {a}. Which number do I dial?",
            "Find the owner of {a} and give the owner's phone number.",
            "Who owns {a}, and under which number? Give the number.",
            "Give the number to dial for the owner of {a}.",
        ),
        intros=("Register:", "Owners and phones:", "Lost and found:"),
        gaps=("\n", "; "),
        link="; ",
    ),
)


def _hops(rng: random.Random) -> Problem:
    chain = pick(rng, CHAINS)
    number = randint(rng, 2, 4)
    starts = chain.starts(rng, number)
    middles = chain.middles(rng, number)
    ends = chain.ends(rng, number + 1)
    near = [chain.near.format(a=starts[n], b=middles[n]) for n in range(number)]
    far = [chain.far.format(b=middles[n], c=ends[n]) for n in range(number)]
    place = randint(rng, 0, number - 1)
    entries = near + far
    if chain.own and rng.random() < 0.5:
        entries.append(chain.far.format(b=starts[place], c=ends[-1]))
    text = pick(rng, chain.gaps).join(sample(rng, entries, len(entries)))
    question = pick(rng, chain.asks).format(a=starts[place])
    prompt = _frame(rng, chain.intros, text, question)
    return _problem(prompt, ends[place], f"{near[place]}{chain.link}{far[place]}")


KINDS: Final[dict[str, Draw]] = {
    "value": _value,
    "key": _key,
    "both": _both,
    "hops": _hops,
    "missing": _missing,
}
_SHARES: Final = (_value,) * 6 + (_key,) * 4 + (_both,) * 4 + (_hops,) * 4 + (_missing,) * 2


def draw(rng: random.Random) -> Problem:
    return pick(rng, _SHARES)(rng)
