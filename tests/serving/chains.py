# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models that write a given text: each token has one successor."""

import json

import torch
from tokenizers import Tokenizer, decoders
from transformers import PreTrainedTokenizerFast

from tests.chat_templates import CHATML, small_tokenizer
from tests.conftest import build_tiny_model

WIDTH = 256
STRENGTH = 12.0  # of the successor's logit; those of others are about 0


def tokenizer_of(kind):
    """A tokenizer as GPT-2's ("bytes"), or as Llama 2's ("spaces"), which joins bytes and drops a first space."""
    small = small_tokenizer(kind)
    described = json.loads(small.backend_tokenizer.to_str())
    described["added_tokens"] = [row for row in described["added_tokens"] if not row["content"].startswith("<0x")]
    backend = Tokenizer.from_str(json.dumps(described))
    if kind == "spaces":
        row = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(row)
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, **names)


def chain(tokenizer, first, ids, strength=STRENGTH):
    """A model that writes ids behind the token `first`, by its largest logits, and then ends."""
    model = build_tiny_model(vocab_size=len(tokenizer), num_hidden_layers=2, hidden_size=WIDTH, weight_scale=1.0)
    follows = dict(zip([first, *ids], [*ids, tokenizer.eos_token_id], strict=True))
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
        table = torch.randn(len(tokenizer), WIDTH, generator=drawn)
        model.get_input_embeddings().weight.copy_(table)
        for token, successor in follows.items():
            model.lm_head.weight[successor] += strength * table[token] / WIDTH
    return model
