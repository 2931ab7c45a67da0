"""Word, unit and table problems: solvers find the answers from the text alone, by other means than
the generators."""

import random
import re
from collections import Counter
from datetime import date, timedelta
from fractions import Fraction

import pytest

from moesaic.evals.tasks import tables, units, words
from moesaic.evals.tasks.draw import split_of
from moesaic.evals.tasks.problem import Problem, grade

MODULES = {"words": words, "units": units, "tables": tables}
ALL = [(task, kind) for task, module in MODULES.items() for kind in module.KINDS]


def drawn(task: str, kind: str, number: int, seed: int = 1) -> list[Problem]:
    rng = random.Random(f"{task} {kind} {seed}")
    return [MODULES[task].KINDS[kind](rng) for _ in range(number)]


# ------------------------------------------------------------------ words

ASIDE = re.compile(
    r"long street|degrees|shop window|song number|It is day|A sign says|in grade|has known|"
    r"shoe size|a film of|lives on floor"
)
PRODUCT = re.compile(r"\beach\b|\ban hour|\ba day|\ba week|\d+ \w+ of \d+", re.IGNORECASE)
LOSS = re.compile(
    r"gives|lends|broken|loses|swaps|sells (?!\d+ toys)|[Gg]uests eat|Birds eat|burns|rotten|"
    r"\buses\b|spends|pays (?:\$|for)|buys a book for|tickets|get off|leave\.|out of the|out\.|"
    r"run away|A trap costs|finishes"
)
ENDS = (
    (
        r"shares all|then divides|equal|packs all|into bags|A box holds|spends all of it on|"
        r"in taxis|in rows of|Every \d+ points|From then on",
        lambda x, a: Fraction(x, a),
    ),
    (r"sells all|then sold|now on board pays|Each of them eats", lambda x, a: x * a),
    (
        r"wants to have|as many as|needs \d+ .* in all|A bike costs|that costs|whole way is|"
        r"away from the start|seats for|For a feast|To win|people come\.|to seat|pays with|"
        r"had \$\d+ before|purse held|in the barn|brings \d+ kg",
        lambda x, a: a - x,
    ),
    (
        r"ahead of|now has more|more \w+ than \w+ does|does \w+ win|Only \d+|next door|"
        r"(?:km|pages) more than",
        lambda x, a: x - a,
    ),
    (
        r"do \w+ and \w+ have together|the two have|total number of|does the team",
        lambda x, a: x + a,
    ),
)
RELATIONS = (
    (r"(\w+) is (\d+) years older than (\w+)\.", lambda x, a: x + a),
    (r"(\w+) was born (\d+) years before (\w+)\.", lambda x, a: x + a),
    (r"(\w+) has (\d+) (?:more \w+|\w+ more) than (\w+)\.", lambda x, a: x + a),
    (r"(\w+) is (\d+) years younger than (\w+)\.", lambda x, a: x - a),
    (r"(\w+) was born (\d+) years after (\w+)\.", lambda x, a: x - a),
    (r"(\w+) has (\d+) (?:fewer \w+|\w+ fewer) than (\w+)\.", lambda x, a: x - a),
    (r"(\w+) (?:is|has) (\d+) times as (?:old|many \w+) as (\w+)\.", lambda x, a: x * a),
)


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def amount(sentence: str) -> int:
    found = numbers(sentence)
    if len(found) == 1:
        return found[0]
    a, b = found
    is_sum = " and " in sentence and not PRODUCT.search(sentence)
    return a + b if is_sum else a * b


def sentences_of(prompt: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.?]) ", prompt) if not ASIDE.search(part)]


