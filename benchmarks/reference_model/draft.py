# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Train a small draft for the chain model: `python benchmarks/reference_model/draft.py --to build/draft`.

Two layers that learn the next word of stories, questions and answers from random weights, by the stories alone: it
shares the vocabulary with the chain model and nothing else. Behind an answer the chain model repeats a name, so that
is what the draft sees there, too.
"""

import argparse
import time
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from hf_blend.evaluation.chains.sampling import _example
from hf_blend.evaluation.chains.story import Level
from hf_blend.evaluation.chains.tokens import BOS, EOS, build_tokenizer, vocabulary

ANSWER_WEIGHT, REPEATED = 8.0, 12


def build() -> LlamaForCausalLM:
    """The draft with random weights."""
    ids = vocabulary()
    special = {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[EOS]}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(ids), max_position_embeddings=4096, tie_word_embeddings=True, **sizes, **special
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="where the draft goes")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer, random = build(), build_tokenizer(), Random("draft")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    until, step = time.monotonic() + 60 * options.minutes, 0
    while (left := until - time.monotonic()) > 0:
        story = _example(random, random.randrange(5), "train", Level())
        end = [vocabulary()[story.answer], vocabulary()[EOS], vocabulary()[EOS]] + [
            vocabulary()[story.answer]
        ] * REPEATED
        ids = torch.tensor([tokenizer("".join(story.chunks) + story.question)["input_ids"] + end])
        losses = cross_entropy(model(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
        losses[-len(end) :] *= ANSWER_WEIGHT
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50, left / (30 * options.minutes))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 200 == 0:
            print(f"{step} stories, loss {losses[: -len(end)].mean():.3f}, answers {losses[-len(end) :].mean():.3f}")
    model.save_pretrained(options.to)
    tokenizer.save_pretrained(options.to)


if __name__ == "__main__":
    main()
