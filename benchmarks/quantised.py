# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blending of quantised weights (bitsandbytes): how far blended prompts are from the same model's own full prefill.

    python benchmarks/quantised.py --model smollm2 --kind 8 --rows hotpotqa_natural.jsonl --output quantised.json

Each prompt is some passages and a question of a file of JSON lines (`chunks`, `question`), as text. KL is that of the
full prefill's distribution of the first token to another one's: of the plain model in two blocks, which is the noise
of the model itself, with every token recomputed, with the default rule at a ratio of 0.15, and at full reuse. Figures
of a model, a kind and a dtype replace earlier ones in the output; `--table` prints all as docs/models.md has them.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.bundled import open_model
from hf_blend.version import __version__

KINDS: dict[str, dict[str, Any]] = {
    "8 bits": {"load_in_8bit": True},
    "8 bits, threshold 0": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "4 bits": {"load_in_4bit": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "all computed": {"recompute_ratio": 1.0},
    "ratio 0.15": {"recompute_ratio": 0.15},
    "full reuse": {"recompute_ratio": 0.0, "selector": "none"},
}
DTYPES = ("float32", "bfloat16")
COLUMNS = ("two blocks", *WAYS)


def load(name: str, kind: str, dtype: str) -> tuple[Any, Any]:
    """A model with quantised weights, and its tokenizer."""
    source = open_model(name)
    how = BitsAndBytesConfig(**KINDS[kind], bnb_4bit_compute_dtype=getattr(torch, dtype))
    model = AutoModelForCausalLM.from_pretrained(
        source.folder, dtype=dtype, device_map={"": "cpu"}, quantization_config=how
    )
    return model.eval(), source.tokenizer


@torch.no_grad()
def first_token(model: Any, parts: list[Tensor], cache: Any) -> Tensor:
    """Log probabilities of the token behind a prompt that comes in parts, `[vocabulary]`."""
    for part in parts:
        logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float().log_softmax(-1)


def measure(model: Any, tokenizer: Any, row: dict[str, Any], passages: int) -> dict[str, float]:
    """KL of one prompt by column, in nats."""
    chunks = row["chunks"][:passages]
    text = "\n\n".join([*chunks, row["question"]])
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    full = first_token(model, [ids], DynamicCache(config=model.config))
    found = {"two blocks": first_token(model, list(ids.tensor_split(2, dim=1)), DynamicCache(config=model.config))}
    with ChunkStore.open("memory://") as store:
        for way, settings in WAYS.items():
            cache = BlendCache(model, store, **settings)
            inputs = cache.inputs_from_text(tokenizer, text, chunks)
            found[way] = first_token(model, [inputs["input_ids"]], cache)
            if not cache.report.reusable_tokens or cache.report.refused_chunks:
                raise RuntimeError(f"chunks were not reused: {cache.report}")
    return {name: float((full.exp() * (full - got)).sum()) for name, got in found.items()}


def table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/models.md: means, of float32 and of bfloat16."""
    lines = [f"| model, bits | {' | '.join(COLUMNS)} |", f"|{'---|' * (len(COLUMNS) + 1)}"]
    by_dtype = {(row["model"], row["kind"], row["dtype"]): row for row in rows}
    for model, kind in dict.fromkeys((row["model"], row["kind"]) for row in rows):
        cells = [f"{model}, {kind}"]
        for name in COLUMNS:
            both = [by_dtype.get((model, kind, dtype)) for dtype in DTYPES]
            cells.append("/".join("-" if row is None else f"{statistics.fmean(row[name]):.3f}" for row in both))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--kind", choices=KINDS, default="8 bits")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--rows", type=Path, help="JSON lines with chunks and question")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--passages", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/quantised.json"))
    parser.add_argument("--table", action="store_true", help="print what was measured")
    given = parser.parse_args()
    rows = json.loads(given.output.read_text()) if given.output.exists() else []
    if given.table:
        print(table(rows))
        return
    torch.set_num_threads(1)
    model, tokenizer = load(given.model, given.kind, given.dtype)
    lines = given.rows.read_text(encoding="utf-8").splitlines()[: given.count]
    each = [measure(model, tokenizer, json.loads(line), given.passages) for line in lines]
    about = {"model": given.model, "kind": given.kind, "dtype": given.dtype}
    kept = [row for row in rows if any(row[name] != value for name, value in about.items())]
    figures = {name: [round(one[name], 5) for one in each] for name in COLUMNS}
    kept.append({**about, "prompts": len(each), "passages": given.passages, "hf_blend": __version__, **figures})
    given.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
