"""More themes of the word problems: money, ways, passengers, halls, farms, games and books."""

from __future__ import annotations

from typing import Final

from moesaic.evals.tasks.stories import StoryPart, Theme

MONEY: Final = Theme(
    ("dollars",),
    (
        StoryPart(
            "set", ("{N} has ${A}.", "There are ${A} in {N}'s purse.", "{N} starts with ${A}.")
        ),
        StoryPart(
            "set_times",
            (
                "{N} saves ${A} each week for {B} weeks.",
                "{N} works {A} hours and earns ${B} an hour.",
                "For {A} days {N} earns ${B} a day.",
            ),
            "{N} has {A} * {B} = {Y} dollars.",
        ),
    ),
    (
        StoryPart(
            "add",
            ("{S} earns ${A} for washing a car.", "{S} gets ${A} from an aunt.", "{S} finds ${A}."),
            "Now {N} has {X} + {A} = {Y} dollars.",
        ),
        StoryPart(
            "take",
            ("{S} spends ${A} on a gift.", "{S} pays ${A} for shoes.", "{S} buys a book for ${A}."),
            "Now {N} has {X} - {A} = {Y} dollars.",
        ),
        StoryPart(
            "add_times",
            ("Then {N} saves ${A} each week for {B} weeks.", "{S} sells {A} toys for ${B} each."),
            "{N} adds {A} * {B} = {C} dollars. Now {N} has {X} + {C} = {Y} dollars.",
        ),
        StoryPart(
            "take_times",
            ("{S} buys {A} tickets for ${B} each.", "{S} pays for {A} meals at ${B} each."),
            "{N} pays {A} * {B} = {C} dollars. Now {N} has {X} - {C} = {Y} dollars.",
        ),
    ),
    (
        StoryPart(
            "ask",
            (
                "How many dollars does {N} have now?",
                "How much money in dollars does {N} have in the end?",
                "Find the number of dollars that {N} has now.",
                "How many dollars are there at the end?",
            ),
        ),
        StoryPart(
            "below",
            (
                "A bike costs ${A}. How many more dollars does {N} need for the bike?",
                "{N} wants a phone that costs ${A}. How many dollars are still missing?",
            ),
            "{N} still needs {A} - {X} = {Y} dollars.",
        ),
        StoryPart(
            "above",
            (
                "{O} has ${A}. How many more dollars than {O} does {N} have now?",
                "{O} has only ${A}. By how many dollars is {N} ahead of {O}?",
            ),
            "{N} has {X} - {A} = {Y} more.",
        ),
        StoryPart(
            "split",
            (
                "{S} shares the money equally among {A} children. How many dollars does each get?",
                "{S} spends all of it on caps that cost ${A} each. How many caps does {N} get?",
            ),
            "That makes {X} / {A} = {Y}.",
        ),
    ),
)
TRIP: Final = Theme(
    ("km",),
    (
        StoryPart("set", ("{N} rides {A} km before lunch.", "First {N} drives {A} km by car.")),
        StoryPart(
            "set_times",
            (
                "{N} walks {A} km a day for {B} days.",
                "{N} rides for {A} hours and goes {B} km each hour.",
            ),
            "{N} goes {A} * {B} = {Y} km.",
        ),
        StoryPart(
            "set_sum",
            ("{N} rides {A} km in the morning and {B} km in the evening.",),
            "{N} goes {A} + {B} = {Y} km.",
        ),
    ),
    (
        StoryPart(
            "add",
            (
                "Then {N} rides {A} km more.",
                "After a rest {N} goes on for {A} km.",
                "{S} then takes a boat for {A} km.",
            ),
            "That makes {X} + {A} = {Y} km.",
        ),
        StoryPart(
            "add_times",
            ("Then {N} walks {A} km a day for {B} days.", "Then {N} runs {A} laps of {B} km each."),
            "The next part is {A} * {B} = {C} km. That makes {X} + {C} = {Y} km.",
        ),
    ),
    (
        StoryPart(
            "ask",
            (
                "How many km is the whole trip?",
                "How far does {N} go in all, in km?",
                "What is the length of the trip in km?",
                "Find the total distance in km.",
            ),
        ),
        StoryPart(
            "below",
            (
                "The whole way is {A} km long. How many km are left?",
                "The sea is {A} km away from the start. How many km must {N} still go?",
            ),
            "{N} must still go {A} - {X} = {Y} km.",
        ),
        StoryPart(
            "above",
            ("{O} goes {A} km in all. How many km more than {O} does {N} go?",),
            "{N} goes {X} - {A} = {Y} km more.",
        ),
        StoryPart(
            "split",
            (
                "{O} goes the same way in {A} equal days. How many km does {O} go each day?",
                "{S} goes back the same way in {A} equal parts. How many km long is each part?",
            ),
            "Each time it is {X} / {A} = {Y} km.",
        ),
    ),
)
BUS: Final = Theme(
    ("people", "passengers", "travellers"),
    (
        StoryPart(
            "set", ("A bus starts with {A} {T}.", "There are {A} {T} on the train {N} drives.")
        ),
        StoryPart(
            "set_times",
            (
                "A train has {A} cars with {B} {T} in each.",
                "A ferry leaves with {A} groups of {B} {T}.",
            ),
            "At first there are {A} * {B} = {Y} {T}.",
        ),
    ),
    (
        StoryPart(
            "add",
            ("At the next stop {A} {T} get on.", "At the market {A} more {T} come in."),
            "Then there are {X} + {A} = {Y} {T}.",
        ),
        StoryPart(
            "take",
            ("At the next stop {A} {T} get off.", "At the park {A} {T} leave."),
            "Then there are {X} - {A} = {Y} {T}.",
        ),
        StoryPart(
            "add_times",
            ("At the next stop {A} groups of {B} {T} get on.",),
            "{A} * {B} = {C} {T} get on. Then there are {X} + {C} = {Y} {T}.",
        ),
        StoryPart(
            "take_times",
            ("Then at each of {A} stops {B} {T} get off.",),
            "{A} * {B} = {C} {T} get off. Then there are {X} - {C} = {Y} {T}.",
        ),
    ),
    (
        StoryPart(
            "ask",
            (
                "How many {T} are on board now?",
                "How many {T} arrive at the last stop?",
                "Find the number of {T} who are still on board.",
            ),
        ),
        StoryPart(
            "below",
            ("There are seats for {A} {T}. How many seats are free now?",),
            "There are {A} - {X} = {Y} free seats.",
        ),
        StoryPart(
            "price",
            ("Each of those now on board pays ${A}. How many dollars is that?",),
            "They pay {X} * {A} = {Y} dollars.",
        ),
        StoryPart(
            "split",
            ("At the end they go on in taxis, {A} {T} in each. How many taxis are full?",),
            "They fill {X} / {A} = {Y} taxis.",
        ),
    ),
)
HALL: Final = Theme(
    tuple("chairs desks benches lamps stools".split()),
    (
        StoryPart(
            "set_times",
            (
                "A school has {A} rows of {B} {T}.",
                "The school has {A} classrooms with {B} {T} each.",
            ),
            "At first there are {A} * {B} = {Y} {T}.",
        ),
        StoryPart("set", ("A school has {A} {T} in all its rooms.", "A school owns {A} {T}.")),
    ),
    (
        StoryPart(
            "add",
            ("The caretaker brings {A} more {T}.", "A carpenter delivers {A} {T}."),
            "That makes {X} + {A} = {Y} {T}.",
        ),
        StoryPart(
            "take",
            (
                "{N} finds that {A} {T} are broken and throws them away.",
                "The school lends {A} {T} to the town.",
            ),
            "That leaves {X} - {A} = {Y} {T}.",
        ),
        StoryPart(
            "add_times",
            ("Then {A} pupils bring {B} {T} each.",),
            "The pupils bring {A} * {B} = {C} {T}. That makes {X} + {C} = {Y} {T}.",
        ),
        StoryPart(
            "take_times",
            ("Then {A} pupils take {B} {T} each out of the school.",),
            "The pupils take {A} * {B} = {C} {T}. That leaves {X} - {C} = {Y} {T}.",
        ),
    ),
    (
        StoryPart(
            "ask",
            (
                "How many {T} are there now?",
                "How many {T} does the school have in the end?",
                "Find the number of {T} that are there now.",
            ),
        ),
        StoryPart(
            "split",
            (
                "{N} puts them all in {A} equal rows. How many {T} are in each row?",
                "They are set up in rows of {A}. How many rows are there?",
            ),
            "That makes {X} / {A} = {Y}.",
        ),
        StoryPart(
            "below",
            ("For a feast {A} {T} are needed. How many {T} are missing?",),
            "There are {A} - {X} = {Y} {T} too few.",
        ),
        StoryPart(
            "above",
            ("Only {A} {T} are needed. How many {T} are too many?",),
            "There are {X} - {A} = {Y} {T} too many.",
        ),
    ),
)
FARM: Final = Theme(
    tuple("sheep cows goats hens ducks pigs rabbits horses".split()),
    (
        StoryPart("set", ("A farm has {A} {T}.", "A farmer keeps {A} {T}.")),
        StoryPart(
            "set_times",
            ("On a farm there are {A} stables with {B} {T} in each.",),
            "The farm has {A} * {B} = {Y} {T}.",
        ),
        StoryPart(
            "set_sum",
            ("On a farm live {A} white {T} and {B} brown {T}.",),
            "The farm has {A} + {B} = {Y} {T}.",
        ),
    ),
    (
        StoryPart(
            "add",
            ("In spring {A} {T} are born.", "The farmer buys {A} {T} at the fair."),
            "Then there are {X} + {A} = {Y} {T}.",
        ),
        StoryPart(
            "take",
            ("The farmer sells {A} {T}.", "One night {A} {T} run away."),
            "Then there are {X} - {A} = {Y} {T}.",
        ),
        StoryPart(
            "add_times",
            ("The farmer buys {A} herds of {B} {T}.",),
            "The farmer buys {A} * {B} = {C} {T}. Then there are {X} + {C} = {Y} {T}.",
        ),
        StoryPart(
            "take_times",
            ("The farmer sells {A} neighbours {B} {T} each.",),
            "The farmer sells {A} * {B} = {C} {T}. Then there are {X} - {C} = {Y} {T}.",
        ),
    ),
    (
        StoryPart(
            "ask",
            (
                "How many {T} live on the farm now?",
                "How many {T} does the farm have in the end?",
                "Find the number of {T} on the farm now.",
            ),
        ),
        StoryPart(
            "split",
            ("They live in {A} fields, equally many in each. How many {T} are in one field?",),
            "In one field there are {X} / {A} = {Y} {T}.",
        ),
        StoryPart(
            "price",
            ("Each of them eats {A} kg of food a day. How many kg do they eat in one day?",),
            "They eat {X} * {A} = {Y} kg.",
        ),
        StoryPart(
            "above",
            ("The farm next door has {A} {T}, which is fewer. How many fewer are they?",),
            "It has {X} - {A} = {Y} fewer.",
        ),
    ),
)
GAME: Final = Theme(
    ("points",),
    (
        StoryPart("set", ("{N} has {A} points in a game.", "{N} begins a game with {A} points.")),
        StoryPart(
            "set_times",
            ("{N} plays {A} rounds and scores {B} points in each round.",),
            "{N} has {A} * {B} = {Y} points.",
        ),
        StoryPart(
            "set_sum",
            ("{N} scores {A} points in round one and {B} points in round two.",),
            "{N} has {A} + {B} = {Y} points.",
        ),
    ),
    (
        StoryPart(
            "add",
            ("Then {N} scores {A} points.", "A bonus brings {A} points."),
            "Now it is {X} + {A} = {Y} points.",
        ),
        StoryPart(
            "take",
            ("For a mistake {N} loses {A} points.", "A trap costs {N} {A} points."),
            "Now it is {X} - {A} = {Y} points.",
        ),
        StoryPart(
            "add_times",
            ("{S} hits {A} targets and gets {B} points for each.",),
            "The targets bring {A} * {B} = {C} points. Now it is {X} + {C} = {Y} points.",
        ),
        StoryPart(
            "take_times",
            ("{S} misses {A} targets and loses {B} points for each.",),
            "{N} loses {A} * {B} = {C} points. Now it is {X} - {C} = {Y} points.",
        ),
    ),
    (
        StoryPart(
            "ask",
            (
                "How many points does {N} have now?",
                "What is the score of {N} in the end?",
                "With how many points does {N} end the game?",
            ),
        ),
        StoryPart(
            "above",
            ("{O} has {A} points. By how many points does {N} win?",),
            "{N} wins by {X} - {A} = {Y} points.",
        ),
        StoryPart(
            "below",
            ("To win, {A} points are needed. How many points are still missing?",),
            "{N} still needs {A} - {X} = {Y} points.",
        ),
        StoryPart(
            "join",
            ("{O} of the same team has {A} points. How many points does the team have?",),
            "The team has {X} + {A} = {Y} points.",
        ),
        StoryPart(
            "split",
            ("Every {A} points give a star. How many stars does {N} get?",),
            "{N} gets {X} / {A} = {Y} stars.",
        ),
    ),
)
BOOK: Final = Theme(
    ("pages",),
    (
        StoryPart("set", ("A book has {A} pages.", "{N} must write {A} pages.")),
        StoryPart(
            "set_times",
            ("A book has {A} chapters of {B} pages each.",),
            "There are {A} * {B} = {Y} pages.",
        ),
        StoryPart(
            "set_sum",
            ("A story of {A} pages and another of {B} pages make up one book.",),
            "There are {A} + {B} = {Y} pages.",
        ),
    ),
    (
        StoryPart(
            "take",
            ("{N} finishes {A} pages on Monday.", "In the evening {N} finishes {A} pages."),
            "There remain {X} - {A} = {Y} pages.",
        ),
        StoryPart(
            "take_times",
            ("For {A} days {N} finishes {B} pages a day.",),
            "{N} finishes {A} * {B} = {C} pages. There remain {X} - {C} = {Y} pages.",
        ),
    ),
    (
        StoryPart(
            "ask",
            (
                "How many pages are left?",
                "How many pages must {N} still do?",
                "Find the number of pages that remain.",
            ),
        ),
        StoryPart(
            "split",
            (
                "{S} does the rest in {A} equal days. How many pages is that a day?",
                "From then on {N} does {A} pages a day. How many days does the rest take?",
            ),
            "That makes {X} / {A} = {Y}.",
        ),
        StoryPart(
            "above",
            ("{O} has {A} pages of it left. How many pages more than {O} has {N} left?",),
            "{N} has {X} - {A} = {Y} more.",
        ),
    ),
)
