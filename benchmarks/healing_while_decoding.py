# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Does it help to heal while an answer is written? A block every eight tokens, behind a blended prompt.

    python benchmarks/healing_while_decoding.py --model smollm2 --data DIR --limit 24

Six passages and a question of HotpotQA, and stock's greedy answer of 40 tokens, none of which ends it, told to a
blended cache in steps of eight. Behind each step so many tokens of the prompt are healed. The error is the KL
divergence of the next-token distributions from stock's, in nats, mean over tokens 1 to 10 and 11 to 40. `decode_s` and
`heal_s` are CPU seconds of one thread: of eight tokens that are decoded one at a time, and of what is healed behind
the first eight. What is measured is added to `benchmarks/results/healing_while_decoding.json`.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import parted_models
import torch
import transformers
from healing import DEFAULT, RATIO_PROMPTS, blended, divergence
from real_selectors import RESULTS, Bench, _commit
from robust import prompts
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore

PASSAGES, TOKENS, STEP, PARTS = 6, 40, 8, ((0, 10), (10, 40))
RATES = (0, 8, 32)  # tokens that are healed for each that is decoded


def stock_answer(bench: Bench, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Stock's greedy answer, `[tokens]`, and the log probabilities of each token, `[tokens, words]`."""
    cache, ids, logs = DynamicCache(config=bench.model.config), prompt, list[Tensor]()
    for _ in range(TOKENS):
        logits = bench.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].float()
        logs.append(logits.log_softmax(-1)[0])
        logits[:, bench.tokenizer.eos_token_id] = -torch.inf
        ids = logits.argmax(-1)[None]
        prompt = torch.cat([prompt, ids], 1)
    return prompt[0, -TOKENS:], torch.stack(logs)


@torch.no_grad()
def measured(bench: Bench, row: dict[str, Any], ratio: float) -> dict[str, Any]:
    """The errors of one prompt by rate, and what a step costs."""
    store = ChunkStore.open("memory://")
    prompt = bench.inputs(BlendCache(bench.model, store), row)["input_ids"]
    answer, logs = stock_answer(bench, prompt)
    whole, first = blended(bench, row, store, DEFAULT, ratio)
    line: dict[str, Any] = {"id": row["id"], "tokens": prompt.shape[1], "kl": {}}
    for rate in RATES:
        cache, got, heal_s = copy.deepcopy(whole), [first], list[float]()
        for step in answer[:-1].split(STEP):
            got.append(bench.model(step[None], past_key_values=cache).logits[0])
            began = time.process_time()
            if rate:
                cache.heal(rate * STEP)
            heal_s.append(time.process_time() - began)
        found = torch.log_softmax(torch.cat(got).float(), -1)
        line["kl"][str(rate)] = [round(divergence(logs[start:stop], found[start:stop]), 6) for start, stop in PARTS]
        line[f"heal_s_{rate}"] = round(heal_s[0], 4)
    began = time.process_time()
    for token in answer[:STEP]:
        bench.model(token[None, None], past_key_values=whole)
    return {**line, "decode_s": round((time.process_time() - began) * STEP / len(answer[:STEP]), 4)}


def main() -> None:
    """Measure what is not measured yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--output", type=Path, default=RESULTS / "healing_while_decoding.json")
    arguments = parser.parse_args()
    bench = Bench(parted_models.locate(arguments.model), {})
    rows = prompts(arguments.data / "hotpotqa_natural.jsonl", bench, PASSAGES)
    ratio = bench.ratio(DEFAULT, rows[:RATIO_PROMPTS])
    path: Path = arguments.output
    lines = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    for row in rows[RATIO_PROMPTS:][: arguments.limit]:
        if row["id"] in {line["id"] for line in lines}:
            continue
        lines.append(measured(bench, row, ratio))
        print(json.dumps(lines[-1]), flush=True)
        summary = {
            str(rate): {
                f"kl_{start + 1}_to_{stop}": [
                    round(figure(line["kl"][str(rate)][part] for line in lines), 5)
                    for figure in (statistics.mean, statistics.median)
                ]
                for part, (start, stop) in enumerate(PARTS)
            }
            | {"heal_of_decode": round(statistics.median(one[f"heal_s_{rate}"] / one["decode_s"] for one in lines), 2)}
            for rate in RATES
        }
        settings = {
            "model": arguments.model, "n": len(lines), "torch": torch.__version__, "threads": 1,
            "transformers": transformers.__version__, "commit": _commit(),
        }  # fmt: skip
        text = ",\n".join("  " + json.dumps(line) for line in lines)
        head = f'"settings": {json.dumps(settings)},\n"by_rate": {json.dumps(summary)}'
        path.write_text(f'{{{head},\n"rows": [\n{text}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
