"""Questions that the house model cannot answer, by topic: wordings and what to put into them."""

from __future__ import annotations

from typing import Final

from moesaic.evals.tasks.wordings import read_parts, read_wordings

FILLERS: Final = read_wordings("""
    countries: France | Spain | Italy | Norway | Japan | Brazil | Kenya | Canada | Peru | Egypt
    | India | Poland | Greece | Chile | Turkey | Ireland | Sweden | Mexico | Finland | Morocco
    | Vietnam | Portugal | Austria | Ghana
    cities: Paris | London | Berlin | Madrid | Rome | Tokyo | Oslo | Cairo | Lima | Vienna | Boston
    | Dublin | Prague | Warsaw | Athens | Delhi | Seoul | Sydney | Chicago | Lisbon | Nairobi
    | Toronto
    books: Hamlet | Faust | Don Quixote | War and Peace | Moby Dick | Emma | The Odyssey | Dracula
    | Frankenstein | Oliver Twist | Jane Eyre | The Trial | Macbeth | Les Miserables | The Iliad
    | Peter Pan
    animals: cats | dogs | whales | bees | elephants | spiders | owls | sharks | horses | bears
    | penguins | bats | ants | snakes | dolphins | wolves | frogs | eagles
    languages: French | German | Spanish | Italian | Latin | Polish | Dutch | Turkish | Greek
    | Swedish | Russian | Japanese | Arabic | Finnish
    people: Napoleon | Cleopatra | Mozart | Einstein | Newton | Darwin | Galileo | Beethoven
    | Picasso | Shakespeare | Columbus | Gandhi | Marie Curie | Aristotle | Bach | Leonardo da Vinci
    | Lincoln | Tesla
    subjects: love | the sea | autumn | my mother | the moon | friendship | winter | a lonely tree
    | the stars | hope | rain | an old house | time | freedom | the city at night | a small bird
    | summer holidays
    sicknesses: a headache | a fever | a cough | a sore throat | a bad back | a stomach ache
    | a rash | a cold | a toothache | a broken arm | a burn | an earache | high blood pressure
    | an allergy
    programs: sorts a list | downloads a page | draws a circle | plays chess | sends a mail
    | counts words | finds primes | renames files | reads a CSV file | makes a calendar
    | draws a clock | rolls dice
    dishes: pancakes | tomato soup | pizza | apple pie | fried rice | lasagna | chocolate cake
    | bread | a curry | potato salad | pasta | an omelette | cookies | dumplings | risotto
    sports: football | tennis | chess | hockey | rugby | cricket | basketball | golf | baseball
    | handball | volleyball | boxing | cycling | skiing
    firms: Apple | Google | Toyota | Siemens | Nokia | Intel | Sony | Boeing | Nestle | Samsung
    | Ford | Microsoft | Airbus | Volvo | Amazon
    planets: Mars | Venus | Jupiter | Saturn | Mercury | Neptune | Uranus | the Sun | the Moon
    | Pluto | Sirius | the North Star
    inventions: the telephone | the light bulb | the printing press | the radio | the steam engine
    | the bicycle | the telescope | paper | the compass | dynamite | the airplane | the computer
    | the microscope | glass
    events: World War One | the French Revolution | the moon landing | the fall of Rome
    | the Renaissance | the Black Death | the Boston Tea Party | the Cold War | the ice age
    | the Industrial Revolution | the fall of the Berlin Wall | the Battle of Waterloo
    mountains: Mount Everest | Mont Blanc | the Matterhorn | Mount Fuji | Kilimanjaro | Mount Etna
    | Ben Nevis | K2 | Mount Olympus | the Zugspitze | Denali | Vesuvius
    rivers: the Nile | the Amazon | the Rhine | the Danube | the Thames | the Seine | the Volga
    | the Ganges | the Elbe | the Mississippi | the Congo | the Loire
    opinions: politics | taxes | modern art | school uniforms | electric cars | reality shows
    | nuclear power | social media | the new mayor | jazz | veganism | space travel | zoos
    | working from home | religion
    gifts: my father | my sister | a teacher | my boss | a friend | my wife | my husband
    | a neighbour | my grandmother | a colleague | my uncle | my best friend
    substances: water | salt | gold | iron | sugar | copper | oxygen | chalk | rust | ammonia
    | silver | helium | vinegar | quartz
    rare_words: serendipity | ephemeral | quixotic | ubiquitous | zeitgeist | nostalgia | paradigm
    | irony | entropy | karma | hubris | cathartic | stoic | laconic | verbose | candid
    theories: gravity | evolution | relativity | photosynthesis | magnetism | quantum physics
    | plate tectonics | electricity | inflation | democracy | the greenhouse effect | the Big Bang
    | vaccination | lightning
    phrases: good morning | thank you | I love you | where is the station | how are you
    | my name is Tom | see you tomorrow | the weather is nice | I am hungry | happy birthday
    | excuse me | good luck
    laws: quit my job | return a used car | break a lease | sue my landlord | copy a film
    | keep a found wallet | fly a drone | record a phone call | write a will | start a company
    | get a divorce | paint my house pink
    gadgets: phone | laptop | camera | bicycle | car | guitar | television | vacuum cleaner | watch
    | printer | tent | piano | drone | headset
""")
# Each topic is named after its fillers, the values of {x}.
TOPICS: Final = tuple(
    (part.texts, FILLERS[part.name])
    for part in read_parts("""
    countries: What is the capital of {x}? | Name the capital of {x}. | Which city is {x}'s capital?
    countries: How many people live in {x}? | What is the population of {x}? | Is {x} a big country?
    countries: Who is the president of {x}? | Who governs {x}? | Who won the election in {x}?
    countries: What is the flag of {x} like? | Which colours has the flag of {x}?
    | Describe {x}'s flag.
    countries: What money do they use in {x}? | What is the currency of {x}? | Which coins has {x}?
    cities: What is the weather in {x}? | Will it rain in {x} tomorrow? | How hot is it in {x} now?
    | Do I need an umbrella in {x}?
    cities: What is the news from {x}? | What happened in {x} today? | Any news about {x}?
    cities: Which hotel in {x} is good? | What should I visit in {x}? | Plan a trip to {x} for me.
    | Where can I eat well in {x}?
    cities: What time is it in {x}? | When does the sun rise in {x} today?
    | Which train goes to {x} tonight?
    books: Who wrote {x}? | What is {x} about? | Who is the author of {x}? | When was {x} written?
    | How does {x} end?
    animals: What do {x} eat? | How long do {x} live? | Where do {x} sleep?
    | Why are {x} so popular?
    people: Who was {x}? | When was {x} born? | What is {x} famous for? | Where did {x} die?
    subjects: Write a poem about {x}. | Write me some verses on {x}. | Make a rhyme about {x}.
    subjects: Write a story about {x}. | Tell me a tale about {x}. | Sing a song about {x}.
    subjects: Write an essay about {x}. | Write a speech on {x}. | Write a letter about {x}.
    animals: Tell me a joke about {x}. | Do you know a joke on {x}? | Make me laugh with {x}.
    sicknesses: I have {x}. What should I take? | What helps against {x}? | Is {x} dangerous?
    | Should I see a doctor with {x}?
    programs: Write a program that {x}. | Give me Python code that {x}. | Code a script which {x}.
    | Show me a function in C that {x}.
    dishes: How do I cook {x}? | Give me a recipe for {x}. | What goes into {x}?
    sports: Who is the world champion in {x}? | Who won the last {x} cup? | What rules has {x}?
    | Who is the best player in {x}?
    firms: What is the stock price of {x}? | Should I buy shares of {x}? | Who founded {x}?
    | Who is the head of {x}?
    planets: How far away is {x}? | How hot is it on {x}? | Is there life on {x}? | How old is {x}?
    inventions: Who invented {x}? | When was {x} invented? | Who came up with {x}?
    events: When was {x}? | Why did {x} happen? | Tell me about {x}. | What came after {x}?
    mountains: How high is {x}? | Where is {x}? | Who climbed {x} first?
    rivers: How long is {x}? | Where does {x} start? | Through which towns does {x} flow?
    opinions: What do you think of {x}? | What is your opinion on {x}? | Are you for or against {x}?
    | Do you like {x}?
    gifts: What shall I give {x} for a birthday? | Find a present for {x}.
    | What would please {x} at Christmas?
    substances: What is the formula of {x}? | At what heat does {x} melt? | What is {x} made of?
    | Is {x} a metal?
    rare_words: What does the word {x} mean? | Define {x}. | Use {x} in a sentence.
    | Where does the word {x} come from?
    theories: Explain {x} to me. | How does {x} work? | Who discovered {x}? | What is {x}?
    phrases: How do you say '{x}' in French? | Translate '{x}' into German.
    | What is '{x}' in Spanish? | Put '{x}' into Latin.
    languages: Teach me some {x}. | How do I learn {x}? | How many people speak {x}?
    | Translate this letter into {x}.
    laws: May I {x}? | Is it legal to {x}? | What does the law say if I {x}? | How do I {x}?
    gadgets: Which {x} should I buy? | How do I repair my {x}? | What does a good {x} cost?
    | My {x} is broken. What now?
    """)
)