def solve_story(prompt: str) -> int:
    *facts, question = sentences_of(prompt)
    facts = [fact for fact in facts if not re.fullmatch(r"\w+ is \d+ years old\.", fact)]
    if "first" in question and "second" in question:
        first, second = map(amount, facts)
        return first - second
    end = None
    if re.fullmatch(r"\w+ now has more\.", facts[-1]):
        question = f"{facts.pop()} {question}"
    for pattern, rule in ENDS:
        if re.search(pattern, f"{facts[-1]} {question}"):
            end = (rule, facts.pop())
            break
    quantity = amount(facts[0])
    for fact in facts[1:]:
        quantity += -amount(fact) if LOSS.search(fact) else amount(fact)
    if end is not None:
        (number,) = numbers(end[1])
        quantity = end[0](quantity, number)
    assert quantity == int(quantity), prompt
    return int(quantity)


def solve_chain(prompt: str) -> int:
    first, *facts, question = sentences_of(prompt)
    name = next(word for word in re.findall(r"[A-Z]\w+", first) if word not in ("The", "There"))
    values = {name: numbers(first)[0]}
    for fact in facts:
        for pattern, rule in RELATIONS:
            if match := re.fullmatch(pattern, fact):
                values[match[1]] = rule(values[match[3]], int(match[2]))
    asked = [values[word] for word in re.findall(r"\w+", question) if word in values]
    if len(asked) == 1:
        return asked[0]
    a, b = asked
    return a + b if re.search(r"together|sum|Add|total|in all", question) else abs(a - b)


def solve_words(kind: str, prompt: str) -> str:
    return str((solve_chain if kind in ("ages", "owners") else solve_story)(prompt))


# ------------------------------------------------------------------ units

SIZES = {
    "km": 10**6,
    "m": 1000,
    "cm": 10,
    "mm": 1,
    "kg": 1000,
    "g": 1,
    "litres": 1000,
    "ml": 1,
    "weeks": 604800,
    "days": 86400,
    "hours": 3600,
    "hour": 3600,
    "minutes": 60,
    "seconds": 1,
}
UNIT = "|".join(sorted(SIZES, key=len, reverse=True))
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)


def quantities(prompt: str) -> list[tuple[int, str]]:
    without_example = re.sub(r", like [^.]*\.", ".", prompt)
    return [(int(n), unit) for n, unit in re.findall(rf"(\d+) ({UNIT})\b", without_example)]


def base(measure: tuple[int, str]) -> int:
    return measure[0] * SIZES[measure[1]]


def wanted(prompt: str) -> str:
    """The unit that the question asks for: the one without a number before it."""
    (unit,) = set(re.findall(rf"(?<!\d )\b({UNIT})\b", prompt))
    return unit


def solve_conversion(kind: str, prompt: str) -> str:
    found = quantities(prompt)
    if kind == "compare":
        return "{} {}".format(*max(found, key=base))
    if kind == "unmixed":
        ((total, small),) = found
        (big,) = set(re.findall(rf"\b({UNIT})\b", prompt)) - {small}
        whole, rest = divmod(total * SIZES[small], SIZES[big])
        return f"{whole} {big} {rest // SIZES[small]} {small}"
    sizes = [base(measure) for measure in found]
    total = Fraction(abs(sizes[0] - sizes[1]) if kind == "gap" else sum(sizes))
    unit = wanted(prompt)
    return f"{total / SIZES[unit]} {unit}"


def solve_dozens(prompt: str) -> str:
    dozen, more = numbers(prompt)
    (things,) = set(
        re.findall(r"eggs|cups|roses|spoons|candles|bottles|bulbs|plates|forks", prompt)
    )
    return f"{12 * dozen + more} {things}"


def solve_clock(kind: str, prompt: str) -> str:
    prompt = prompt.replace("(like 9:05)", "")
    times = [int(h) * 60 + int(m) for h, m in re.findall(r"(\d+):(\d\d)", prompt)]
    if kind == "between":
        return f"{times[1] - times[0]} minutes"
    end = times[0] + sum(base(measure) for measure in quantities(prompt)) // 60
    return f"{end // 60}:{end % 60:02}"


