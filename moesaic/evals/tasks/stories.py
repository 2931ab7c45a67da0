"""Themes of the word problems: starts, events and questions that combine freely.

In the texts N is the main person, S the same person at the head of a sentence (maybe "He"), O
another person and T the things; A and B are the numbers of the text, C = A * B; X is the quantity
before a step and Y the quantity after it. A part has the name of its rule in `words.RULES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moesaic.evals.tasks.wordings import Part, read_parts

BOYS: Final = tuple(
    "Tom Ben Max Leo Sam Paul Omar Luis Ivan Finn Noah Hugo Karl Amir Jack Yuri Dan Peter".split()
)
GIRLS: Final = tuple(
    "Ann Mia Zoe Eva Lily Nina Rosa Ella Ida Sara Maya Lucy Vera Jane Aisha Kim Clara Olga".split()
)


@dataclass(frozen=True, slots=True)
class Theme:
    things: tuple[str, ...]
    starts: tuple[Part, ...]
    events: tuple[Part, ...]
    ends: tuple[Part, ...]


SHARED: Final = {
    "has": read_parts("""
    set: {N} has {A} {T}.
    | {N} starts the day with {A} {T}.
    | There are {A} {T} on {N}'s table.
    | In the morning {N} has {A} {T}.
    set_times: {N} has {A} boxes with {B} {T} each.
    | {N} has {A} bags of {B} {T}.
    | There are {A} trays on {N}'s table, each with {B} {T}.
    = {N} has {A} * {B} = {Y} {T}.
    set_sum: {N} has {A} small {T} and {B} large {T}.
    | On {N}'s table there are {A} old {T} and {B} new ones.
    | {N} has {A} {T} in one bag and {B} {T} in another.
    = {N} has {A} + {B} = {Y} {T}.
    """),
    "ask": read_parts("""
    ask: How many {T} does {N} have now?
    | How many {T} does {N} have in the end?
    | Find the number of {T} that {N} has now.
    | What is the number of {T} {N} has at the end?
    | In the end, how many {T} are there?
    | Work out how many {T} there are now.
    """),
    "split": read_parts("""
    split: {S} shares all {T} equally among {A} friends. How many {T} does each friend get?
    | {S} then divides the {T} equally between {A} children. How many {T} are there for each?
    | All of them go to {A} neighbours in equal parts. How many {T} does each neighbour get?
    = Each gets {X} / {A} = {Y} {T}.
    """),
    "pack": read_parts("""
    split: {S} packs all {T} into boxes of {A}. How many boxes are full?
    | {S} puts all of them into bags, {A} in each bag. How many bags does {N} need?
    | A box holds {A} {T}. How many boxes does {N} need for all of them?
    = {N} needs {X} / {A} = {Y}.
    """),
    "above": read_parts("""
    above: {O} has {A} {T}. How many more {T} than {O} does {N} have now?
    | {O} has only {A} {T}. By how many {T} is {N} ahead of {O}?
    | {O} has {A} {T}. {N} now has more. How many more {T} does {N} have?
    = {N} has {X} - {A} = {Y} more.
    """),
    "below": read_parts("""
    below: {N} wants to have {A} {T}. How many {T} are still missing?
    | {O} has {A} {T}. How many more {T} does {N} need to have as many as {O}?
    | {S} needs {A} {T} in all. How many more must {N} get?
    = {N} still needs {A} - {X} = {Y} {T}.
    """),
    "join": read_parts("""
    join: {O} has {A} {T}. How many {T} do {N} and {O} have together now?
    | {O} comes with {A} {T}. How many {T} do the two have in total?
    | {O} also has {A} {T}. What is the total number of {T} of {N} and {O} now?
    = Together they have {X} + {A} = {Y} {T}.
    """),
    "price": read_parts("""
    price: {S} sells all of them for ${A} each. How many dollars does {N} get?
    | Each of them is then sold for ${A}. How many dollars is that in all?
    | {S} sells all {T} at a price of ${A} each. How much money in dollars does {N} take in?
    = {N} gets {X} * {A} = {Y} dollars.
    """),
}


def _theme(text: str) -> Theme:
    """A theme from its things, the names of shared parts if there are any, and its own parts."""
    head, *parts = read_parts(text)
    things, *shared = head.texts
    parts += [part for name in shared for part in SHARED[name]]
    starts = [part for part in parts if part.name.startswith("set")]
    events = [part for part in parts if part.name.startswith(("add", "take"))]
    ends = [part for part in parts if part not in starts + events]
    return Theme(tuple(things.split()), tuple(starts), tuple(events), tuple(ends))


THEMES: Final[dict[str, Theme]] = {
    "collection": _theme("""
    things: stickers marbles stamps cards shells coins pens beads buttons badges comics
    | has | ask | split | pack | above | below | join
    add: {S} buys {A} more {T}.
    | {S} finds {A} {T} in the attic.
    | {S} wins {A} {T} in a game.
    | {S} gets {A} {T} from an uncle.
    = Now {N} has {X} + {A} = {Y} {T}.
    take: {S} gives {A} {T} to a cousin.
    | {S} loses {A} {T} on the way to school.
    | {S} swaps {A} {T} for a whistle.
    = Now {N} has {X} - {A} = {Y} {T}.
    add_times: {S} buys {A} packs of {B} {T}.
    | {S} gets {A} packets with {B} {T} each.
    | Each of {A} friends brings {B} {T} and {N} receives all of them.
    = {N} gets {A} * {B} = {C} {T}. Now {N} has {X} + {C} = {Y} {T}.
    take_times: {S} gives {A} cousins {B} {T} each.
    | {S} loses {A} games and with each game {B} {T}.
    = {N} loses {A} * {B} = {C} {T}. Now {N} has {X} - {C} = {Y} {T}.
    """),
    "bakery": _theme("""
    things: rolls muffins cookies buns pies tarts pancakes waffles bagels
    | has | ask | pack | below | price
    add: {S} bakes {A} more {T}.
    | {S} makes {A} fresh {T}.
    | The oven yields {A} {T} more.
    = With the new ones there are {X} + {A} = {Y} {T}.
    take: {S} sells {A} {T} before noon.
    | Hungry guests eat {A} {T}.
    | {S} burns {A} {T} and throws them away.
    = That leaves {X} - {A} = {Y} {T}.
    add_times: {S} bakes {A} trays of {B} {T}.
    | {S} fills the oven {A} times and bakes {B} {T} each time.
    = {N} bakes {A} * {B} = {C} {T}. With them there are {X} + {C} = {Y} {T}.
    take_times: {S} sells {A} bags of {B} {T}.
    | At each of {A} tables guests eat {B} {T}.
    = {A} * {B} = {C} {T} are gone. That leaves {X} - {C} = {Y} {T}.
    """),
    "harvest": _theme("""
    things: apples pears plums lemons cherries limes peaches figs oranges apricots
    | ask | split | pack | price | join | above
    set: {N} picks {A} {T} in the garden.
    | {N} has a basket with {A} {T}.
    | On Monday {N} harvests {A} {T}.
    set_times: {N} fills {A} baskets with {B} {T} each.
    | {N} picks {A} trees clean and finds {B} {T} on each tree.
    = {N} picks {A} * {B} = {Y} {T}.
    add: Then {N} picks {A} more {T}.
    | In the afternoon {N} harvests {A} {T} more.
    = Then there are {X} + {A} = {Y} {T}.
    take: {A} of the {T} are rotten and {N} throws them away.
    | Birds eat {A} of the {T}.
    | {S} cooks jam and uses {A} {T}.
    = There remain {X} - {A} = {Y} {T}.
    add_times: {S} harvests {A} more trees with {B} {T} on each tree.
    | Then {N} picks {A} more baskets of {B} {T}.
    = That gives {A} * {B} = {C} {T}. Then there are {X} + {C} = {Y} {T}.
    take_times: {S} uses {A} {T} for each of {B} cakes.
    | {S} sells {A} sacks with {B} {T} each.
    = {A} * {B} = {C} {T} are used. There remain {X} - {C} = {Y} {T}.
    """),
    "money": _theme("""
    things: dollars
    set: {N} has ${A}.
    | There are ${A} in {N}'s purse.
    | {N} starts with ${A}.
    set_times: {N} saves ${A} each week for {B} weeks.
    | {N} works {A} hours and earns ${B} an hour.
    | For {A} days {N} earns ${B} a day.
    = {N} has {A} * {B} = {Y} dollars.
    add: {S} earns ${A} for washing a car.
    | {S} gets ${A} from an aunt.
    | {S} finds ${A}.
    = Now {N} has {X} + {A} = {Y} dollars.
    take: {S} spends ${A} on a gift.
    | {S} pays ${A} for shoes.
    | {S} buys a book for ${A}.
    = Now {N} has {X} - {A} = {Y} dollars.
    add_times: Then {N} saves ${A} each week for {B} weeks.
    | {S} sells {A} toys for ${B} each.
    = {N} adds {A} * {B} = {C} dollars. Now {N} has {X} + {C} = {Y} dollars.
    take_times: {S} buys {A} tickets for ${B} each.
    | {S} pays for {A} meals at ${B} each.
    = {N} pays {A} * {B} = {C} dollars. Now {N} has {X} - {C} = {Y} dollars.
    ask: How many dollars does {N} have now?
    | How much money in dollars does {N} have in the end?
    | Find the number of dollars that {N} has now.
    | How many dollars are there at the end?
    below: A bike costs ${A}. How many more dollars does {N} need for the bike?
    | {N} wants a phone that costs ${A}. How many dollars are still missing?
    = {N} still needs {A} - {X} = {Y} dollars.
    above: {O} has ${A}. How many more dollars than {O} does {N} have now?
    | {O} has only ${A}. By how many dollars is {N} ahead of {O}?
    = {N} has {X} - {A} = {Y} more.
    split: {S} shares the money equally among {A} children. How many dollars does each get?
    | {S} spends all of it on caps that cost ${A} each. How many caps does {N} get?
    = That makes {X} / {A} = {Y}.
    """),
    "trip": _theme("""
    things: km
    set: {N} rides {A} km before lunch.
    | First {N} drives {A} km by car.
    set_times: {N} walks {A} km a day for {B} days.
    | {N} rides for {A} hours and goes {B} km each hour.
    = {N} goes {A} * {B} = {Y} km.
    set_sum: {N} rides {A} km in the morning and {B} km in the evening.
    = {N} goes {A} + {B} = {Y} km.
    add: Then {N} rides {A} km more.
    | After a rest {N} goes on for {A} km.
    | {S} then takes a boat for {A} km.
    = That makes {X} + {A} = {Y} km.
    add_times: Then {N} walks {A} km a day for {B} days.
    | Then {N} runs {A} laps of {B} km each.
    = The next part is {A} * {B} = {C} km. That makes {X} + {C} = {Y} km.
    ask: How many km is the whole trip?
    | How far does {N} go in all, in km?
    | What is the length of the trip in km?
    | Find the total distance in km.
    below: The whole way is {A} km long. How many km are left?
    | The sea is {A} km away from the start. How many km must {N} still go?
    = {N} must still go {A} - {X} = {Y} km.
    above: {O} goes {A} km in all. How many km more than {O} does {N} go?
    = {N} goes {X} - {A} = {Y} km more.
    split: {O} goes the same way in {A} equal days. How many km does {O} go each day?
    | {S} goes back the same way in {A} equal parts. How many km long is each part?
    = Each time it is {X} / {A} = {Y} km.
    """),
    "bus": _theme("""
    things: people passengers travellers
    set: A bus starts with {A} {T}.
    | There are {A} {T} on the train {N} drives.
    set_times: A train has {A} cars with {B} {T} in each.
    | A ferry leaves with {A} groups of {B} {T}.
    = At first there are {A} * {B} = {Y} {T}.
    add: At the next stop {A} {T} get on.
    | At the market {A} more {T} come in.
    = Then there are {X} + {A} = {Y} {T}.
    take: At the next stop {A} {T} get off.
    | At the park {A} {T} leave.
    = Then there are {X} - {A} = {Y} {T}.
    add_times: At the next stop {A} groups of {B} {T} get on.
    = {A} * {B} = {C} {T} get on. Then there are {X} + {C} = {Y} {T}.
    take_times: Then at each of {A} stops {B} {T} get off.
    = {A} * {B} = {C} {T} get off. Then there are {X} - {C} = {Y} {T}.
    ask: How many {T} are on board now?
    | How many {T} arrive at the last stop?
    | Find the number of {T} who are still on board.
    below: There are seats for {A} {T}. How many seats are free now?
    = There are {A} - {X} = {Y} free seats.
    price: Each of those now on board pays ${A}. How many dollars is that?
    = They pay {X} * {A} = {Y} dollars.
    split: At the end they go on in taxis, {A} {T} in each. How many taxis are full?
    = They fill {X} / {A} = {Y} taxis.
    """),
    "hall": _theme("""
    things: chairs desks benches lamps stools
    set_times: A school has {A} rows of {B} {T}.
    | The school has {A} classrooms with {B} {T} each.
    = At first there are {A} * {B} = {Y} {T}.
    set: A school has {A} {T} in all its rooms.
    | A school owns {A} {T}.
    add: The caretaker brings {A} more {T}.
    | A carpenter delivers {A} {T}.
    = That makes {X} + {A} = {Y} {T}.
    take: {N} finds that {A} {T} are broken and throws them away.
    | The school lends {A} {T} to the town.
    = That leaves {X} - {A} = {Y} {T}.
    add_times: Then {A} pupils bring {B} {T} each.
    = The pupils bring {A} * {B} = {C} {T}. That makes {X} + {C} = {Y} {T}.
    take_times: Then {A} pupils take {B} {T} each out of the school.
    = The pupils take {A} * {B} = {C} {T}. That leaves {X} - {C} = {Y} {T}.
    ask: How many {T} are there now?
    | How many {T} does the school have in the end?
    | Find the number of {T} that are there now.
    split: {N} puts them all in {A} equal rows. How many {T} are in each row?
    | They are set up in rows of {A}. How many rows are there?
    = That makes {X} / {A} = {Y}.
    below: For a feast {A} {T} are needed. How many {T} are missing?
    = There are {A} - {X} = {Y} {T} too few.
    above: Only {A} {T} are needed. How many {T} are too many?
    = There are {X} - {A} = {Y} {T} too many.
    """),
    "farm": _theme("""
    things: sheep cows goats hens ducks pigs rabbits horses
    set: A farm has {A} {T}.
    | A farmer keeps {A} {T}.
    set_times: On a farm there are {A} stables with {B} {T} in each.
    = The farm has {A} * {B} = {Y} {T}.
    set_sum: On a farm live {A} white {T} and {B} brown {T}.
    = The farm has {A} + {B} = {Y} {T}.
    add: In spring {A} {T} are born.
    | The farmer buys {A} {T} at the fair.
    = Then there are {X} + {A} = {Y} {T}.
    take: The farmer sells {A} {T}.
    | One night {A} {T} run away.
    = Then there are {X} - {A} = {Y} {T}.
    add_times: The farmer buys {A} herds of {B} {T}.
    = The farmer buys {A} * {B} = {C} {T}. Then there are {X} + {C} = {Y} {T}.
    take_times: The farmer sells {A} neighbours {B} {T} each.
    = The farmer sells {A} * {B} = {C} {T}. Then there are {X} - {C} = {Y} {T}.
    ask: How many {T} live on the farm now?
    | How many {T} does the farm have in the end?
    | Find the number of {T} on the farm now.
    split: They live in {A} fields, equally many in each. How many {T} are in one field?
    = In one field there are {X} / {A} = {Y} {T}.
    price: Each of them eats {A} kg of food a day. How many kg do they eat in one day?
    = They eat {X} * {A} = {Y} kg.
    above: The farm next door has {A} {T}, which is fewer. How many fewer are they?
    = It has {X} - {A} = {Y} fewer.
    """),
    "game": _theme("""
    things: points
    set: {N} has {A} points in a game.
    | {N} begins a game with {A} points.
    set_times: {N} plays {A} rounds and scores {B} points in each round.
    = {N} has {A} * {B} = {Y} points.
    set_sum: {N} scores {A} points in round one and {B} points in round two.
    = {N} has {A} + {B} = {Y} points.
    add: Then {N} scores {A} points.
    | A bonus brings {A} points.
    = Now it is {X} + {A} = {Y} points.
    take: For a mistake {N} loses {A} points.
    | A trap costs {N} {A} points.
    = Now it is {X} - {A} = {Y} points.
    add_times: {S} hits {A} targets and gets {B} points for each.
    = The targets bring {A} * {B} = {C} points. Now it is {X} + {C} = {Y} points.
    take_times: {S} misses {A} targets and loses {B} points for each.
    = {N} loses {A} * {B} = {C} points. Now it is {X} - {C} = {Y} points.
    ask: How many points does {N} have now?
    | What is the score of {N} in the end?
    | With how many points does {N} end the game?
    above: {O} has {A} points. By how many points does {N} win?
    = {N} wins by {X} - {A} = {Y} points.
    below: To win, {A} points are needed. How many points are still missing?
    = {N} still needs {A} - {X} = {Y} points.
    join: {O} of the same team has {A} points. How many points does the team have?
    = The team has {X} + {A} = {Y} points.
    split: Every {A} points give a star. How many stars does {N} get?
    = {N} gets {X} / {A} = {Y} stars.
    """),
    "book": _theme("""
    things: pages
    set: A book has {A} pages.
    | {N} must write {A} pages.
    set_times: A book has {A} chapters of {B} pages each.
    = There are {A} * {B} = {Y} pages.
    set_sum: A story of {A} pages and another of {B} pages make up one book.
    = There are {A} + {B} = {Y} pages.
    take: {N} finishes {A} pages on Monday.
    | In the evening {N} finishes {A} pages.
    = There remain {X} - {A} = {Y} pages.
    take_times: For {A} days {N} finishes {B} pages a day.
    = {N} finishes {A} * {B} = {C} pages. There remain {X} - {C} = {Y} pages.
    ask: How many pages are left?
    | How many pages must {N} still do?
    | Find the number of pages that remain.
    split: {S} does the rest in {A} equal days. How many pages is that a day?
    | From then on {N} does {A} pages a day. How many days does the rest take?
    = That makes {X} / {A} = {Y}.
    above: {O} has {A} pages of it left. How many pages more than {O} has {N} left?
    = {N} has {X} - {A} = {Y} more.
    """),
}
