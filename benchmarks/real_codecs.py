# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What the codecs of a store change on a real model: bytes, time to load, and the distance to a full prefill.

    python benchmarks/real_codecs.py --model smollm2 --rows hotpotqa_natural.jsonl --output real_codecs.json

Each prompt is some passages and a question of a file of JSON lines (`chunks`, `question`), in the model's chat
template. Its chunks are computed once and put into one store on disk for each codec, which holds nothing in memory.
With each store the prompt is blended at full reuse and with the default settings. KL is that of the full prefill's
distribution to the blended one: of the first token, and the mean over ten, the full prefill's own greedy tokens.
Loading is CPU time, from files that the system has in its memory.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.summary import interval
from hf_blend.version import __version__

CODECS = ("raw", "int8")
WAYS = {"full reuse": BlendConfig(selector="none", recompute_ratio=0.0), "default": BlendConfig()}
STEPS = 10


@torch.no_grad()
def continued(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The greedy tokens behind a full prefill, all but the last, and the distributions they come from."""
    cache = DynamicCache()
    rows = []
    logits = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
    tokens = []
    for step in range(STEPS):
        rows.append(logits.log_softmax(-1))
        if step < STEPS - 1:
            tokens.append(int(logits.argmax()))
            logits = model(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1]
    return torch.tensor([tokens]), torch.stack(rows)


@torch.no_grad()
def distance(model: Any, given: tuple[Any, ...], store: ChunkStore, config: BlendConfig, full: Any) -> dict[str, Any]:
    """KL of a blended prompt to the full prefill: of the first token, and the mean over all."""
    tokens, expected = full
    cache = BlendCache(model, store, config)
    inputs = cache.inputs_from_messages(given[0], given[1], documents=given[2])
    first = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1:]
    if cache.report.computed_chunks:
        raise RuntimeError(f"the store lacked {cache.report.computed_chunks} chunks, expected all of them there")
    steps = [model(tokens[:, [at]], past_key_values=cache, use_cache=True).logits[0, -1:] for at in range(STEPS - 1)]
    got = torch.cat((first, *steps)).log_softmax(-1)
    kl = (expected.exp() * (expected - got)).sum(-1)
    return {"first_token_kl": float(kl[0]), "ten_tokens_kl": float(kl.mean()), "charge": cache.report.charged_budget}


def ask(model: Any, tokenizer: Any, row: dict[str, Any], passages: int) -> list[dict[str, Any]]:
    """Blend one prompt from the stores of all codecs.

    Args:
        model: of transformers.
        tokenizer: its tokenizer, with a chat template.
        row: of the file.
        passages: how many of its chunks.

    Returns:
        Figures by codec and way.
    """
    chunks = row["chunks"][:passages]
    messages = [{"role": "user", "content": "\n\n".join([*chunks, row["question"]])}]
    found = []
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open("memory://") as memory:
        computed = list[Any]()
        put = memory.put
        memory.put = lambda chunk: (computed.append(chunk), put(chunk))[1]  # type: ignore[method-assign]
        first = BlendCache(model, memory, WAYS["full reuse"])
        inputs = first.inputs_from_messages(tokenizer, messages, documents=chunks)
        with torch.no_grad():
            model(**inputs, past_key_values=first, use_cache=True, logits_to_keep=1)
        full = continued(model, inputs)
        for codec in CODECS:
            with ChunkStore.open(Path(folder) / codec, codec=codec, memory_bytes=0, durability="none") as store:
                for chunk in computed:
                    store.put(chunk)
                began = time.process_time()
                loaded = [store.get(chunk.key) for chunk in computed]
                load_ms = 1e3 * (time.process_time() - began)
                tokens = sum(chunk.tokens for chunk in loaded)
                size = sum(entry.nbytes for entry in store.entries()) / tokens
                about = {"codec": codec, "bytes_per_token": size, "load_ms_per_1000_tokens": 1e3 * load_ms / tokens}
                for way, config in WAYS.items():
                    near = distance(model, (tokenizer, messages, chunks), store, config, full)
                    found.append({**about, "way": way, "tokens": first.report.prompt_tokens, **near})
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Means and intervals of each codec and way, and the means' distances from those of raw."""
    found: dict[str, dict[str, Any]] = {}
    for codec in CODECS:
        own = [row for row in rows if row["codec"] == codec]
        found[codec] = {name: statistics.fmean(row[name] for row in own) for name in own[0] if name.endswith("token")}
        found[codec]["load_ms_per_1000_tokens"] = statistics.median(row["load_ms_per_1000_tokens"] for row in own)
        for way in WAYS:
            pairs = [
                (row, raw)
                for row in own
                for raw in rows
                if (raw["codec"], raw["prompt"], raw["way"], row["way"]) == ("raw", row["prompt"], way, way)
            ]
            about = found[codec][way] = {}
            for name in ("first_token_kl", "ten_tokens_kl"):
                about[name] = statistics.fmean(row[name] for row, _ in pairs)
                changes = [row[name] - raw[name] for row, raw in pairs]
                about[f"{name}_over_raw"] = {"mean": statistics.fmean(changes), "interval": interval(changes)}
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines with chunks and question")
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--passages", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("real_codecs.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(given.model)
    lines = given.rows.read_text(encoding="utf-8").splitlines()[: given.count]
    rows = []
    for number, line in enumerate(lines):
        rows += [{"prompt": number, **one} for one in ask(model, tokenizer, json.loads(line), given.passages)]
        result = {
            "model": given.model,
            "dtype": str(model.dtype).removeprefix("torch."),
            "rows": given.rows.name,
            "prompts": number + 1,
            "passages": given.passages,
            "machine": {
                "device": platform.processor() or "cpu",
                "threads": 1,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "hf_blend": __version__,
            },
            "codecs": summary(rows),
            "each": rows,
        }
        given.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
