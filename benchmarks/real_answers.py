# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Answers of a real model to questions that it can answer: the year in which one of six persons, or the older of two
of them, was born.

    python benchmarks/real_answers.py run --data hotpotqa.jsonl musique.jsonl --methods none=0 boundary=0.1
    python benchmarks/real_answers.py run --hops 2 --model qwen2.5-coder-1.5b --dtype bfloat16 --data …
    python benchmarks/real_answers.py table

The persons are those of the data whose passage begins with their name and gives the year of birth in parentheses. A
prompt has the passages of six of them in random order, and asks for the year of one (one hop), or of the older of two
(two hops). The answer is the year, of those in which the six were born, that the model finds most likely behind the
prompt; each person is asked about in turn.
Nothing is chosen by these prompts: the methods are fixed before. `run` appends a row per prompt and method and skips
what is there; methods and charges are written as for `real_selectors.py`. `table` writes
`benchmarks/results/real_answers.json`, with intervals over persons.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import parted_models
import torch
from real_selectors import Bench, Method, command_line, read_rows, rows_so_far
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore

PASSAGES = 6
WORDS = (40, 160)  # of a passage
SEED = 11
SHARES = (("right", 1, 0), ("of_full", 1, 2), ("kept", 3, 2))  # of what is counted, by columns
BORN = re.compile(
    r"^(?:[^\n]*\n+)?\s*[A-Z][\w.'\u2019\-]+(?: [A-Z][\w.'\u2019\-]+){1,3},? "
    r"\([^()]*?born (?:[A-Z][a-z]+ \d{1,2}, |\d{1,2} [A-Z][a-z]+ |)(\d{4})\)"
)


def read_persons(paths: Sequence[Path]) -> dict[str, tuple[str, str]]:
    """Return title → (passage, year of birth)."""
    found: dict[str, tuple[str, str]] = {}
    for path in paths:
        for line in path.read_text("utf-8").split("\n"):
            for passage in json.loads(line)["chunks"] if line else ():
                match = BORN.match(passage)
                if match and WORDS[0] <= len(passage.split()) <= WORDS[1]:
                    found.setdefault(passage.split("\n")[0], (passage, match[1]))
    return found


def draw(persons: dict[str, tuple[str, str]], number: int, hops: int = 1) -> dict[str, Any]:
    """Make a prompt: `id, person, chunks, question`, the year, and the years of the others."""
    names = sorted(persons)
    random.Random(SEED).shuffle(names)
    asked = names[number % len(names)]
    rng = random.Random(f"{SEED}-{number}")
    shown = [asked, *rng.sample([name for name in names if name != asked], PASSAGES - 1)]
    rng.shuffle(shown)
    year = persons[asked][1]
    question = f"In which year was {asked} born?"
    if hops == 2:
        other = rng.choice([name for name in shown if persons[name][1] != year])
        year = min(year, persons[other][1])
        first, second = rng.sample([asked, other], 2)
        question = f"In which year was the older one of {first} and {second} born?"
    return {
        "id": number,
        "person": asked,
        "chunks": [persons[name][0] for name in shown],
        "question": question,
        "year": year,
        "others": sorted({persons[name][1] for name in shown} - {year}),
    }


def most_likely(bench: Bench, logits: torch.Tensor, cache: Any, years: Sequence[str]) -> str:
    """Return the most likely of some years behind a prompt, whose last logits `[words]` are given."""
    first = torch.log_softmax(logits.float(), -1)
    scores = []
    for year in years:
        ids = bench.tokenizer(year, add_special_tokens=False).input_ids
        found = bench.model(torch.tensor([ids[:-1]]), past_key_values=cache).logits[0]
        later = torch.log_softmax(found.float(), -1)[range(len(ids) - 1), ids[1:]]
        cache.crop(1 - len(ids))
        scores.append(float(first[ids[0]] + later.sum()))
    return years[scores.index(max(scores))]


