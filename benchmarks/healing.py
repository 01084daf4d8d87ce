# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How far a conversation is from stock's when its blended cache was healed in part between the turns.

    python benchmarks/healing.py run --model smollm2 --data DIR --limit 24
    python benchmarks/healing.py table

Ten passages and a question of HotpotQA, then two further questions that are the same for all. Stock answers all three
turns with at most 20 tokens. The blended conversation is told the same answers; after each, so large a share of what
is not exact is healed. The error of a turn is the KL divergence of the next-token distributions from stock's, in nats,
mean over the first ten tokens of stock's answer. `run` appends a line per prompt and skips those that are there;
`table` writes `benchmarks/results/healing.json`.

The cost: healing all of the first turn beside stock's prefill of the same tokens in blocks of 256, CPU seconds of one
thread, one after the other in one process, on the first prompts.
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
from real_selectors import RESULTS, Bench, Method, _commit, read_rows, rows_so_far
from robust import TOKENS, prompts
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.cache.healing import BLOCK_TOKENS

PASSAGES = 10
ANSWER_TOKENS = 20
COMPARED_TOKENS = 10
TOKENS[PASSAGES] = (800, 2400)
FURTHER = ("Which sentence of the documents says so?", "Say it again in a few words.")
TURN = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # of both models' templates
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
RATIO_PROMPTS = 2  # the ratio of the default's charge is found on these, which are not reported
TIMED_PROMPTS = 8  # at most: `--timed`
DEFAULT = Method(f"{BlendConfig.selector}@text=0.15")
REUSE = Method("none@text=0")


class Stock:
    """Stock's conversation over one prompt: the tokens of each turn and answer, and what stock thought of these."""

    def __init__(self, bench: Bench, prompt: Tensor) -> None:
        self.turns, self.answers, self.logs = [prompt[0]], list[Tensor](), list[Tensor]()
        for question in (*FURTHER, None):
            cache = DynamicCache(config=bench.model.config)
            logits = bench.model(self.ids()[None], past_key_values=cache, logits_to_keep=1).logits[:, -1]
            answer, logs = bench.continued(cache, logits, ANSWER_TOKENS)
            answer = answer[:-1] if len(answer) > 1 and int(answer[-1]) == bench.tokenizer.eos_token_id else answer
            self.answers.append(answer)
            self.logs.append(logs[: len(answer)][:COMPARED_TOKENS])
            if question is not None:
                ids = bench.tokenizer(TURN.format(question), add_special_tokens=False).input_ids
                self.turns.append(torch.tensor(ids))

    def ids(self, turns: int = 3) -> Tensor:
        """All tokens so far, of the first turns and their answers, `[tokens]`."""
        pieces = zip(self.turns[:turns], [*self.answers, torch.tensor([], dtype=torch.long)], strict=False)
        return torch.cat([ids for pair in pieces for ids in pair])

    def turn(self, bench: Bench, cache: BlendCache, number: int, before: Tensor | None = None) -> float:
        """Let a cache read a turn with stock's answer; gives its divergence from stock's.

        The cache holds all before the turn, or, with the logits `before`, `[1, words]`, its question, too.
        """
        ids = self.ids(number + 1)
        answer = self.answers[number]
        new = ids[None, cache.get_seq_length() : -1]
        kept = len(answer) - (before is not None)
        logits = [] if before is None else [before]
        if kept:
            logits.append(bench.model(new, past_key_values=cache, logits_to_keep=kept).logits[0])
        return divergence(self.logs[number], torch.log_softmax(torch.cat(logits)[:COMPARED_TOKENS].float(), -1))


def divergence(full: Tensor, logs: Tensor) -> float:
    """Mean KL divergence in nats; both `[tokens, words]`."""
    return float((full.exp() * (full - logs)).sum(-1).mean())


def blended(
    bench: Bench, row: dict[str, Any], store: ChunkStore, method: Method, ratio: float
) -> tuple[BlendCache, Tensor]:
    """A cache that holds a blended prompt, and the logits behind it, `[1, words]`."""
    cache = BlendCache(bench.model, store, chunk_prefix_ids=bench.contexts[method.context], **method.settings(ratio))
    return cache, bench.model(**bench.inputs(cache, row), past_key_values=cache, logits_to_keep=1).logits[0]


