# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The word-level tokenizer of the chain world: a token is a word, a mark or a newline; spaces are not tokens."""

from functools import cache
from typing import TYPE_CHECKING

from ..world import tokens as world
from .words import all_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, UNKNOWN, NEWLINE = world.BOS, world.EOS, world.UNKNOWN, "\n"


@cache
def vocabulary() -> dict[str, int]:
    """Id of every word; the special tokens come first."""
    return {word: index for index, word in enumerate([BOS, EOS, UNKNOWN, NEWLINE, *all_words()])}


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer of the reference world with the words of this one."""
    return world.build_tokenizer(vocabulary())
