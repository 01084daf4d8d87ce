# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The words of the reference world: invented people and towns, and the few things that can be said of them.

Every entry is one word, hence one token. The order inside a list matters: `is_heldout` splits by index.
"""

PRONOUNS = ("she", "he")

NAMES = {
    "she": tuple(
        "Mara Ilsa Oda Vesna Tilda Runa Petra Liva Senna Anwen Brida Corin Delia Estra Fenna Greta "
        "Hanna Ivana Jora Kaisa Lotta Minna Nerys Orla Pella Rhea Signe Thora Ulla Wilma Yrsa Zelda".split()
    ),
    "he": tuple(
        "Tomas Egil Bram Orrin Casper Dorn Falk Gideon Hugo Ivar Joren Kell Lorenz Milo Nils Otto "
        "Pavel Quill Rolf Stellan Tarn Ugo Viktor Wendel Yorick Zoran Anders Boris Colm Darius Emil Finn".split()
    ),
}
PEOPLE = NAMES["she"] + NAMES["he"]

TOWNS = tuple(
    "Velden Harrow Osmere Tarsk Lindow Breck Calder Dunmar Elvast Fermoy Galt Hestle "
    "Ister Jarrow Kestrel Lomond Marwick Norvale Ostrand Pellan Quarley Rastow Selby Thorne".split()
)

VALUES = {
    "home": TOWNS,
    "role": tuple(
        "captain baker miller judge potter weaver doctor hunter mason painter tailor gardener "
        "cooper singer printer brewer".split()
    ),
    "pet": tuple(
        "cat dog goat horse parrot rabbit goose donkey ferret turtle raven pony hen lamb cow mule "
        "fox hawk pig swan".split()
    ),
    "food": tuple(
        "plums bread cheese soup honey apples pears beans cakes fish figs nuts onions olives grapes "
        "lentils porridge cherries mushrooms dates".split()
    ),
    "tool": tuple(
        "lantern hammer rope mirror compass kettle basket whistle drum ladder needle shovel bucket "
        "hatchet satchel telescope pillow violin flute spade".split()
    ),
    "month": tuple("January February March April May June July August September October November December".split()),
    "craft": tuple(
        "glass lace copper bells carpets clocks silk paper salt leather amber barrels pottery boats wool "
        "ink soap tiles knives candles".split()
    ),
    "river": tuple("Arn Bolder Cray Dell Esk Foyle Gammer Hask Irwell Jass Kolm Lyre Mole Nidd Orwell Pang".split()),
}

PERSON_RELATIONS = ("home", "role", "pet", "food", "tool", "month")
TOWN_RELATIONS = ("craft", "river")

# How a fact is told: `{s}` is a name, a pronoun, "the captain", a town or "that town"; `{v}` is the value.
PHRASES = {
    "home": ("{s} lives in {v}", "{s} has a house in {v}"),
    "role": ("{s} is the {v}", "{s} works as the {v}"),
    "pet": ("{s} keeps a {v}", "{s} feeds a {v}"),
    "food": ("{s} likes {v}", "{s} often eats {v}"),
    "tool": ("{s} carries a {v}", "{s} bought a {v}"),
    "month": ("{s} was born in {v}", "{s} has a birthday in {v}"),
    "craft": ("{s} is known for {v}", "{s} sells {v}"),
    "river": ("{s} lies by the {v}", "{s} stands on the {v}"),
}
CLOSERS = ("", "indeed", "anyway", "too")

# How a fact is asked for: `{s}` is a name, "the captain" or a town.
QUESTIONS = {
    "home": "Where does {s} live?",
    "role": "What is the work of {s}?",
    "pet": "Which animal does {s} keep?",
    "food": "What does {s} like?",
    "tool": "What does {s} carry?",
    "month": "When was {s} born?",
    "craft": "What is {s} known for?",
    "river": "On which river is {s}?",
}
TOWN_OF = "the town of {s}"

FILLERS = (
    "It rained all night.",
    "The market opens at noon.",
    "Nobody saw the ship.",
    "The road was long and empty.",
    "Snow fell on the hills.",
    "The bridge is old.",
    "All was quiet until morning.",
    "The wind came from the north.",
)

_HELDOUT_EVERY = 4


def is_heldout(first_index: int, second_index: int) -> bool:
    """Tell whether a combination of two list entries is kept out of training.

    Used for (subject, value) pairs and for (closer, phrase) pairs, so that each word is trained but a quarter of
    its combinations is not.
    """
    return (first_index + second_index) % _HELDOUT_EVERY == 0


def phrase_index(relation: str, phrase: int) -> int:
    """Return a number for one phrase of a relation, distinct over all relations."""
    return list(PHRASES).index(relation) * 2 + phrase


def subject_index(subject: str) -> int:
    """Return the index that `is_heldout` uses for a person's or a town's name."""
    return TOWNS.index(subject) if subject in TOWNS else PEOPLE.index(subject)
