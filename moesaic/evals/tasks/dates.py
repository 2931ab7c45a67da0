"""Clock times, weekdays, dates and years: the unit problems about time."""

from __future__ import annotations

import random
from typing import Final

from moesaic.evals.tasks.common import Draw, pick, pick_two, randint, solved
from moesaic.evals.tasks.problem import Problem
from moesaic.evals.tasks.wordings import read_wordings

TOWNS: Final = tuple(  # invented: real ones have time zones
    "Ashby Barton Colby Denham Elton Farley Garston Hatton Ilby Kelby Linton Marley Norby Oakham "
    "Prestby Quorn Ripley Selby Thornby Upton Velden Walby Yarby Zelby Brent Croft Drayton "
    "Hartley Milby Weston".split()
)
WEEKDAYS: Final = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
MONTH_NAMES: Final = (
    "January February March April May June July August September October November December".split()
)
MONTH_DAYS: Final = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
MONTHS: Final = tuple(zip(MONTH_NAMES, MONTH_DAYS, strict=True))
FEBRUARY: Final = 1
EVENTS: Final = tuple(
    "fair concert match parade wedding meeting race trial show market lecture picnic".split()
)
RIDES: Final = tuple("train bus ferry plane coach tram boat truck".split())
PLACES: Final = tuple("bridge tower school mill museum station harbour library dam castle".split())
ASKS: Final = read_wordings("""
    arrive: A {ride} leaves {town} at {t} and needs {d} to {other}. When does it arrive? (like 9:05)
    | At {t} a {ride} starts in {town}. {other} is {d} away. Give the time of arrival as h:mm.
    | What time is it {d} after {t}, when the {ride} from {town} to {other} left? Write h:mm.
    | The {ride} from {town} to {other} takes {d}. It leaves at {t}. Arrival time as h:mm?
    | Departure {town} {t}, {ride} to {other}, travel time {d}. At what time (h:mm) is it there?
    | Somebody takes the {ride} in {town} at {t} and rides {d}. What time (h:mm) is it in {other}?
    between: A {ride} leaves {town} at {s} and is in {other} at {t}. How many minutes does it take?
    | How many minutes pass from {s} to {t}, the times of the {ride} from {town} to {other}?
    | The {ride} from {town} starts at {s} and reaches {other} at {t}. Travel time in minutes?
    | Departure {town} {s}, arrival {other} {t}, by {ride}. Give the travel time in minutes.
    | At {s} the {ride} starts in {town}, at {t} it stops in {other}. How many minutes is that?
    | Find the minutes between {s} in {town} and {t} in {other} on the same {ride}.
    after: The {event} in {town} begins on a {day}. What day of the week is it {n} days later?
    | Today is {day}. The {event} of {town} is in {n} days. On which weekday is that?
    | What weekday comes {n} days after the {event} of {town}, which was on a {day}?
    | {town} had its {event} on a {day}. Name the weekday {n} days after it.
    | If the {event} in {town} is on a {day}, which weekday follows {n} days after that?
    | {n} days after a {day} there is a {event} in {town}. Which day of the week is it?
    before: The {event} in {town} is on a {day}. What day of the week is it {n} days earlier?
    | Today is {day}. The {event} of {town} was {n} days ago. On which weekday was that?
    | What weekday comes {n} days before the {event} of {town}, which is on a {day}?
    | {town} has its {event} on a {day}. Name the weekday {n} days before it.
    | If the {event} in {town} is on a {day}, which weekday lies {n} days before that?
    | {n} days before a {day} there was a {event} in {town}. Which day of the week was it?
    later: The {event} in {town} starts on {d}. Which date is {n} later? (like 6 April)
    | Which date is {n} after {d}, the day of the {event} in {town}? Give day and month.
    | From {d} it is {n} until the {event} of {town}. On which date (day and month) is it?
    | The {event} of {town} was planned for {d} but comes {n} later. Name the new date.
    | Count {n} on from {d}, when {town} had its {event}. Name the date (day and month).
    | {town} holds its {event} {n} after {d}. On which day and month is that?
    earlier: The {event} in {town} ends on {d}. Which date was {n} earlier? (like 6 April)
    | Which date is {n} before {d}, the day of the {event} in {town}? Give day and month.
    | Tickets for the {event} of {town} on {d} were sold out {n} before. On which date?
    | Today is {d}. The {event} of {town} was {n} ago. Name its date (day and month).
    | Count {n} back from {d}, when {town} had its {event}. Name the date (day and month).
    | {town} held its {event} {n} before {d}. On which day and month was that?
    years: The {place} of {town} opened in {a}. How many years old is it in {b}?
    | How many years lie between {a} and {b}, when the {place} of {town} was built and rebuilt?
    | From {a} to {b} the {place} in {town} was in use. For how many years is that?
    | {town} got a {place} in {a} and lost it in {b}. How many years did it stand?
    | Built {a}, closed {b}: for how many years did {town} have its {place}?
    | In {b} the {place} of {town}, begun in {a}, is finished. How many years did it take?
    year: The {place} of {town} opened in {a} and closed {n} years later. In which year was that?
    | In {a} {town} plans to renew its {place} in {n} years. Which year will it be then?
    | Which year is {n} years after {a}, when the {place} of {town} was built?
    | {town} built a {place} in {a} and used it for {n} years. In which year did that end?
    | Begun in {a}, the {place} of {town} took {n} years. Name the year of its end.
    | Add {n} years to {a}, the year of the {place} in {town}: which year is it?
""")


