"""The tasks lists, lookup and chat: solvers find every answer again from the words of the prompt
alone, without knowing the kind of problem."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import islice, pairwise

import pytest

from moesaic.evals.tasks import chat, lists, lookup
from moesaic.evals.tasks.draw import distinct, problems, split_of
from moesaic.evals.tasks.problem import MARK, Problem, grade, is_kept

MODULES = {"lists": lists, "lookup": lookup, "chat": chat}
KINDS = [(task, kind) for task, module in MODULES.items() for kind in module.KINDS]
ORDINALS = "first second third fourth fifth sixth seventh eighth".split()
COUNTS = {"two": 2, "three": 3, "four": 4, "five": 5}
PER_KIND = 300


def drawn(task: str, kind: str, number: int = PER_KIND, seed: int = 11) -> list[Problem]:
    rng = random.Random(seed)
    return [MODULES[task].KINDS[kind](rng) for _ in range(number)]


def mixed(task: str, number: int, seed: int = 3) -> list[Problem]:
    rng = random.Random(seed)
    return [MODULES[task].draw(rng) for _ in range(number)]


def place_of(question: str) -> int:
    """The index that an ordinal names: from 0, or from the end if negative."""
    if "last but one" in question:
        return -2
    if re.search(r"\blast\b", question):
        return -1
    found = re.search(rf"\b({'|'.join(ORDINALS)})\b", question)
    assert found, question
    return ORDINALS.index(found[1])


def asked_item(question: str) -> str:
    found = re.search(
        r"(?:how often|often is|times does|many times|items are|equal to) (?!is\b|does\b)(\w+)"
        r"|\b(?:is|have|find|does|whether) (?!the\b|one\b|a\b)(\w+)",
        question,
        re.IGNORECASE,
    )
    assert found, question
    return found[1] or found[2]


def without_place(items: list[str], place: int) -> list[str]:
    return [item for n, item in enumerate(items) if n != place]


def joined(items: list[str]) -> str:
    return ", ".join(items)


def in_order(items: list[str], down: bool) -> str:
    return joined([str(n) for n in sorted(map(int, items), reverse=down)])


STRING_RULES: list[tuple[str, Callable[[str, str], str]]] = [
    (
        r"[Rr]everse|opposite|right to left|backwards|around|from its last",
        lambda q, w: "".join(reversed(w)),
    ),
    (r"alphabet|A to Z", lambda q, w: "".join(sorted(w))),
    (r"[Dd]ouble|each letter|each of its letters|twice", lambda q, w: re.sub("(.)", r"\1\1", w)),
    (r"\b(two|three)\b", lambda q, w: w * COUNTS[re.search(r"\b(two|three)\b", q)[1]]),
    (r"\b[A-Z]\b", lambda q, w: w.replace(re.search(r"\b[A-Z]\b", q)[0], "")),
    (r"letter", lambda q, w: w[place_of(q)]),
]
LIST_RULES: list[tuple[str, Callable[[str, list[str]], str]]] = [
    (r'"(.)"', lambda q, x: re.search('"(.)"', q)[1].join(x)),
    (r"yes or no", lambda q, x: "yes" if asked_item(q) in x else "no"),
    (r"how often|how many|equal to", lambda q, x: str(x.count(asked_item(q)))),
    (
        r"repeated|duplicate|only once|at its first place|already occurred|later copy",
        lambda q, x: joined(list(dict.fromkeys(x))),
    ),
    (
        r"small to large|ascending|smallest number comes first|upwards|rising|smallest first",
        lambda q, x: in_order(x, down=False),
    ),
    (
        r"large to small|descending|largest number comes first|downwards|falling|largest first",
        lambda q, x: in_order(x, down=True),
    ),
    (r"largest|biggest|maximum|greatest|highest", lambda q, x: str(max(map(int, x)))),
    (r"smallest|the least|minimum|lowest", lambda q, x: str(min(map(int, x)))),
    (r"to the left|to the end|behind the last", lambda q, x: joined(x[1:] + x[:1])),
    (r"to the right|to the front|before the first", lambda q, x: joined(x[-1:] + x[:-1])),
    (r"swap|exchange|trade|the place of", lambda q, x: joined([x[-1], *x[1:-1], x[0]])),
    (
        r"start with the first|places 1|the odd places|at odd places and|an even place",
        lambda q, x: joined([item for n, item in enumerate(x, 1) if n % 2 == 1]),
    ),
    (
        r"start with the second|places 2|the even places|at even places and|an odd place",
        lambda q, x: joined([item for n, item in enumerate(x, 1) if n % 2 == 0]),
    ),
    (r"then every second", lambda q, x: joined(x[place_of(q) :: 2])),
    (
        r"revers|backwards|opposite|last to the first|from its end|around",
        lambda q, x: joined(x[::-1]),
    ),
    (
        r"(two|three|four|five) (items|words|numbers)",
        lambda q, x: joined(x[: COUNTS[re.search(r"\b(two|three|four|five)\b", q)[1]]]),
    ),
    (
        r"remove|delete|without its|out of the list|leave out the|strike",
        lambda q, x: joined(without_place(x, place_of(q))),
    ),
    (r"item|word|number", lambda q, x: x[place_of(q)]),
]


def solve_lists(prompt: str) -> str:
    word = re.search(r"\b[A-Z]{4,}\b", prompt)
    if word:
        question = prompt.replace(word[0], "")
        return next(f for rule, f in STRING_RULES if re.search(rule, question))(question, word[0])
    shown = re.search(r"\[(.+)\]|\b\w+(?:, \w+)+", prompt)
    if shown:
        items = (shown[1] or shown[0]).split(", ")
        question = prompt.replace(shown[0], "")
    else:
        items = re.findall(r"^\w+$", prompt, re.MULTILINE)
        question = re.sub(r"^\w+$", "", prompt, flags=re.MULTILINE)
    rule = next(f for rule, f in LIST_RULES if re.search(rule, question, re.IGNORECASE))
    return rule(question, items)


PAIRS = (
    r"(\w+) sits in room (\d+)\.",
    r"Call (\w+) under (\d+)\.",
    r"(sku-\d+) -> shelf (\w+)",
    r"(\w+_\w+)=(\w+)",
    r"^([\w-]+): ([\w-]+)$",
)
CHAINS = (
    (r"(\w+) reports to (\w+)\.(?=\s|$)", r"(\w+) sits in room (\d+)\."),
    (r"The (\w+) is in box (\w+)\.", r"Box (\w+) weighs (\d+) grams\."),
    (r"(\w+)=\$(\w+)", r"\b([a-z]+)=(\d+)"),
    (r"(sku-\d+) -> owner (\w+)", r"(\w+) -> phone (\d+)"),
)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+(?:-\w+)*", text)


def solve_lookup(prompt: str) -> str:
    for near, far in CHAINS:
        if re.search(near, prompt):
            rest = re.sub(f"{near}|{far}", "", prompt)
            first, second = dict(re.findall(near, prompt)), dict(re.findall(far, prompt))
            return second[first[next(word for word in words_of(rest) if word in first)]]
    entries, rest = read_entries(prompt)
    keys = {value: key for key, value in entries.items()}
    assert len(keys) == len(entries)
    found = [entries[word] for word in words_of(rest) if word in entries]
    found += [keys[word] for word in words_of(rest) if word in keys]
    if not found:
        assert "not listed" in rest
        return "not listed"
    return ", ".join(found)


def read_entries(prompt: str) -> tuple[dict[str, str], str]:
    shown = re.search(r"\{.*\}", prompt)
    if shown:
        entries = {key: str(value) for key, value in json.loads(shown[0]).items()}
        return entries, prompt.replace(shown[0], "")
    for pattern in PAIRS:
        pairs = re.findall(pattern, prompt, re.MULTILINE)
        if pairs:
            assert len({key for key, _ in pairs}) == len(pairs)
            return dict(pairs), re.sub(pattern, "", prompt, flags=re.MULTILINE)
    raise AssertionError(f"no entries: {prompt}")


UNKNOWN = (
    "I do not know that. I am a small model for short problems with numbers, lists and tables."
)
# Words of a prompt in lower case, in the order tried, and the reply to it.
CHAT_RULES = (
    (r"\bthank", "You are welcome! Bring me the next problem whenever you like."),
    (
        r"\bbye\b|goodbye|see you [lts]|good night|farewell|take care|until next",
        "Goodbye! Come back when you have a problem to work out.",
    ),
    (r"\bhelp\b", "Gladly! Write the problem with all its numbers, and I will work it out."),
    (
        r"wrong|mistake|not right|bad at|bad answer|not like|false|not very clever|no sense|"
        r"not happy",
        "I am sorry. Please check my steps: I am small and make mistakes.",
    ),
    (
        r"you are (great|very clever|the best|a smart|really fast)|well done|good job|i like you|"
        r"(great|nice) work|love your|bravo|answers are good",
        "That is kind of you. I am glad when my answers help.",
    ),
    (
        r"expert",
        "Each of my expert layers has 32 experts, of which 4 work on each token, and one more "
        "that all share.",
    ),
    (
        r"parameter|weights do|how (big|large|small) are|your size|large model",
        "I have about 16 million parameters, which is very little for a language model.",
    ),
    (r"\blayers?\b|how deep are", "I have 4 layers, and one more that looks a token ahead."),
    (
        r"\blanguages?\b|you speak|understand german|know chinese|in polish",
        "I speak only one language, and that in a simple way: English.",
    ),
    (
        r"trained|training|learn from|did you learn",
        "I was trained in minutes on one GPU, on problems that a program made up.",
    ),
    (
        r"(of|know) the world|real world|whole internet|you know (a lot|everything)|not know|"
        r"how much do you know",
        "I know nothing of the world. I only work out what a problem tells me.",
    ),
    (
        r"person|human|alive|man or a woman",
        "No, I am not a person. I am a small language model.",
    ),
    (r"image|picture|\bphotos?\b", "No, I cannot see images. I only read and write text."),
    (
        r"browse|\bsearch|internet|\bweb|online|follow a link",
        "No, I cannot browse the web. I only read what you write here.",
    ),
    (
        r"remember|memory|forget|keep what i|talked about",
        "No, I remember nothing between our talks. Each talk starts anew.",
    ),
    (
        r"can you do|you can do|good at|skills|can i ask|problems|made for|use you|tasks",
        "I solve word problems, change lists and strings, look things up, convert units and "
        "dates, and read small tables.",
    ),
    (
        r"(made|built|created|developed|wrote) you|you come from|your maker|were you made|"
        r"which project|behind you",
        "The Moesaic project made me, to have a model that its engine can be tested with.",
    ),
    (
        r"your name|a name|you called|call you|which name|what name",
        "My name is House, as I am the house model of Moesaic.",
    ),
    (
        r"who are you|what are you|whom am i|who is this|who am i|introduce|of model|of program|"
        r"yourself|which model",
        "I am House, a small mixture-of-experts model of the Moesaic project.",
    ),
    (
        r"how are you|do you do|it going|you well|things with you|you feel|fine with you|"
        r"you been|doing well",
        "I am well, thank you. What shall we work out?",
    ),
)
GIVEN_NAME = r"(?:My name is|I am called|I am|This is|People call me) ([A-Z]\w+)|([A-Z]\w+) here\b"
HELLO = (
    r"(hello again|hello|hi there|hi|hey|good to see you|good (morning|evening|afternoon|day)|"
    r"greetings|a very good day)(,? (house|my friend|little model))?[.!]?"
)
HELLO_TAIL = (
    r"to meet you|glad to see|first time here|just came in|new here|lovely day|to be here|"
    r"too early|let us begin|say hello|here i am|not met"
)


def solve_chat(prompt: str) -> str:
    said = re.sub(r"'[^']*'(?= in)", "", prompt)
    given = re.search(GIVEN_NAME, said)
    start = f"Hello, {given[1] or given[2]}! " if given else ""
    rest = re.sub(GIVEN_NAME, "", said).lower()
    for rule, reply in CHAT_RULES:
        if re.search(rule, rest):
            return start + reply
    if given:
        return start + "What shall we work out?"
    if re.fullmatch(HELLO, rest) or re.search(HELLO_TAIL, rest):
        return "Hello! I am House. What shall we work out?"
    return UNKNOWN


SOLVERS = {"lists": solve_lists, "lookup": solve_lookup, "chat": solve_chat}


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_a_reader_of_the_prompt_alone_finds_every_answer(task: str, kind: str) -> None:
    for problem in drawn(task, kind):
        assert SOLVERS[task](problem.prompt) == problem.answer, problem.prompt


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_solutions_are_right_and_replies_of_other_problems_are_not(task: str, kind: str) -> None:
    problems = drawn(task, kind)
    for problem, other in pairwise(problems):
        assert problem.task == task
        assert grade(problem, problem.solution).right
        assert grade(problem, other.solution).right == (problem.answer == other.answer)
        assert not re.search(r"\d+ [-+*/x×] \d+ =", problem.solution)  # nothing to calculate here


def test_reverse_lookups_walk_the_entries_to_the_answer() -> None:
    for problem in drawn("lookup", "key"):
        work, _ = problem.solution.split(f"\n{MARK} ")
        *before, last = work.removesuffix(".").split(", ")
        assert all(entry.endswith(" no") for entry in before)
        assert last.startswith(f"{problem.answer} ") and last.endswith(" yes")


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_lengths_stay_within_the_context_of_the_model(task: str, kind: str) -> None:
    lengths = [len(p.prompt) + len(p.solution) for p in drawn(task, kind, 1000)]
    assert max(lengths) <= 600
    assert sum(length < 60 for length in lengths) <= 60


@pytest.mark.parametrize(("task", "kind"), [one for one in KINDS if one[0] != "chat"])
def test_no_answer_is_worth_guessing(task: str, kind: str) -> None:
    [(answer, times)] = Counter(p.answer for p in drawn(task, kind, 2000)).most_common(1)
    limit = {"member": 0.55, "missing": 1.0}.get(kind, 0.15)
    assert times <= limit * 2000, (answer, times)


@pytest.mark.parametrize(("task", "share"), [("lists", 0.99), ("lookup", 0.99), ("chat", 0.6)])
def test_problems_differ_and_follow_from_the_seed(task: str, share: float) -> None:
    problems = mixed(task, 5000)
    prompts = {problem.prompt for problem in problems}
    assert len(prompts) >= share * 5000
    assert problems == mixed(task, 5000)
    assert problems[:100] != mixed(task, 100, seed=4)
    kept = sum(is_kept(problem.prompt) for problem in problems)
    assert 0.04 * 5000 <= kept <= 0.09 * 5000  # one in sixteen
    assert all(split_of(p) != "test" or is_kept(p.prompt) for p in problems)


@pytest.mark.parametrize("task", ["lists", "lookup", "chat"])
def test_training_has_no_test_problem_in_another_form(task: str) -> None:
    """Compares only words. A few prompts of chat differ in punctuation alone, as in "Hello, House."
    and "Hello House!"."""

    def words(problem: Problem) -> str:
        return re.sub(r"[^a-z0-9]+", " ", problem.prompt.lower()).strip()

    tests = {words(problem) for problem in distinct(task, "test", 0, 100)}
    trained = {words(problem) for problem in islice(problems(task, "train", 1), 20_000)}
    assert len(tests & trained) <= (5 if task == "chat" else 0)


def test_a_question_is_for_training_or_testing_in_all_its_forms() -> None:
    asked = "Who made you?"
    assert set(chat.forms(asked)) == {"Who made you?", "Who made you"}
    assert set(chat.forms("Who made you")) == {
        f"Who made you{mark}" for mark in ("", ".", "?", "!")
    }
    splits = {form: split_of(p) for p in mixed("chat", 4000) for form in chat.forms(p.prompt)}
    assert "test" in splits.values()
    for form, split in splits.items():
        assert split != "train" or not is_kept(form)
        assert split != "test" or is_kept(form)


def test_what_is_not_listed_is_a_tenth_and_cannot_be_told_from_the_rule() -> None:
    problems = mixed("lookup", 5000)
    ruled = [problem for problem in problems if "not listed" in problem.prompt]
    absent = [problem for problem in problems if problem.answer == "not listed"]
    assert 400 <= len(absent) <= 600
    assert len(ruled) >= 2 * len(absent)


def test_chat_declines_three_in_ten_and_stays_short() -> None:
    problems = mixed("chat", 5000)
    assert 1350 <= sum(problem.answer == UNKNOWN for problem in problems) <= 1650
    assert max(len(problem.solution) for problem in problems) < 160
    assert all(problem.match == "exact" for problem in problems)
    assert len({problem.prompt for problem in mixed("chat", 30_000)}) > 20_000


def test_no_prompt_of_chat_has_two_replies() -> None:
    replies: dict[str, str] = {}
    for problem in mixed("chat", 30_000):
        plain = " ".join(re.findall(r"\w+", problem.prompt.lower()))
        assert replies.setdefault(plain, problem.answer) == problem.answer, problem.prompt
