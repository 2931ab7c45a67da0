"""Lists of words or integers and strings of capital letters, to be turned, sorted and searched.

A list is answered with commas, whatever form it came in. Items to be counted off are numbered
first: a small model counts well only where it writes the numbers down. No wording has a comma of
its own, so that the only commas of a prompt are those of its list."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

from moesaic.evals.tasks.chance import pick, some, upto
from moesaic.evals.tasks.problem import MARK, Problem

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
COMMAS: Final = (
    "Separate the items with commas.",
    "Put commas between the items.",
    "Write commas between the items.",
    "Answer with commas between the items.",
)

LETTERS_ONLY: Final = (
    "Write capital letters without spaces.",
    "Answer with capital letters and no spaces.",
    "Leave no spaces between the letters.",
    "Write the letters without any spaces.",
)
ONE_LETTER: Final = (
    "Answer with this one letter.",
    "Write only the letter.",
    "Give a single letter.",
    "Name only this letter.",
)


def _items(rng: random.Random, low: int, high: int) -> tuple[str, list[str]]:
    """Distinct words or integers, and what they are called."""
    number = upto(rng, low, high)
    if rng.random() < 0.6:
        return ("words" if rng.random() < 0.3 else "items"), some(rng, NOUNS, number)
    return ("numbers" if rng.random() < 0.5 else "items"), some(rng, NUMBERS, number)


def _word(rng: random.Random, low: int, high: int) -> str:
    return "".join(some(rng, LETTERS, upto(rng, low, high)))


def _pose(rng: random.Random, question: str, items: Sequence[str]) -> str:
    form = rng.random()
    if form < 0.4:
        return pick(rng, INLINE).format(q=question, l=f"[{', '.join(items)}]")
    if form < 0.75:
        return pick(rng, INLINE).format(q=question, l=", ".join(items))
    return pick(rng, LINES).format(q=question, l="\n".join(items))


def _numbered(items: Sequence[str]) -> str:
    return ", ".join([f"{place} {item}" for place, item in enumerate(items, 1)])


def _problem(prompt: str, answer: str, work: str = "") -> Problem:
    solution = f"{work}\n{MARK} {answer}" if work else f"{MARK} {answer}"
    return Problem("lists", prompt, answer, solution)


Change = Callable[[list[str]], list[str]]


def _changed(
    wordings: Sequence[str], change: Change, number: bool = False
) -> Callable[[random.Random], Problem]:
    """A kind whose answer is the list in another order, or a part of it."""

    def draw_one(rng: random.Random) -> Problem:
        things, items = _items(rng, 3, 7)
        question = f"{pick(rng, wordings).format(s=things, i=things[:-1])} {pick(rng, COMMAS)}"
        answer = ", ".join(change(items))
        return _problem(_pose(rng, question, items), answer, _numbered(items) if number else "")

    return draw_one


REVERSE: Final = (
    "Reverse the list.",
    "Write the list backwards.",
    "Put the {s} of the list in the opposite order.",
    "Give the {s} from the last to the first.",
    "What is the list when read from its end?",
    "Turn the order of the {s} around.",
    "Which list do you get by reversing this one?",
)
SWAP: Final = (
    "Swap the first and the last {i}.",
    "Exchange the {i} at the start with the {i} at the end.",
    "Let the first and the last {i} trade places.",
    "What is the list after its first and last {s} are swapped?",
    "Put the last {i} in the place of the first and the first in the place of the last.",
    "Write the list with its two end {s} exchanged.",
)
ODD: Final = (
    "Keep every second {i} and start with the first.",
    "Take the first {i} and then every second one after it.",
    "Write only the {s} at places 1 and 3 and 5 and so on.",
    "Keep the {s} at odd places and drop those at even places.",
    "Which {s} stand at the odd places?",
    "Leave out every {i} that stands at an even place.",
)
EVEN: Final = (
    "Keep every second {i} and start with the second.",
    "Take the second {i} and then every second one after it.",
    "Write only the {s} at places 2 and 4 and 6 and so on.",
    "Keep the {s} at even places and drop those at odd places.",
    "Which {s} stand at the even places?",
    "Leave out every {i} that stands at an odd place.",
)
LEFT: Final = (
    "Rotate the list to the left by one place.",
    "Move the first {i} to the end.",
    "Take the first {i} away and put it behind the last one.",
    "Shift all {s} one place to the left and let the first become the last.",
    "What is the list after one rotation to the left?",
    "Write the list with its first {i} moved to the end.",
)
RIGHT: Final = (
    "Rotate the list to the right by one place.",
    "Move the last {i} to the front.",
    "Take the last {i} away and put it before the first one.",
    "Shift all {s} one place to the right and let the last become the first.",
    "What is the list after one rotation to the right?",
    "Write the list with its last {i} moved to the front.",
)

UP: Final = (
    "Sort the numbers from small to large.",
    "Put the numbers in ascending order.",
    "Order the list so that the smallest number comes first.",
    "Sort the list upwards.",
    "Write the numbers in rising order.",
    "What is the list when sorted with the smallest first?",
)
DOWN: Final = (
    "Sort the numbers from large to small.",
    "Put the numbers in descending order.",
    "Order the list so that the largest number comes first.",
    "Sort the list downwards.",
    "Write the numbers in falling order.",
    "What is the list when sorted with the largest first?",
)


def _sorted(wordings: Sequence[str], down: bool) -> Callable[[random.Random], Problem]:
    def draw_one(rng: random.Random) -> Problem:
        items = some(rng, NUMBERS, upto(rng, 3, 7))
        question = f"{pick(rng, wordings)} {pick(rng, COMMAS)}"
        answer = ", ".join(sorted(items, key=int, reverse=down))
        return _problem(_pose(rng, question, items), answer)

    return draw_one


LARGEST: Final = (
    "What is the largest number in the list?",
    "Which number of the list is the biggest?",
    "Find the maximum of these numbers.",
    "Name the greatest number in the list.",
    "Which of the numbers is the highest one?",
    "Pick the largest of all the numbers.",
)
SMALLEST: Final = (
    "What is the smallest number in the list?",
    "Which number of the list is the least?",
    "Find the minimum of these numbers.",
    "Name the smallest number in the list.",
    "Which of the numbers is the lowest one?",
    "Pick the smallest of all the numbers.",
)


def _extreme(
    wordings: Sequence[str], best: Callable[[list[int]], int]
) -> Callable[[random.Random], Problem]:
    def draw_one(rng: random.Random) -> Problem:
        items = some(rng, NUMBERS, upto(rng, 5, 7))
        answer = str(best([int(item) for item in items]))
        return _problem(_pose(rng, pick(rng, wordings), items), answer)

    return draw_one


NTH: Final = (
    "What is the {n} {i} of the list?",
    "Which {i} is the {n} in the list?",
    "Name the {n} {i} in the list that you see here.",
    "Give me the {n} {i} of this list.",
    "Tell me which {i} comes {n} in the list.",
    "Look at the list and write down its {n} {i}.",
)


def _nth(rng: random.Random) -> Problem:
    things, items = _items(rng, 4, 7)
    place = upto(rng, 0, len(items) - 1)
    question = pick(rng, NTH).format(n=ORDINALS[place], i=things[:-1])
    return _problem(_pose(rng, question, items), items[place], _numbered(items[: place + 1]))


def _from_end(rng: random.Random) -> Problem:
    things, items = _items(rng, 3, 7)
    back = upto(rng, 1, 2)
    question = pick(rng, NTH).format(n=("last", "last but one")[back - 1], i=things[:-1])
    return _problem(_pose(rng, question, items), items[-back])


REMOVE: Final = (
    "Remove the {n} {i} from the list.",
    "Delete the {n} {i} and write down the rest.",
    "What is left of the list without its {n} {i}?",
    "Take the {n} {i} out of the list.",
    "Write the list again but leave out the {n} {i}.",
    "Strike the {n} {i} from the list and keep all the others.",
)


def _remove(rng: random.Random) -> Problem:
    things, items = _items(rng, 3, 7)
    place = upto(rng, 0, len(items) - 1)
    question = pick(rng, REMOVE).format(n=ORDINALS[place], i=things[:-1])
    rest = items[:place] + items[place + 1 :]
    prompt = _pose(rng, f"{question} {pick(rng, COMMAS)}", items)
    return _problem(prompt, ", ".join(rest), _numbered(items[: place + 1]))


FIRST: Final = (
    "Give the first {n} {s} of the list.",
    "Keep only the first {n} {s}.",
    "What are the first {n} {s} of the list?",
    "Cut the list off after its first {n} {s}.",
    "Write down the first {n} {s} and leave out the rest.",
    "Which {n} {s} stand at the start of the list?",
)


def _first(rng: random.Random) -> Problem:
    things, items = _items(rng, 4, 7)
    number = upto(rng, 2, min(len(items) - 1, 5))
    question = pick(rng, FIRST).format(n=HOW_MANY[number], s=things)
    prompt = _pose(rng, f"{question} {pick(rng, COMMAS)}", items)
    return _problem(prompt, ", ".join(items[:number]), _numbered(items[:number]))


COUNT: Final = (
    "How often is {x} in the list?",
    "How many times does {x} occur in the list?",
    "Count how often {x} appears in the list.",
    "How many of the items are {x}?",
    "Tell me how many times {x} stands in the list.",
    "Find the number of items that are equal to {x}.",
)


def _count(rng: random.Random) -> Problem:
    times = upto(rng, 0, 7)
    kept = upto(rng, 2, 4) if times else upto(rng, 4, 8)
    wanted, *items = some(rng, NOUNS if rng.random() < 0.6 else NUMBERS, kept + 1)
    items = some(rng, items + [wanted] * times, kept + times)
    prompt = _pose(rng, pick(rng, COUNT).format(x=wanted), items)
    return _problem(prompt, str(times), _numbered([wanted] * times) or "none")


MEMBER: Final = (
    "Is {x} in the list? Answer with yes or no.",
    "Does the list have {x} in it? Say yes or no.",
    "Answer with yes or no: is {x} one of the items?",
    "Can you find {x} in the list? Answer with yes or no.",
    "Yes or no: does {x} occur in the list?",
    "Check whether {x} is one of the items. Answer with yes or no.",
)


def _member(rng: random.Random) -> Problem:
    _, (spare, *items) = _items(rng, 4, 8)
    there = rng.random() < 0.5
    wanted = pick(rng, items) if there else spare
    prompt = _pose(rng, pick(rng, MEMBER).format(x=wanted), items)
    return _problem(prompt, "yes" if there else "no")


REPEATS: Final = (
    "Drop repeated items and keep the first of each.",
    "Remove the duplicates but keep each item where it first occurs.",
    "Write every item only once in the order of its first appearance.",
    "Clean the list: each item may stay only at its first place.",
    "Leave out any item that has already occurred further to the front.",
    "What is left when every later copy of an item is dropped?",
)


def _repeats(rng: random.Random) -> Problem:
    _, once = _items(rng, 3, 5)
    items = list(once)
    for _ in range(upto(rng, 1, 3)):
        place = upto(rng, 1, len(items))
        items.insert(place, pick(rng, items[:place]))  # behind the one it repeats
    prompt = _pose(rng, f"{pick(rng, REPEATS)} {pick(rng, COMMAS)}", items)
    return _problem(prompt, ", ".join(once))


JOIN: Final = (
    'Join the items with "{x}" and no spaces.',
    'Write the items in one line with "{x}" between them and no spaces.',
    'Glue the items together with "{x}" and leave no spaces.',
    'Use "{x}" as the separator of the list and leave out all spaces.',
    'Make one word of the list with "{x}" between its items.',
    'Connect all items by "{x}" without any spaces.',
)


def _join(rng: random.Random) -> Problem:
    _, items = _items(rng, 3, 6)
    separator = pick(rng, SEPARATORS)
    return _problem(_pose(rng, pick(rng, JOIN).format(x=separator), items), separator.join(items))


FLIP: Final = (
    "Reverse the string {x}.",
    "Write the letters of {x} in the opposite order.",
    "What do you get when you read {x} from right to left?",
    "Spell the string {x} backwards.",
    "Turn the string {x} around so that its last letter comes first.",
    "Write {x} from its last letter to its first letter.",
)
LETTER_SORT: Final = (
    "Sort the letters of {x} by the alphabet.",
    "Put the letters of the string {x} in alphabetical order.",
    "Arrange the letters of {x} from A to Z.",
    "Write the letters of {x} in the order of the alphabet.",
    "What is the string {x} after its letters are sorted from A to Z?",
    "Order the letters in {x} alphabetically.",
)
DOUBLE: Final = (
    "Double each letter of the string {x}.",
    "Write every letter of the string {x} twice in a row.",
    "Repeat each letter of {x} once right behind itself.",
    "What is the string {x} with every letter doubled?",
    "Copy the string {x} but write each of its letters two times.",
    "Make a string in which each letter of {x} stands twice.",
)


def _spelled(
    wordings: Sequence[str], change: Callable[[str], str]
) -> Callable[[random.Random], Problem]:
    def draw_one(rng: random.Random) -> Problem:
        word = _word(rng, 4, 8)
        prompt = f"{pick(rng, wordings).format(x=word)} {pick(rng, LETTERS_ONLY)}"
        return _problem(prompt, change(word))

    return draw_one


LETTER: Final = (
    "What is the {n} letter of the string {x}?",
    "Which letter of the string {x} is the {n} one?",
    "Give the {n} letter in the string {x}.",
    "Look at the string {x}. Which letter stands {n}?",
    "Name the {n} letter when you spell out {x}.",
    "In the string {x} find the {n} letter.",
)


def _letter(rng: random.Random) -> Problem:
    word = _word(rng, 4, 8)
    place = upto(rng, 0, len(word) - 1)
    question = pick(rng, LETTER).format(n=ORDINALS[place], x=word)
    return _problem(
        f"{question} {pick(rng, ONE_LETTER)}", word[place], _numbered(word[: place + 1])
    )


DELETE: Final = (
    "Delete every letter {y} from the string {x}.",
    "Remove all {y} letters from the string {x}.",
    "Write the string {x} without the letter {y}.",
    "What is left of the string {x} when each {y} is taken out?",
    "Leave out each {y} when you copy the string {x}.",
    "Strike every {y} in the string {x} and close the gaps.",
)


def _delete(rng: random.Random) -> Problem:
    gone, *letters = some(rng, LETTERS, upto(rng, 4, 6))
    letters += [gone] * upto(rng, 1, 3)
    word = some(rng, letters, len(letters))
    question = pick(rng, DELETE).format(x="".join(word), y=gone)
    answer = "".join([letter for letter in word if letter != gone])
    return _problem(f"{question} {pick(rng, LETTERS_ONLY)}", answer)


REPEAT: Final = (
    "Write the string {x} out {n} times.",
    "Write the string {x} {n} times in a row.",
    "Make one long string out of {n} copies of {x}.",
    "What do you get by joining {n} copies of {x}?",
    "Put {n} copies of the string {x} one behind the other.",
    "Spell out {x} {n} times with no gap in between.",
)


def _repeat(rng: random.Random) -> Problem:
    word, times = _word(rng, 4, 6), upto(rng, 2, 3)
    question = pick(rng, REPEAT).format(x=word, n=HOW_MANY[times])
    return _problem(f"{question} {pick(rng, LETTERS_ONLY)}", word * times)


KINDS: Final[dict[str, Callable[[random.Random], Problem]]] = {
    "reverse": _changed(REVERSE, lambda items: items[::-1], number=True),
    "swap": _changed(SWAP, lambda items: [items[-1], *items[1:-1], items[0]]),
    "odd": _changed(ODD, lambda items: items[::2], number=True),
    "even": _changed(EVEN, lambda items: items[1::2], number=True),
    "left": _changed(LEFT, lambda items: items[1:] + items[:1]),
    "right": _changed(RIGHT, lambda items: items[-1:] + items[:-1]),
    "up": _sorted(UP, down=False),
    "down": _sorted(DOWN, down=True),
    "largest": _extreme(LARGEST, max),
    "smallest": _extreme(SMALLEST, min),
    "nth": _nth,
    "from_end": _from_end,
    "remove": _remove,
    "first": _first,
    "count": _count,
    "member": _member,
    "repeats": _repeats,
    "join": _join,
    "flip": _spelled(FLIP, lambda word: word[::-1]),
    "letter_sort": _spelled(LETTER_SORT, lambda word: "".join(sorted(word))),
    "double": _spelled(DOUBLE, lambda word: "".join([letter * 2 for letter in word])),
    "letter": _letter,
    "delete": _delete,
    "repeat": _repeat,
}
_EVENLY: Final = tuple(KINDS.values())


def draw(rng: random.Random) -> Problem:
    return pick(rng, _EVENLY)(rng)