def _ask_event(rng: random.Random, kind: str, **fields: str) -> str:
    wording = pick(rng, ASKS[kind])
    return wording.format(event=pick(rng, EVENTS), town=pick(rng, TOWNS), **fields)


def _add_minutes(hour: int, minute: int, minutes: int) -> tuple[int, int, str]:
    """The time `minutes` later, and the steps through full hours."""
    if minute + minutes < 60:
        end = minute + minutes
        return hour, end, f"{minute} + {minutes} = {end}, so it is {hour}:{end:02}."
    gap = 60 - minute
    rest = minutes - gap
    work = f"To {hour + 1}:00 it is 60 - {minute} = {gap} minutes. {minutes} - {gap} = {rest}."
    hour += 1
    while rest >= 60:
        work += f" {rest} - 60 = {rest - 60}, {hour + 1}:00."
        hour, rest = hour + 1, rest - 60
    return hour, rest, f"{work} {hour}:00 + {rest} minutes = {hour}:{rest:02}."


def _arrive(rng: random.Random) -> Problem:
    hour, minute = randint(rng, 5, 19), randint(rng, 1, 59)
    town, other = pick_two(rng, TOWNS)
    hours = randint(rng, 1, 2) if rng.random() < 0.4 else 0
    minutes = randint(rng, 5, 55) if hours else randint(rng, 5, 150)
    length, work, at = f"{minutes} minutes", "", hour
    if hours:
        name = "hour" if hours == 1 else "hours"
        length = f"{hours} {name} {minutes} minutes"
        at = hour + hours
        work = f"{hour}:{minute:02} + {hours} {name} = {at}:{minute:02}. "
    at, end, steps = _add_minutes(at, minute, minutes)
    prompt = pick(rng, ASKS["arrive"]).format(
        ride=pick(rng, RIDES), town=town, other=other, t=f"{hour}:{minute:02}", d=length
    )
    return solved("units", prompt, f"{at}:{end:02}", work + steps)


def _between(rng: random.Random) -> Problem:
    """The minutes between two times of a day, counted from hour to hour."""
    hour, minute = randint(rng, 5, 19), randint(rng, 1, 59)
    hours, last = randint(rng, 1, 4), randint(rng, 1, 59)
    town, other = pick_two(rng, TOWNS)
    start, end = f"{hour}:{minute:02}", f"{hour + hours}:{last:02}"
    prompt = pick(rng, ASKS["between"]).format(
        ride=pick(rng, RIDES), town=town, other=other, s=start, t=end
    )
    total = 60 - minute
    work = f"To {hour + 1}:00 it is 60 - {minute} = {total} minutes."
    for at in range(hour + 1, hour + hours):
        work += f" To {at + 1}:00 it is {total} + 60 = {total + 60} minutes."
        total += 60
    work += f" To {end} it is {total} + {last} = {total + last} minutes."
    return solved("units", prompt, f"{total + last} minutes", work)