def run(asked: argparse.Namespace) -> None:
    """Measure what is not yet in the file."""
    bench = Bench(parted_models.locate(asked.model), {}, dtype=asked.dtype)
    persons = read_persons(asked.data)
    path = asked.rows / f"{asked.model}{'-2hops' if asked.hops == 2 else ''}.jsonl"
    lines = rows_so_far(path)
    done = {(line["id"], line["method"]) for line in lines}
    methods = [Method(text) for text in asked.methods]
    store = ChunkStore.open("memory://")
    apart = [draw(persons, number, asked.hops) for number in (-1, -2)]
    ratios = {method.text: bench.ratio(method, apart) for method in methods}
    print(len(persons), "persons", ratios, flush=True)
    with path.open("a", encoding="utf-8") as file:
        for number in range(asked.start, asked.start + asked.limit):
            row = draw(persons, number, asked.hops)
            open_methods = [method for method in methods if (number, method.text) not in done]
            for line in _answers(bench, row, open_methods, store, ratios, (number, "full") not in done):
                known = {"id": number, "person": row["person"], "year": row["year"], "choices": 1 + len(row["others"])}
                file.write(json.dumps({**known, **line}) + "\n")
            file.flush()


def _answers(
    bench: Bench, row: dict[str, Any], methods: Sequence[Method], store: ChunkStore, ratios: Any, with_full: bool
) -> Iterator[dict[str, Any]]:
    years = sorted([row["year"], *row["others"]])
    if with_full:
        cache = DynamicCache(config=bench.model.config)
        ids = bench.inputs(BlendCache(bench.model, ChunkStore.open("memory://")), row)["input_ids"]
        logits = bench.model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1]
        yield {"method": "full", "answer": most_likely(bench, logits, cache, years), "charged": 1.0}
    for method in methods:
        behind = bench.contexts[method.context]
        blended = BlendCache(bench.model, store, chunk_prefix_ids=behind, **method.settings(ratios[method.text]))
        inputs = bench.inputs(blended, row)
        logits = bench.model(**inputs, past_key_values=blended, logits_to_keep=1).logits[0, -1]
        charged = round(blended.report.charged_budget, 5)
        yield {"method": method.text, "answer": most_likely(bench, logits, blended, years), "charged": charged}


def table(asked: argparse.Namespace) -> None:
    """Write the table of all rows."""
    rows = []
    for path in sorted(asked.rows.glob("*.jsonl")):
        lines = read_rows(path)
        rows += [{"model": path.stem, **row} for row in summarise(lines)]
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    settings = {"measure": __doc__.split("\n\n")[2].replace("\n", " "), "passages": PASSAGES, "seed": SEED}
    asked.output.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n', "utf-8")
    for row in rows:
        print(row)


def summarise(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give a row per method: the share of right answers, and that share of full prefill's, over the same prompts."""
    full = {line["id"]: line["answer"] == line["year"] for line in lines if line["method"] == "full"}
    for method in dict.fromkeys(line["method"] for line in lines):
        rows = [line for line in lines if line["method"] == method and line["id"] in full]
        persons = sorted({line["person"] for line in rows})
        counts = np.zeros((len(persons), 4))  # prompts, right, right by full prefill, right by both
        for line in rows:
            is_right = line["answer"] == line["year"]
            full_is_right = full[line["id"]]
            counts[persons.index(line["person"])] += [1, is_right, full_is_right, is_right and full_is_right]
        draws = np.random.default_rng(0).integers(len(persons), size=(4000, len(persons)))
        drawn = counts[draws].sum(1)

        summary: dict[str, Any] = {"method": method, "n": len(rows), "persons": len(persons)}
        summary["charged"] = _rounded(np.mean([line["charged"] for line in rows]))
        for name, above, below in SHARES:
            summary[name] = _rounded(counts[:, above].sum() / counts[:, below].sum())
            low, high = np.quantile(drawn[:, above] / drawn[:, below], (0.025, 0.975))
            summary[f"{name}_low"] = _rounded(low)
            summary[f"{name}_high"] = _rounded(high)
        yield summary


def _rounded(value: Any) -> float:
    return round(float(value), 4)


def main() -> None:
    """Read the command line."""
    parser, measure, _ = command_line(__doc__, "real_answers", run, table)
    measure.add_argument("--data", type=Path, nargs="+", required=True)
    measure.add_argument("--methods", nargs="+", required=True)
    measure.add_argument("--hops", type=int, choices=(1, 2), default=1)
    measure.add_argument("--dtype", default="auto")
    measure.add_argument("--start", type=int, default=0)
    measure.add_argument("--limit", type=int, default=320)
    asked = parser.parse_args()
    asked.do(asked)


if __name__ == "__main__":
    main()
