# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What chains, and documents in the order that continues them, bring over a trace of requests.

    python benchmarks/chain_trace.py run --model smollm2 --data DIR --stores FOLDER
    python benchmarks/chain_trace.py table

100 questions of HotpotQA, and 200 documents: for each question the two of its passages that share most rare words with
it, one of which holds the answer. 500 requests draw a question by Zipf's law; BM25 gives the six documents of a
prompt, best first. Each way has a store of its own: `blend` by the default rule; `chains` heals each prompt behind its
answer and stores its chain; `order` also puts first what continues the longest chain. A share of tokens is exact that
was loaded from a chain. Every tenth request (`--every`) is compared with stock's full prefill of the same prompt: KL
divergence of the next-token distributions, in nats, mean over the first ten tokens of stock's greedy answer, and the
F1 of both answers. Times are one thread's CPU to the first token. `run` appends a line per request and way, and goes
on where it was stopped if the stores are still there.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import bm25s
import parted_models
import torch
from edits import COMPARED_TOKENS, divergence
from real_selectors import RESULTS, Bench, _commit, read_rows, rows_so_far
from robust import passages

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.retrieving import words_of
from hf_blend.evaluation.scores.word_f1 import WordF1

SEED = 13
QUESTIONS, REQUESTS, DOCUMENTS = 100, 500, 6
ANSWER_TOKENS = 20
WAYS = ("blend", "chains", "order")
Row = dict[str, Any]


def requests(folder: Path) -> list[Row]:
    """The rows of the trace, in its order: a question, its answers, the documents that BM25 gives, the best first."""
    rows = read_rows(folder / "hotpotqa_natural.jsonl")
    draw = random.Random(SEED)
    draw.shuffle(rows)
    asked = [row for row in rows if len(row["chunks"]) > 1][:QUESTIONS]
    documents = list(dict.fromkeys(text for row in asked for text in passages(row, 2)))
    index = bm25s.BM25()
    index.index([words_of(text) for text in documents], show_progress=False)
    for row in asked:
        numbers, _ = index.retrieve([words_of(row["question"])], k=DOCUMENTS, show_progress=False)
        row["chunks"] = [documents[number] for number in numbers[0].tolist()]
    return draw.choices(asked, [1 / (rank + 1) for rank in range(QUESTIONS)], k=REQUESTS)


def measured(bench: Bench, row: Row, way: str, store: ChunkStore, compare: bool) -> Row:
    """Ask one request in one way, and heal its prompt where the way says so."""
    began = time.process_time()
    if way == "order":
        row = row | {"chunks": store.order(bench.model, bench.tokenizer, row["chunks"])}
    cache = BlendCache(bench.model, store, chains=way != "blend")
    ids = bench.inputs(cache, row)["input_ids"]
    first = bench.model(ids, past_key_values=cache, logits_to_keep=1).logits[0]
    report = cache.report
    found = {
        "ms": round(1e3 * (time.process_time() - began), 1),
        "tokens": report.prompt_tokens,
        "exact": report.exact_tokens,
        "reusable": report.reusable_tokens,
        "computed_chunks": report.computed_chunks,
    }
    if compare:
        answer, logs, full_ms = bench.full(ids, ANSWER_TOKENS)
        compared = slice(0, COMPARED_TOKENS)
        found["kl"] = divergence(bench, cache, first, (answer[compared], logs[compared]))
        answered, _ = bench.continued(cache, first, ANSWER_TOKENS)
        cache.crop(1 - len(answered) if len(answered) > 1 else len(ids[0]))
        found["full_ms"] = round(full_ms, 1)
        for name, tokens in {"f1": answered, "full_f1": answer}.items():
            found[name] = WordF1().best(bench.tokenizer.decode(tokens, skip_special_tokens=True), row["answers"])
    if way != "blend":
        cache.heal()
    return found


def run(arguments: argparse.Namespace) -> None:
    """Go on with the trace."""
    bench = Bench(parted_models.locate(arguments.model), {}, dtype=arguments.dtype)
    path = arguments.rows / f"{arguments.model}.jsonl"
    lines = rows_so_far(path)
    done = {(line["request"], line["way"]) for line in lines}
    stores = {way: ChunkStore.open(str(arguments.stores / way)) for way in WAYS}
    asked = set()
    for number, row in enumerate(requests(arguments.data)):
        for way in WAYS:
            if (number, way) not in done:
                found = measured(bench, row, way, stores[way], number % arguments.every == 0)
                line = {"request": number, "id": row["id"], "way": way, "again": row["id"] in asked, **found}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
        asked.add(row["id"])


def table(arguments: argparse.Namespace) -> None:
    """Write the table of all rows, and print it: all requests, and those whose question was not asked before."""
    results = []
    for path in sorted(arguments.rows.glob("*.jsonl")):
        lines = read_rows(path)
        for requests_of in ("all", "new"):
            for way in WAYS:
                some = [line for line in lines if line["way"] == way and not (requests_of == "new" and line["again"])]
                results.append({"model": path.stem, "requests": requests_of, "way": way, **summarised(some)})
                print(*results[-1].values())
    text = ",\n".join("  " + json.dumps(row) for row in results)
    settings = {"seed": SEED, "threads": 1, "torch": torch.__version__, "commit": _commit()}
    content = f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n'
    (RESULTS / "chain_trace.json").write_text(content, "utf-8")


def summarised(lines: list[Row]) -> Row:
    """The figures of one way."""
    compared = [line for line in lines if "kl" in line]
    row: Row = {
        "n": len(lines),
        "exact": round(sum(line["exact"] for line in lines) / sum(line["tokens"] for line in lines), 4),
        "ms_median": round(statistics.median(line["ms"] for line in lines), 1),
        "n_compared": len(compared),
        "kl_median": round(statistics.median(line["kl"] for line in compared), 5),
        "speed": round(statistics.median(line["full_ms"] / line["ms"] for line in compared), 2),
    }
    for name in ("kl", "f1", "full_f1"):
        row[name] = round(statistics.fmean(line[name] for line in compared), 5)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--every", type=int, default=10, help="compare one request of so many")
    parser.add_argument("--data", type=Path, help="the folder of the inputs")
    parser.add_argument("--stores", type=Path, default=Path("chain-stores"), help="a folder for the stores, some GB")
    parser.add_argument("--rows", type=Path, default=RESULTS / "chain_trace")
    chosen = parser.parse_args()
    {"run": run, "table": table}[chosen.command](chosen)
