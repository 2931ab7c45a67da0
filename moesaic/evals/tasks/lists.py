"""Lists of words or integers and strings of capital letters, to be changed, sorted and searched.

A list is answered with commas, whatever form it has in the prompt. Items to be counted off are
numbered first: a small model counts well only if it writes the numbers down. No wording has a comma
of its own, so the only commas of a prompt are those of its list."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from moesaic.evals.tasks.common import Draw, evenly, pick, randint, sample, solved
from moesaic.evals.tasks.problem import Problem
from moesaic.evals.tasks.wordings import read_wordings

NOUNS: Final = tuple(
    "cat dog sun map cup hat key pen box car bus tree fish bird moon star rain snow wind sand "
    "rock leaf rose corn rice milk salt cake bread apple lemon plum pear nut egg bee ant fox bear "
    "wolf lion duck goat cow horse sheep mouse frog boat ship train wheel door wall roof chair "
    "table lamp clock book ring drum bell coat sock shoe".split()
)
LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NUMBERS: Final = tuple(str(number) for number in range(100))
ORDINALS: Final = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
HOW_MANY: Final = ("none", "one", "two", "three", "four", "five", "six")
SEPARATORS: Final = ("-", "/", "+", "_", ":", ";", "|", ".", "&", "*", "=", "<", ">", "~")

# {q}: the question, {l}: the list
INLINE: Final = (
    "{q}\n{l}",
    "{l}\n{q}",
    "Here is a list: {l}\n{q}",
    "{q}\nList: {l}",
    "Given: {l}\n{q}",
    "This is the list: {l}\n{q}",
    "{q} The list: {l}",
)
LINES: Final = (
    "{q}\n{l}",
    "{l}\n{q}",
    "Here is a list:\n{l}\n{q}",
    "{q} This is the list:\n{l}",
    "List:\n{l}\n\n{q}",
)
# {s}: what the items are called, {i}: one of them, {x}: an item, a separator or a string
ASKS: Final = read_wordings("""
    commas: Separate the items with commas.
    | Put commas between the items.
    | Write commas between the items.
    | Answer with commas between the items.
    letters_only: Write capital letters without spaces.
    | Answer with capital letters and no spaces.
    | Leave no spaces between the letters.
    | Write the letters without any spaces.
    one_letter: Answer with this one letter.
    | Write only the letter.
    | Give a single letter.
    | Name only this letter.
    reverse: Reverse the list.
    | Write the list backwards.
    | Put the {s} of the list in the opposite order.
    | Give the {s} from the last to the first.
    | What is the list when read from its end?
    | Turn the order of the {s} around.
    | Which list do you get by reversing this one?
    swap: Swap the first and the last {i}.
    | Exchange the {i} at the start with the {i} at the end.
    | Let the first and the last {i} trade places.
    | What is the list after its first and last {s} are swapped?
    | Put the last {i} in the place of the first and the first in the place of the last.
    | Write the list with its two end {s} exchanged.
    odd: Keep every second {i} and start with the first.
    | Take the first {i} and then every second one after it.
    | Write only the {s} at places 1 and 3 and 5 and so on.
    | Keep the {s} at odd places and drop those at even places.
    | Which {s} stand at the odd places?
    | Leave out every {i} that stands at an even place.
    even: Keep every second {i} and start with the second.
    | Take the second {i} and then every second one after it.
    | Write only the {s} at places 2 and 4 and 6 and so on.
    | Keep the {s} at even places and drop those at odd places.
    | Which {s} stand at the even places?
    | Leave out every {i} that stands at an odd place.
    left: Rotate the list to the left by one place.
    | Move the first {i} to the end.
    | Take the first {i} away and put it behind the last one.
    | Shift all {s} one place to the left and let the first become the last.
    | What is the list after one rotation to the left?
    | Write the list with its first {i} moved to the end.
    right: Rotate the list to the right by one place.
    | Move the last {i} to the front.
    | Take the last {i} away and put it before the first one.
    | Shift all {s} one place to the right and let the last become the first.
    | What is the list after one rotation to the right?
    | Write the list with its last {i} moved to the front.
    up: Sort the numbers from small to large.
    | Put the numbers in ascending order.
    | Order the list so that the smallest number comes first.
    | Sort the list upwards.
    | Write the numbers in rising order.
    | What is the list when sorted with the smallest first?
    down: Sort the numbers from large to small.
    | Put the numbers in descending order.
    | Order the list so that the largest number comes first.
    | Sort the list downwards.
    | Write the numbers in falling order.
    | What is the list when sorted with the largest first?
    largest: What is the largest number in the list?
    | Which number of the list is the biggest?
    | Find the maximum of these numbers.
    | Name the greatest number in the list.
    | Which of the numbers is the highest one?
    | Pick the largest of all the numbers.
    smallest: What is the smallest number in the list?
    | Which number of the list is the least?
    | Find the minimum of these numbers.
    | Name the smallest number in the list.
    | Which of the numbers is the lowest one?
    | Pick the smallest of all the numbers.
    nth: What is the {n} {i} of the list?
    | Which {i} is the {n} in the list?
    | Name the {n} {i} in the list that you see here.
    | Give me the {n} {i} of this list.
    | Tell me which {i} comes {n} in the list.
    | Look at the list and write down its {n} {i}.
    remove: Remove the {n} {i} from the list.
    | Delete the {n} {i} and write down the rest.
    | What is left of the list without its {n} {i}?
    | Take the {n} {i} out of the list.
    | Write the list again but leave out the {n} {i}.
    | Strike the {n} {i} from the list and keep all the others.
    first: Give the first {n} {s} of the list.
    | Keep only the first {n} {s}.
    | What are the first {n} {s} of the list?
    | Cut the list off after its first {n} {s}.
    | Write down the first {n} {s} and leave out the rest.
    | Which {n} {s} stand at the start of the list?
    count: How often is {x} in the list?
    | How many times does {x} occur in the list?
    | Count how often {x} appears in the list.
    | How many of the items are {x}?
    | Tell me how many times {x} stands in the list.
    | Find the number of items that are equal to {x}.
    member: Is {x} in the list? Answer with yes or no.
    | Does the list have {x} in it? Say yes or no.
    | Answer with yes or no: is {x} one of the items?
    | Can you find {x} in the list? Answer with yes or no.
    | Yes or no: does {x} occur in the list?
    | Check whether {x} is one of the items. Answer with yes or no.
    repeats: Drop repeated items and keep the first of each.
    | Remove the duplicates but keep each item where it first occurs.
    | Write every item only once in the order of its first appearance.
    | Clean the list: each item may stay only at its first place.
    | Leave out any item that has already occurred further to the front.
    | What is left when every later copy of an item is dropped?
    join: Join the items with "{x}" and no spaces.
    | Write the items in one line with "{x}" between them and no spaces.
    | Glue the items together with "{x}" and leave no spaces.
    | Use "{x}" as the separator of the list and leave out all spaces.
    | Make one word of the list with "{x}" between its items.
    | Connect all items by "{x}" without any spaces.
    flip: Reverse the string {x}.
    | Write the letters of {x} in the opposite order.
    | What do you get when you read {x} from right to left?
    | Spell the string {x} backwards.
    | Turn the string {x} around so that its last letter comes first.
    | Write {x} from its last letter to its first letter.
    letter_sort: Sort the letters of {x} by the alphabet.
    | Put the letters of the string {x} in alphabetical order.
    | Arrange the letters of {x} from A to Z.
    | Write the letters of {x} in the order of the alphabet.
    | What is the string {x} after its letters are sorted from A to Z?
    | Order the letters in {x} alphabetically.
    double: Double each letter of the string {x}.
    | Write every letter of the string {x} twice in a row.
    | Repeat each letter of {x} once right behind itself.
    | What is the string {x} with every letter doubled?
    | Copy the string {x} but write each of its letters two times.
    | Make a string in which each letter of {x} stands twice.
    letter: What is the {n} letter of the string {x}?
    | Which letter of the string {x} is the {n} one?
    | Give the {n} letter in the string {x}.
    | Look at the string {x}. Which letter stands {n}?
    | Name the {n} letter when you spell out {x}.
    | In the string {x} find the {n} letter.
    delete: Delete every letter {y} from the string {x}.
    | Remove all {y} letters from the string {x}.
    | Write the string {x} without the letter {y}.
    | What is left of the string {x} when each {y} is taken out?
    | Leave out each {y} when you copy the string {x}.
    | Strike every {y} in the string {x} and close the gaps.
    repeat: Write the string {x} out {n} times.
    | Write the string {x} {n} times in a row.
    | Make one long string out of {n} copies of {x}.
    | What do you get by joining {n} copies of {x}?
    | Put {n} copies of the string {x} one behind the other.
    | Spell out {x} {n} times with no gap in between.
