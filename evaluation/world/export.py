# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Write the package data: the trained model with its tokenizer, and a few documents to try it on.

`python -m hf_blend.evaluation.world.export --checkpoint run/checkpoint.pt`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, LlamaForCausalLM

import hf_blend
from hf_blend.errors import StoreError

from .batches import pack
from .sampling import Example, Question, sample_examples
from .scoring import score, score_examples
from .stages import STAGES
from .tokens import BOS, EOS, build_tokenizer, vocabulary
from .train import SEED, read_checkpoint

BUNDLED = Path(hf_blend.__file__).resolve().parent / "bundled"
MAX_WEIGHT_BYTES = 16_000_000
TESTED_EXAMPLES = 1000
DOCUMENT_SEED = 7
DOCUMENT_SETS = 4


def export_model(model: LlamaForCausalLM, folder: Path, record: dict) -> None:
    """Save weights, tokenizer, generation config and the record of the training.

    Args:
        model: the trained model.
        folder: where everything goes; files of the same names are replaced.
        record: what `training.json` says.
    """
    ids = vocabulary()
    model.generation_config = GenerationConfig(
        bos_token_id=ids[BOS], eos_token_id=ids[EOS], pad_token_id=ids[EOS], do_sample=False, max_new_tokens=8
    )
    model.eval().save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    weight_bytes = (folder / "model.safetensors").stat().st_size
    if weight_bytes > MAX_WEIGHT_BYTES:
        raise StoreError(
            f"model.safetensors has {weight_bytes} bytes, but at most {MAX_WEIGHT_BYTES} may be shipped. "
            "Train fewer or narrower layers."
        )


def training_record(model: LlamaForCausalLM, progress: dict) -> dict:
    """Say how the model came to be and what it scores on held-out examples, by kind."""
    examples = sample_examples(TESTED_EXAMPLES, seed=0)
    scores = {
        way: {kind: {"exact_match": share, "n": count} for kind, (share, count) in found.items()}
        for way, found in score_examples(model, examples).items()
    }
    return {
        "seed": SEED,
        "tokens": progress["tokens"],
        "minutes": round(progress["seconds"] / 60, 1),
        "parameters": model.num_parameters(),
        "stages": [asdict(stage) for stage in STAGES],
        "heldout": {"split": "heldout", "seed": 0, "examples": TESTED_EXAMPLES, "scores": scores},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def pick_documents(model: LlamaForCausalLM) -> list[list[Example]]:
    """Choose document sets for a quickstart, by rule.

    Held-out stories are taken in order of sampling with `DOCUMENT_SEED`; of each, up to four questions that lean on
    another chunk are asked. The first sets whose questions full prefill answers all, and full reuse gets mostly wrong,
    are kept. So they show where reuse fails; they do not show how often.
    """
    sets = []
    for example in sample_examples(200, DOCUMENT_SEED):
        asked = _leaning(example)
        right = score_examples(model, asked)
        if len(asked) == 4 and right["full"]["all"][0] == 1 and right["reuse"]["all"][0] < 0.5:
            sets.append(asked)
        if len(sets) == DOCUMENT_SETS:
            break
    return sets
