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
    "animal": tuple("goat dog cat horse cow".split()),
    "bird": tuple("duck goose hen owl swan".split()),
    "fish": tuple("trout carp pike eel perch".split()),
    "insect": tuple("bee ant moth wasp beetle".split()),
    "tree": tuple("oak elm pine birch willow".split()),
    "flower": tuple("rose tulip poppy lily daisy".split()),
    "herb": tuple("mint sage thyme basil parsley".split()),
    "fruit": tuple("apple pear plum cherry fig".split()),
    "vegetable": tuple("carrot onion leek turnip bean".split()),
    "grain": tuple("barley rye oat wheat millet".split()),
    "tool": tuple("hammer saw axe rake spade".split()),
    "garment": tuple("coat scarf glove hat shawl".split()),
    "vessel": tuple("kettle basket bucket jar cup".split()),
    "instrument": tuple("drum flute harp bell fiddle".split()),
    "weapon": tuple("sword bow spear dagger sling".split()),
    "jewel": tuple("ring brooch pearl ruby crown".split()),
    "stone": tuple("flint marble slate granite chalk".split()),
    "metal": tuple("iron copper tin silver brass".split()),
    "cloth": tuple("linen wool silk velvet cotton".split()),
    "seat": tuple("chair bench stool sofa throne".split()),
    "vehicle": tuple("cart boat sledge wagon raft".split()),
    "building": tuple("barn mill tower shed chapel".split()),
    "drink": tuple("tea ale cider milk wine".split()),
    "toy": tuple("doll kite ball top puppet".split()),
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
_HELD_OUT = 4  # one in so many


@cache
def held_out(thing: str, owner: str, through: str) -> bool:
    """Whether training never lets this thing be that owner's in this way.

    It takes three words: that two words never go together can be learnt, and would then be wrong where they do.
    """
    return crc32(f"{thing}|{owner}|{through}".encode()) % _HELD_OUT == 0


def all_words() -> list[str]:
    """Every word of the world, in a fixed order, without repeats."""
    texts = (*OWNED, *LINKED, *FILLERS, "that whose is ?")
    words = [word for text in texts for word in text.split() if not word.startswith("{")]
    words += [*OWNERS, *THINGS, *KIND_OF, *NOUNS, *ADJECTIVES, *ENDS, *UNSEEN_NOUNS, *UNSEEN_ADJECTIVES]
    return list(dict.fromkeys(words))
