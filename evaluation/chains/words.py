# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The words of the chain world, and which pairs of them training never sees."""

from functools import cache
from zlib import crc32

OWNERS = tuple(
    "Mara Tomas Anwen Ilse Piet Oda Bram Jora Wim Lena Hugo Nele Otto Rika Sven Tilde Ugo Vera Arno Britt Cas Dora "
    "Emil Fenna Gert Hanna Ivo Julia".split()
)
THINGS = {
    "animal": tuple(
        "goat dog cat horse cow sheep duck goose hen pig mule crow hare fox bee trout owl toad swan otter".split()
    ),
    "tool": tuple(
        "lantern rope bell hammer ladder spoon mirror broom kettle wheel basket candle saw spade needle anvil chisel "
        "bucket axe rake".split()
    ),
    "plant": tuple(
        "rose fern oak elm thistle ivy moss tulip barley clover lily nettle pine reed sage willow birch poppy hazel "
        "mint".split()
    ),
    "garment": tuple(
        "coat scarf glove boot hat shawl belt apron cloak sock gown vest cap robe sash tunic sandal hood shirt "
        "mitten".split()
    ),
}
OWNED = ("belongs to", "came from")
LINKED = ("goes with", "stays by", "came after")
NOUNS = tuple(
    "weather road evening morning wind harvest market letter song bread water window door night week work".split()
)
ADJECTIVES = tuple("cold warm grey late early quiet wet dry long short bright dark slow heavy light plain".split())
ENDS = tuple("indeed anyway too again".split())
FILLERS = ("the {n} was {a} .", "the {n} had been {a} and {b} .", "it was {a} {e} .", "the {n} was {a} {e} .")
UNSEEN_NOUNS = tuple("river garden winter summer".split())  # filler that only held-out stories use
UNSEEN_ADJECTIVES = tuple("steep narrow pale mild".split())
KIND_OF = {word: kind for kind, words in THINGS.items() for word in words}
NEW = frozenset([*OWNERS[-4:], *(word for words in THINGS.values() for word in words[-4:])])


@cache
def held_out(thing: str, owner: str, through: str) -> bool:
    """Whether training never lets this thing be that owner's in this way: half of those with a word of `NEW`.

    It takes three words: that two words never go together can be learnt, and would then be wrong where they do.

    Args:
        thing: what is owned.
        owner: by whom.
        through: the thing leant on, or the words of the sentence that names the owner.
    """
    return bool({thing, owner, through} & NEW) and crc32(f"{thing}|{owner}|{through}".encode()) % 2 == 0


def all_words() -> list[str]:
    """Every word of the world, in a fixed order, without repeats."""
    texts = (*OWNED, *LINKED, *FILLERS, "that whose is ?")
    words = [word for text in texts for word in text.split() if not word.startswith("{")]
    words += [*OWNERS, *THINGS, *KIND_OF, *NOUNS, *ADJECTIVES, *ENDS, *UNSEEN_NOUNS, *UNSEEN_ADJECTIVES]
    return list(dict.fromkeys(words))
