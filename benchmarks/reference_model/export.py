# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Write the trained model as a stock Llama with its tokenizer the record of its training, and a few prompts.

PYTHONPATH=benchmarks python benchmarks/reference_model/export.py --folder run --to benchmarks/worlds/models/chains
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from emulate import Emulation, encode, is_right
from net import HEAD_DIM, HEADS, LAYERS, MLP, READS, THETA, WIDTH, Net
from train import STAGES
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from worlds.chains.sampling import sample_examples
from worlds.chains.story import Level
from worlds.chains.tokens import BOS, EOS, build_tokenizer, vocabulary

MAX_POSITIONS = 4096
QUESTIONS, QUESTIONS_SEED = 3, 7
LONGEST = Level(chunks=(16, 16), facts=(1, 2), fillers=(16, 20))


def build(state: dict[str, torch.Tensor]) -> LlamaForCausalLM:
    """The stock model with trained weights."""
    ids = vocabulary()
    kv_heads = len(state["model.layers.0.self_attn.k_proj.weight"]) // HEAD_DIM
    special = {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[EOS]}
    config = LlamaConfig(
        vocab_size=len(ids), hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=kv_heads, head_dim=HEAD_DIM, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": THETA}, max_position_embeddings=MAX_POSITIONS,
        **special,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    missing = model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    assert not missing.missing_keys, missing
    assert not missing.unexpected_keys, missing
    model.generation_config = GenerationConfig(**special, do_sample=False, max_new_tokens=4)
    return model


def pick_questions(net: Net) -> list[dict[str, Any]]:
    """Choose prompts for a first try, by rule.

    Held-out examples are taken in the order of sampling with `QUESTIONS_SEED`, from depth 2 on; kept are the first
    that full prefill answers and full reuse does not. They show what fails without recomputing, not how often.
    """
    kept: list[dict[str, Any]] = []
    for example in sample_examples(100, QUESTIONS_SEED, level=LONGEST):
        one = Emulation(net, prompt := encode(example))
        if example.depth >= 2 and is_right(one.full, prompt) and not is_right(one.reuse(), prompt):
            kept.append(
                {"prefix": "", "chunks": example.chunks, "question": example.question, "answer": example.answer}
            )
        if len(kept) == QUESTIONS:
            return kept
    raise RuntimeError(
        f"{len(kept)} of 100 examples show the difference, expected {QUESTIONS}. Train the model further."
    )


def main() -> None:
    """Read the command line and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of the training run")
    parser.add_argument("--to", type=Path, required=True, help="where the model goes")
    options = parser.parse_args()
    state = torch.load(options.folder / "checkpoint.pt", weights_only=True)
    model = build(state["net"])
    model.save_pretrained(options.to)
    build_tokenizer().save_pretrained(options.to)
    place = state["place"]
    record = {
        "seed": state["seed"],
        "tokens": place["tokens"],
        "minutes": round(place["seconds"] / 60, 1),
        "parameters": model.num_parameters(),
        "late_reading_from_layer": READS,
        "stages": [asdict(stage) for stage in STAGES[: place["stage"] + 1]],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    net = Net.of(state["net"])
    (options.to / "questions.json").write_text(json.dumps(pick_questions(net), indent=1) + "\n")
    (options.to / "training.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