def measured(bench: Bench, row: dict[str, Any], ratio: float, is_timed: bool) -> dict[str, Any]:
    """The divergences of every turn, by method and share that is healed behind each answer."""
    store = ChunkStore.open("memory://")
    prompt = bench.inputs(BlendCache(bench.model, store), row)["input_ids"]
    stock = Stock(bench, prompt)
    kl = dict[str, list[float]]()
    blended(bench, row, store, REUSE, 0.0)  # stores the chunks
    for name, method, shares in (("reuse", REUSE, SHARES[:1]), ("default", DEFAULT, SHARES)):
        (cache, logits), healed = blended(bench, row, store, method, ratio if method is DEFAULT else 0.0), 0
        charged = cache.report.charged_budget
        first = stock.turn(bench, cache, 0, logits)
        left = cache.heal(0)
        for share in shares:
            cache.heal(round(share * left) - healed)
            healed = round(share * left)
            copied = copy.deepcopy(cache)
            second = stock.turn(bench, copied, 1)
            copied.heal(round(share * copied.heal(0)))
            kl[f"{name} {share:.2f}"] = [round(value, 6) for value in (first, second, stock.turn(bench, copied, 2))]
    line = {"id": row["id"], "tokens": prompt.shape[1], "charged": round(charged, 4), "kl": kl}
    return {**line, **(cost(bench, row, store, ratio, stock) if is_timed else {})}


def cost(bench: Bench, row: dict[str, Any], store: ChunkStore, ratio: float, stock: Stock) -> dict[str, Any]:
    """CPU seconds of healing the first turn, and of stock's prefill of these tokens in blocks, in turns."""
    ids = stock.ids(1)[None, :-1]
    heal_s = list[float]()
    stock_s = list[float]()
    for _ in range(3):
        cache, logits = blended(bench, row, store, DEFAULT, ratio)
        stock.turn(bench, cache, 0, logits)
        first = cache.get_seq_length() - cache.heal(0)
        began = time.process_time()
        cache.heal()
        heal_s.append(time.process_time() - began)
        plain = DynamicCache(config=bench.model.config)
        bench.model(ids[:, :first], past_key_values=plain, logits_to_keep=1)
        began = time.process_time()
        for block in ids[:, first:].split(BLOCK_TOKENS, 1):
            bench.model(block, past_key_values=plain, logits_to_keep=1)
        stock_s.append(time.process_time() - began)
    return {"heal_s": round(statistics.median(heal_s), 3), "stock_s": round(statistics.median(stock_s), 3)}


def run(arguments: argparse.Namespace) -> None:
    """Measure what is not measured yet."""
    bench = Bench(parted_models.locate(arguments.model), {}, dtype=arguments.dtype)
    rows = prompts(arguments.data / "hotpotqa_natural.jsonl", bench, PASSAGES)
    ratio = bench.ratio(DEFAULT, rows[:RATIO_PROMPTS])
    path = arguments.rows / f"{arguments.model}.jsonl"
    done = {line["id"] for line in rows_so_far(path)}
    with path.open("a", encoding="utf-8") as file:
        for number, row in enumerate(rows[RATIO_PROMPTS:][: arguments.limit]):
            if row["id"] not in done:
                line = {"dtype": str(bench.model.dtype)[6:], **measured(bench, row, ratio, number < arguments.timed)}
                file.write(json.dumps(line) + "\n")
                file.flush()


def table(arguments: argparse.Namespace) -> None:
    """Write the table of all rows, and print it."""
    results = []
    for path in sorted(arguments.rows.glob("*.jsonl")):
        lines = read_rows(path)
        about = {"model": path.stem, "dtype": lines[0]["dtype"], "n": len(lines),
                 "tokens": round(statistics.median(line["tokens"] for line in lines)),
                 "charged": round(statistics.mean(line["charged"] for line in lines), 3)}  # fmt: skip
        timed = [line["heal_s"] / line["stock_s"] for line in lines if "heal_s" in line]
        about["timed"] = len(timed)
        about["heal_of_stock"] = round(statistics.median(timed), 3) if timed else None
        for name in lines[0]["kl"]:
            turns = [[line["kl"][name][turn] for line in lines] for turn in range(3)]
            results.append({
                **about, "method": name,
                "kl": [round(statistics.mean(turn), 6) for turn in turns],
                "kl_median": [round(statistics.median(turn), 6) for turn in turns],
            })  # fmt: skip
            print(path.stem, len(lines), name, results[-1]["kl"], results[-1]["kl_median"], about["heal_of_stock"])
    text = ",\n".join("  " + json.dumps(row) for row in results)
    settings = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": 1,
        "commit": _commit(),
    }
    arguments.output.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n', "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--model", required=True)
    runs.add_argument("--dtype", default="auto")
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--limit", type=int, default=24)
    runs.add_argument("--timed", type=int, default=TIMED_PROMPTS)
    runs.set_defaults(act=run)
    tables = commands.add_parser("table")
    tables.add_argument("--output", type=Path, default=RESULTS / "healing.json")
    tables.set_defaults(act=table)
    for command in (runs, tables):
        command.add_argument("--rows", type=Path, default=RESULTS / "healing")
    chosen = parser.parse_args()
    chosen.act(chosen)