def _weekday(rng: random.Random) -> Problem:
    n, start = randint(rng, 8, 90), randint(rng, 0, 6)
    sign, kind = ("+", "after") if rng.random() < 0.6 else ("-", "before")
    weeks, rest = divmod(n, 7)
    end = WEEKDAYS[(start + rest if sign == "+" else start - rest) % 7]
    day = WEEKDAYS[start]
    prompt = _ask_event(rng, kind, day=day, n=str(n))
    days = "day" if rest == 1 else "days"
    work = f"{n} = {weeks} * 7 + {rest}. {day} {sign} {rest} {days} = {end}."
    return solved("units", prompt, end, work)


def _span(rng: random.Random) -> tuple[int, str, str]:
    """A number of days, how the text says it, and the step that gives it."""
    if rng.random() < 0.25:
        weeks = randint(rng, 2, 4)
        return weeks * 7, f"{weeks} weeks", f"{weeks} * 7 = {weeks * 7} days. "
    days = randint(rng, 2, 28)
    return days, f"{days} days", ""


def _later_date(rng: random.Random) -> Problem:
    """A date some days later; it never crosses the end of February, which may vary."""
    number, text, work = _span(rng)
    month = randint(rng, 0, 11)
    name, length = MONTHS[month]
    day = randint(rng, 1, length)
    if month == FEBRUARY and day + number > length:
        return _later_date(rng)
    if day + number <= length:
        answer = f"{day + number} {name}"
        work += f"{day} + {number} = {day + number}. {name} has {length} days, so it is {answer}."
        if month == FEBRUARY:
            work = work.partition(f" {name} has")[0] + f" It is {answer}."
    else:
        left = length - day
        answer = f"{number - left} {MONTHS[(month + 1) % 12][0]}"
        work += f"{name} has {length} days. {length} - {day} = {left}. {number} - {left} = "
        work += f"{number - left}, so it is {answer}."
    prompt = _ask_event(rng, "later", d=f"{day} {name}", n=text)
    return solved("units", prompt, answer, work)


def _earlier_date(rng: random.Random) -> Problem:
    """A date some days earlier; it never crosses the end of February."""
    number, text, work = _span(rng)
    month = randint(rng, 0, 11)
    name, length = MONTHS[month]
    day = randint(rng, 1, length)
    before, days = MONTHS[month - 1]
    if day > number:
        answer = f"{day - number} {name}"
        work += f"{day} - {number} = {day - number}, so it is {answer}."
    elif month - 1 == FEBRUARY:
        return _earlier_date(rng)
    else:
        back = number - day
        answer = f"{days - back} {before}"
        work += f"{number} - {day} = {back}. {before} has {days} days. {days} - {back} = "
        work += f"{days - back}, so it is {answer}."
    prompt = _ask_event(rng, "earlier", d=f"{day} {name}", n=text)
    return solved("units", prompt, answer, work)


def _years(rng: random.Random) -> Problem:
    a, n = randint(rng, 1780, 2030), randint(rng, 2, 150)
    b = a + n
    place, town = pick(rng, PLACES), pick(rng, TOWNS)
    if rng.random() < 0.6:
        prompt = pick(rng, ASKS["years"]).format(place=place, town=town, a=a, b=b)
        return solved("units", prompt, f"{n} years", f"{b} - {a} = {n}.")
    prompt = pick(rng, ASKS["year"]).format(place=place, town=town, a=a, n=n)
    return solved("units", prompt, str(b), f"{a} + {n} = {b}.")


KINDS: Final[dict[str, Draw]] = {
    "arrive": _arrive,
    "between": _between,
    "weekday": _weekday,
    "later": _later_date,
    "earlier": _earlier_date,
    "years": _years,
}
