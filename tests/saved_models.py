# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in folders, for models that are saved there: one whose tokens are bytes, and one that chats."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_blend.evaluation.bundled import handbook_pages

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def of_bytes(model: models.BPE) -> Tokenizer:
    """A tokenizer that reads text as bytes, as GPT-2's does."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer_of_bytes(path: Path) -> None:
    """Save a tokenizer of 256 bytes, BOS 256 and EOS 257."""
    ids = {letter: place for place, letter in enumerate(ALPHABET)}
    tokenizer = of_bytes(models.BPE({**ids, "<s>": 256, "</s>": 257}, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)


def save_tokenizer_that_chats(path: Path) -> int:
    """Save a tokenizer that was trained on the handbook, with a chat template; gives the size of its vocabulary."""
    tokenizer = of_bytes(models.BPE())
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=special, initial_alphabet=ALPHABET, show_progress=False
    )
    tokenizer.train_from_iterator(handbook_pages().values(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return len(fast)