def solve_weekday(prompt: str) -> str:
    (day,) = [word for word in re.findall(r"\w+", prompt) if word in DAYS]
    (number,) = numbers(prompt)
    monday = date(2024, 1, 1)
    back = re.search(r"earlier|ago|before", prompt)
    moved = monday + timedelta(DAYS.index(day) - number if back else DAYS.index(day) + number)
    return DAYS[moved.weekday()]


def solve_date(kind: str, prompt: str) -> str:
    """Solves it in a common and in a leap year, which must agree."""
    prompt = prompt.replace("(like 6 April)", "")
    ((day, month),) = re.findall(rf"(\d+) ({'|'.join(MONTHS)})", prompt)
    (span,) = quantities(prompt)
    shift = timedelta(seconds=base(span)) * (-1 if kind == "earlier" else 1)
    ends = [date(year, MONTHS.index(month) + 1, int(day)) + shift for year in (2023, 2024)]
    (answer,) = {f"{end.day} {MONTHS[end.month - 1]}" for end in ends}
    return answer


def solve_years(prompt: str) -> str:
    found = numbers(prompt)
    if min(found) > 1000:
        return f"{max(found) - min(found)} years"
    return str(sum(found))


def solve_units(kind: str, prompt: str) -> str:
    if kind in ("arrive", "between"):
        return solve_clock(kind, prompt)
    if kind in ("later", "earlier"):
        return solve_date(kind, prompt)
    single = {"dozens": solve_dozens, "weekday": solve_weekday, "years": solve_years}
    return single[kind](prompt) if kind in single else solve_conversion(kind, prompt)


# ------------------------------------------------------------------ tables

CALLED = {"number sold": "Sold", "number per row": "Per row", "ore per mine": "Ore"}


def parse(prompt: str) -> tuple[dict[str, dict[str, str]], str]:
    """The table as {row: {column: cell}}, and the question."""
    lines = prompt.split("\n")
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if "|" in line]
    heads, rule, *rows = cells
    assert set("".join(rule)) == {"-"} and all(len(row) == len(heads) for row in rows)
    (question,) = [line for line in lines if line and "|" not in line]
    return {row[0]: dict(zip(heads, row, strict=True)) for row in rows}, question


def heads_in(question: str, heads: list[str]) -> list[str]:
    """The columns that a question names, as it calls them."""
    for called, head in CALLED.items():
        question = question.replace(called, head)
    question = question.lower()
    found = {head: re.search(rf"\b{head.lower()}\b", question) for head in heads}
    return [head for head in heads if found[head]]


def solve_tables(kind: str, prompt: str) -> str:
    table, question = parse(prompt)
    _, *heads = next(iter(table.values()))
    named = [name for name in re.findall(r"\w+", question) if name in table]
    if kind in ("above", "category"):
        head, sign, limit = re.search(r"(\w+) (above|below|=) (\w+)", question).groups()
        tests = {
            "above": lambda cell: int(cell) > int(limit),
            "below": lambda cell: int(cell) < int(limit),
            "=": lambda cell: cell == limit,
        }
        found = [name for name, row in table.items() if tests[sign](row[head])]
        return ", ".join(found) if "comma" in question else str(len(found))
    asked = heads_in(question, heads)
    if kind == "product":
        p, q = asked
        return str(int(table[named[0]][p]) * int(table[named[0]][q]))
    (head,) = asked
    if kind == "cell":
        return table[named[0]][head]
    if kind == "difference":
        a, b = {int(table[name][head]) for name in named}
        return str(abs(a - b))
    column = {name: int(row[head]) for name, row in table.items()}
    if kind == "total":
        return str(sum(column.values()))
    best = (max if "largest" in question else min)(column.values())
    (answer,) = [name for name, value in column.items() if value == best]
    return answer


SOLVERS = {"words": solve_words, "units": solve_units, "tables": solve_tables}

# ------------------------------------------------------------------ laws


