# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The word-level tokenizer of the reference world.

A token is a word, a punctuation mark or a newline; spaces are not tokens. So a text has the same tokens whether it is
encoded whole or piece by piece, as long as no piece ends inside a word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from .words import CLOSERS, FILLERS, PEOPLE, PHRASES, PRONOUNS, QUESTIONS, TOWN_OF, VALUES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
_TOKEN = re.compile(r"\w+|[^\w\s]|\n")


def split_words(text: str) -> list[str]:
    """Split a text into the words, marks and newlines that the tokenizer makes of it."""
    return _TOKEN.findall(text)


@cache
def vocabulary() -> dict[str, int]:
    """Return the id of every word; the three special tokens come first, then the rest in alphabetical order."""
    texts = [*PEOPLE, *PRONOUNS, *CLOSERS, *FILLERS, TOWN_OF, *QUESTIONS.values()]
    texts += [word for words in VALUES.values() for word in words]
    texts += [phrase for pair in PHRASES.values() for phrase in pair]
    words = {word for text in texts for word in split_words(text) if word not in "{}"}
    words -= {"s", "v"}
    words |= {"She", "He", "The", "that", "That", "the", "\n"}
    return {word: index for index, word in enumerate([BOS, EOS, UNKNOWN, *sorted(words)])}


def encode(text: str) -> list[int]:
    """Return the token ids of a text, without special tokens; the same as the tokenizer's, but quicker."""
    ids = vocabulary()
    return [ids[word] for word in split_words(text)]


def build_tokenizer(words: Mapping[str, int] | None = None) -> PreTrainedTokenizerFast:
    """Build the tokenizer; it adds BOS to a whole prompt, and a text has the same tokens whole or in pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(words or vocabulary()), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\n"), "isolated"),
            pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed"),
            pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated"),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=True),
            decoders.Fuse(),
            decoders.Replace(" \n", "\n"),
            decoders.Replace("\n ", "\n"),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        add_bos_token=True,
        eos_token=EOS,
        unk_token=UNKNOWN,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
    )