""")

# How each kind changes a list, and whether the solution numbers its items.
CHANGES: Final[dict[str, tuple[Callable[[list[str]], list[str]], bool]]] = {
    "reverse": (lambda items: items[::-1], True),
    "swap": (lambda items: [items[-1], *items[1:-1], items[0]], False),
    "odd": (lambda items: items[::2], True),
    "even": (lambda items: items[1::2], True),
    "left": (lambda items: items[1:] + items[:1], False),
    "right": (lambda items: items[-1:] + items[:-1], False),
}
SPELLINGS: Final[dict[str, Callable[[str], str]]] = {
    "flip": lambda word: word[::-1],
    "letter_sort": lambda word: "".join(sorted(word)),
    "double": lambda word: "".join([letter * 2 for letter in word]),
}
_problem = partial(solved, "lists")


def _items(rng: random.Random, low: int, high: int) -> tuple[str, list[str]]:
    """Distinct words or integers, and what they are called."""
    number = randint(rng, low, high)
    if rng.random() < 0.6:
        return ("words" if rng.random() < 0.3 else "items"), sample(rng, NOUNS, number)
    return ("numbers" if rng.random() < 0.5 else "items"), sample(rng, NUMBERS, number)


def _word(rng: random.Random, low: int, high: int) -> str:
    return "".join(sample(rng, LETTERS, randint(rng, low, high)))


def _ask(rng: random.Random, kind: str, form: str = "", **fields: str) -> str:
    """A question of a kind, and how to write the answer."""
    question = pick(rng, ASKS[kind]).format(**fields)
    return f"{question} {pick(rng, ASKS[form])}" if form else question


def _pose(rng: random.Random, question: str, items: Sequence[str]) -> str:
    form = rng.random()
    if form < 0.4:
        return pick(rng, INLINE).format(q=question, l=f"[{', '.join(items)}]")
    if form < 0.75:
        return pick(rng, INLINE).format(q=question, l=", ".join(items))
    return pick(rng, LINES).format(q=question, l="\n".join(items))


def _numbered(items: Sequence[str]) -> str:
    return ", ".join([f"{place} {item}" for place, item in enumerate(items, 1)])


def _changed(rng: random.Random, kind: str) -> Problem:
    """The answer is the list in another order, or a part of it."""
    change, is_numbered = CHANGES[kind]
    things, items = _items(rng, 3, 7)
    question = _ask(rng, kind, "commas", s=things, i=things[:-1])
    work = _numbered(items) if is_numbered else ""
    return _problem(_pose(rng, question, items), ", ".join(change(items)), work)


def _sorted(rng: random.Random, kind: str) -> Problem:
    items = sample(rng, NUMBERS, randint(rng, 3, 7))
    question = _ask(rng, kind, "commas")
    answer = ", ".join(sorted(items, key=int, reverse=kind == "down"))
    return _problem(_pose(rng, question, items), answer)


def _extreme(rng: random.Random, kind: str) -> Problem:
    items = sample(rng, NUMBERS, randint(rng, 5, 7))
    answer = max(items, key=int) if kind == "largest" else min(items, key=int)
    return _problem(_pose(rng, _ask(rng, kind), items), answer)


def _nth(rng: random.Random) -> Problem:
    things, items = _items(rng, 4, 7)
    place = randint(rng, 0, len(items) - 1)
    question = _ask(rng, "nth", n=ORDINALS[place], i=things[:-1])
    return _problem(_pose(rng, question, items), items[place], _numbered(items[: place + 1]))


def _from_end(rng: random.Random) -> Problem:
    things, items = _items(rng, 3, 7)
    back = randint(rng, 1, 2)
    question = _ask(rng, "nth", n=("last", "last but one")[back - 1], i=things[:-1])
    return _problem(_pose(rng, question, items), items[-back])


def _remove(rng: random.Random) -> Problem:
    things, items = _items(rng, 3, 7)
    place = randint(rng, 0, len(items) - 1)
    question = _ask(rng, "remove", "commas", n=ORDINALS[place], i=things[:-1])
    rest = items[:place] + items[place + 1 :]
    return _problem(_pose(rng, question, items), ", ".join(rest), _numbered(items[: place + 1]))


def _first(rng: random.Random) -> Problem:
    things, items = _items(rng, 4, 7)
    number = randint(rng, 2, min(len(items) - 1, 5))
    prompt = _pose(rng, _ask(rng, "first", "commas", n=HOW_MANY[number], s=things), items)
    return _problem(prompt, ", ".join(items[:number]), _numbered(items[:number]))


def _count(rng: random.Random) -> Problem:
    times = randint(rng, 0, 7)
    kept = randint(rng, 2, 4) if times else randint(rng, 4, 8)
    wanted, *items = sample(rng, NOUNS if rng.random() < 0.6 else NUMBERS, kept + 1)
    items = sample(rng, items + [wanted] * times, kept + times)
    prompt = _pose(rng, _ask(rng, "count", x=wanted), items)
    return _problem(prompt, str(times), _numbered([wanted] * times) or "none")


def _member(rng: random.Random) -> Problem:
    _, (spare, *items) = _items(rng, 4, 8)
    present = rng.random() < 0.5
    wanted = pick(rng, items) if present else spare
    prompt = _pose(rng, _ask(rng, "member", x=wanted), items)
    return _problem(prompt, "yes" if present else "no")


def _repeats(rng: random.Random) -> Problem:
    _, once = _items(rng, 3, 5)
    items = list(once)
    for _ in range(randint(rng, 1, 3)):
        place = randint(rng, 1, len(items))
        items.insert(place, pick(rng, items[:place]))  # behind the one it repeats
    return _problem(_pose(rng, _ask(rng, "repeats", "commas"), items), ", ".join(once))


def _join(rng: random.Random) -> Problem:
    _, items = _items(rng, 3, 6)
    separator = pick(rng, SEPARATORS)
    return _problem(_pose(rng, _ask(rng, "join", x=separator), items), separator.join(items))


def _spelled(rng: random.Random, kind: str) -> Problem:
    word = _word(rng, 4, 8)
    return _problem(_ask(rng, kind, "letters_only", x=word), SPELLINGS[kind](word))


def _letter(rng: random.Random) -> Problem:
    word = _word(rng, 4, 8)
    place = randint(rng, 0, len(word) - 1)
    prompt = _ask(rng, "letter", "one_letter", n=ORDINALS[place], x=word)
    return _problem(prompt, word[place], _numbered(word[: place + 1]))


def _delete(rng: random.Random) -> Problem:
    gone, *letters = sample(rng, LETTERS, randint(rng, 4, 6))
    letters += [gone] * randint(rng, 1, 3)
    word = sample(rng, letters, len(letters))
    prompt = _ask(rng, "delete", "letters_only", x="".join(word), y=gone)
    return _problem(prompt, "".join([letter for letter in word if letter != gone]))


def _repeat(rng: random.Random) -> Problem:
    word, times = _word(rng, 4, 6), randint(rng, 2, 3)
    return _problem(_ask(rng, "repeat", "letters_only", x=word, n=HOW_MANY[times]), word * times)


KINDS: Final[dict[str, Draw]] = {
    **{kind: partial(_changed, kind=kind) for kind in CHANGES},
    **{kind: partial(_sorted, kind=kind) for kind in ("up", "down")},
    **{kind: partial(_extreme, kind=kind) for kind in ("largest", "smallest")},
    "nth": _nth,
    "from_end": _from_end,
    "remove": _remove,
    "first": _first,
    "count": _count,
    "member": _member,
    "repeats": _repeats,
    "join": _join,
    **{kind: partial(_spelled, kind=kind) for kind in SPELLINGS},
    "letter": _letter,
    "delete": _delete,
    "repeat": _repeat,
}
draw: Final = evenly(KINDS)
