# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The word-level tokenizer of the chain world: a token is a word, a mark or a newline; spaces are not tokens."""

from functools import cache
from typing import TYPE_CHECKING

from .words import all_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, UNKNOWN, NEWLINE = "<s>", "</s>", "<unk>", "\n"


@cache
def vocabulary() -> dict[str, int]:
    """Id of every word; the special tokens come first."""
    return {word: index for index, word in enumerate([BOS, EOS, UNKNOWN, NEWLINE, *all_words()])}


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer; it adds BOS to a whole prompt, and a text has the same tokens whole or in pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
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
