# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Write the trained model with its tokenizer, and a few documents to try it on.

`python benchmarks/reference_model/world_export.py --checkpoint run/checkpoint.pt`
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
import transformers
from transformers import GenerationConfig, LlamaForCausalLM
from world_scoring import score_examples
from world_stages import STAGES
from world_train import SEED, Progress, read_checkpoint
from worlds.world.sampling import Example, examples_of, sample_examples
from worlds.world.story import Level, tell
from worlds.world.tokens import BOS, EOS, build_tokenizer, vocabulary

from hf_blend.errors import StoreError

WORLDS = Path(__file__).resolve().parents[1] / "worlds"
MAX_WEIGHT_BYTES = 16_000_000
TESTED_EXAMPLES, TESTED_SEED = 1000, 1
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


def training_record(model: LlamaForCausalLM, progress: Progress, remark: str) -> dict:
    """Say how the model came to be and what it scores on held-out examples, by kind."""
    examples = sample_examples(TESTED_EXAMPLES, seed=TESTED_SEED)
    names = [stage.name for stage in STAGES]
    kinds = Counter(example.kind for example in examples)
    return {
        "seed": SEED,
        "remark": remark,
        "tokens": progress.tokens,
        "minutes": round(progress.seconds / 60, 1),
        "parameters": model.num_parameters(),
        "stages": [asdict(stage) for stage in STAGES[: names.index(progress.stage) + 1]],
        "heldout": {
            "split": "heldout",
            "seed": TESTED_SEED,
            "n": {"all": len(examples), **dict(sorted(kinds.items()))},
            "exact_match": score_examples(model, examples),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def pick_documents(model: LlamaForCausalLM) -> list[list[Example]]:
    """Choose document sets for a quickstart, by rule.

    Held-out stories are taken in the order of sampling with `DOCUMENT_SEED`; of each, the first four questions that
    lean on another chunk are asked. Kept are the first stories of which full prefill answers all four and full reuse
    at most one. So they show what fails without recomputing; they do not show how often.
    """
    random = Random(DOCUMENT_SEED)
    kept: list[list[Example]] = []
    while len(kept) < DOCUMENT_SETS:
        leaning = [one for one in examples_of(tell(random, Level(), heldout=True)) if one.kind != "explicit"][:4]
        if len(leaning) < 4:
            continue
        right = score_examples(model, leaning)
        if right["full"]["all"] == 1 and right["reuse"]["all"] <= 0.25:
            kept.append(leaning)
    return kept


def export_documents(sets: list[list[Example]], path: Path) -> None:
    """Write all questions with their chunks."""
    records = [
        {"story": number, **asdict(example)} for number, examples in enumerate(sets, start=1) for example in examples
    ]
    path.write_text(json.dumps(records, indent=1) + "\n")


def main() -> None:
    """Read the command line and write all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file written by the training program")
    parser.add_argument("--folder", type=Path, default=WORLDS, help="where models/ and questions.json go")
    parser.add_argument("--remark", default="", help="what training.json should say about this run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, progress, _ = read_checkpoint(options.checkpoint)
    export_model(model, options.folder / "models" / "reference", training_record(model, progress, options.remark))
    export_documents(pick_documents(model), options.folder / "questions.json")


if __name__ == "__main__":
    main()