@pytest.mark.parametrize(("task", "kind"), ALL)
def test_a_reader_of_the_text_gets_the_answer(task: str, kind: str):
    for problem in drawn(task, kind, 300):
        assert SOLVERS[task](kind, problem.prompt) == problem.answer, problem.prompt
        assert problem.task == task
        assert grade(problem, problem.solution).right
        assert not grade(problem, problem.solution.replace("#### ", "#### 7")).right


STEP = re.compile(r"(?<![\d:])(\d+) ([-+*/]) (\d+) = (\d+)\b(?!:)")
APPLY = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: Fraction(a, b),
}
FACTORS = {*range(2, 13), 24, 60, 100, 1000}


def check_step(task: str, a: int, sign: str, b: int, c: int) -> None:
    assert APPLY[sign](a, b) == c
    assert 0 <= c < (10_000 if task == "units" else 1000)
    if sign == "*":
        assert {a, b} & (FACTORS if task == "units" else set(range(2, 13)))
    if sign == "/":
        assert b in FACTORS if task == "units" else (b in range(2, 13) and c < 100)


@pytest.mark.parametrize(("task", "kind"), ALL)
def test_every_step_is_true_and_small(task: str, kind: str):
    for problem in drawn(task, kind, 300, seed=2):
        steps = STEP.findall(problem.solution)
        for a, sign, b, c in steps:
            check_step(task, int(a), sign, int(b), int(c))
        for n, weeks, rest in re.findall(r"(\d+) = (\d+) \* 7 \+ (\d+)", problem.solution):
            assert divmod(int(n), 7) == (int(weeks), int(rest))
        # Nothing that looks like a calculation escapes the checks above.
        odd = re.findall(r"\d [-+*/] \d+ = ", problem.solution)
        assert len(odd) == len(steps)
        if task == "words":
            assert 2 <= len(steps) <= 4 and steps[-1][3] == problem.answer


def test_word_problems_have_two_to_four_steps_in_the_right_shares():
    rng = random.Random(3)
    some = [words.draw(rng) for _ in range(4000)]
    steps = Counter(len(STEP.findall(problem.solution)) for problem in some)
    assert steps.keys() == {2, 3, 4}
    assert [round(steps[n] / 4000, 1) for n in (2, 3, 4)] == [0.4, 0.4, 0.2]
    asides = [
        problem
        for problem in some
        if ASIDE.search(problem.prompt) or re.search(r"\. \w+ is \d+ years old\.", problem.prompt)
    ]
    assert 0.36 < len(asides) / 4000 < 0.44


@pytest.mark.parametrize(("task", "kind"), ALL)
def test_problems_are_many_of_the_right_size_and_differ(task: str, kind: str):
    some = drawn(task, kind, 5000, seed=4)
    assert len({problem.prompt for problem in some}) >= 4950
    sizes = [len(problem.prompt) + len(problem.solution) for problem in some]
    assert max(sizes) <= 700
    assert sum(60 <= size <= 500 for size in sizes) >= 4950
    (_, most) = Counter(problem.answer for problem in some).most_common(1)[0]
    assert most <= 750
    share = sum(split_of(problem) == "test" for problem in some) / 5000
    assert 0.04 < share < 0.09  # one in sixteen


@pytest.mark.parametrize("task", MODULES)
def test_a_seed_gives_the_same_problems_again(task: str):
    def draws(seed: int) -> list[Problem]:
        rng = random.Random(seed)
        return [MODULES[task].draw(rng) for _ in range(200)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


def test_the_row_of_an_extreme_is_walked_to() -> None:
    for number in range(300):
        problem = tables.KINDS["extreme"](random.Random(f"walk {number}"))
        work, answer = problem.solution.split("\n#### ")
        *before, last = work.removesuffix(".").split(". ")[-1].split(", ")
        value = work.split(" is ")[1].split(".")[0]
        assert all(entry.endswith(" no") for entry in before)
        assert last == f"{answer} {value} yes"
