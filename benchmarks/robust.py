# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every rule leaves of full reuse's error on every family, at equal charges.

    python benchmarks/robust.py run --model qwen2.5-coder-1.5b --dtype bfloat16 --task hotpotqa --data DIR --limit 40
    python benchmarks/robust.py run --model qwen2.5-coder-0.5b --task musique --data DIR --passages 12 --limit 24
    python benchmarks/robust.py table

Prompts, methods and charges are fixed in this file. `run` appends a line per prompt and method to a file of its own
and skips what is there: it may be stopped at any time. `table` writes `benchmarks/results/robust.json`.

A prompt has the passages that share most rare words with the question, among them one that holds the answer, in the
order of the data. The error is the KL divergence of the next-token distribution from full prefill's, in nats: the
mean over the first ten tokens of full prefill's own greedy answer, teacher-forced, and that of the first token alone.
Its unit is what reuse of chunks computed behind BOS alone leaves. An answer has at most 20 tokens; it is the same
where every token of full prefill's is the likeliest; the score is the F1 of its words. The charge is found on two
prompts that are not reported. Times are CPU seconds of one thread up to the first token, all methods of a prompt in
turns in one process.
"""

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import parted_models
import torch
import transformers
from real_selectors import RESULTS, Bench, Method, Task, _commit, read_rows, rows_so_far
from torch import Tensor

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.errors import HfBlendError
from hf_blend.evaluation.scores.word_f1 import WordF1
from hf_blend.evaluation.summary import share_interval

Row = dict[str, Any]

CHARGES = (0.05, 0.1, 0.15)
RULES = (
    "random",
    "ramp",
    "kv-deviation",
    "query-attention",
    "expected-error",
    "stored-importance",
)
DEFAULT = f"{BlendConfig.selector}@text={BlendConfig.recompute_ratio}"
METHODS = (
    "none=0",
    "none@text=0",
    *(f"{rule}@text={charge}" for charge in reversed(CHARGES) for rule in RULES),
    DEFAULT,
    "kv-deviation=0.15",
)
UNIT = METHODS[0]
FAMILIES = {"smollm2": "Llama", **{name: parted.family for name, parted in parted_models.PARTED.items()}}
PASSAGES = 6
SEED = 7
TOKENS = {2: (100, 800), 6: (500, 1500), 12: (1000, 2600), 20: (1600, 3600)}  # of the passages together
ANSWER_TOKENS = 20
COMPARED_TOKENS = 10
FEWEST = 10  # prompts of a model and task, or it is left out
COMPLETE = 0.9  # share of the prompts that a method was measured on, or it is left out
COMMON = frozenset(
    "the a an of in on at to and or is was are were which what who whom when where how many much did does do for by "
    "with from that this it its his her their as be been one two".split()
)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - COMMON


def passages(row: dict[str, Any], count: int) -> list[str]:
    """Choose the passages of a prompt, of which one holds the answer, in the order of the data."""
    texts = list(dict.fromkeys(row["chunks"]))
    words = [_words(text) for text in texts]
    texts_with = Counter(word for found in words for word in found)
    asked = _words(row["question"])

    def shared(index: int) -> float:
        return sum(1 / texts_with[word] for word in asked & words[index])

    order = sorted(range(len(texts)), key=shared, reverse=True)
    chosen = order[:count]
    holding = []
    for index in order:
        text = texts[index].lower()
        if any(answer.lower() in text for answer in row["answers"]):
            holding.append(index)
    if holding and not set(holding) & set(chosen):
        chosen[-1] = holding[0]
    return [texts[index] for index in sorted(chosen)]


def prompts(path: Path, bench: Bench, count: int) -> list[dict[str, Any]]:
    """Read rows `id, chunks, question, answers` in the order that the seed gives, of a length that is measured."""
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    random.Random(SEED).shuffle(rows)
    low, high = TOKENS[count]
    fitting = []
    for row in rows:
        texts = passages(row, count)
        tokens = sum(len(bench.tokenizer(text).input_ids) for text in texts)
        if len(texts) == count and low <= tokens <= high:
            fitting.append({**row, "chunks": texts})
    return fitting


@dataclass
class Blended:
    """A prefill with stored chunks, on which full prefill's answer was forced.

    Attributes:
        logs: log probabilities, `[answer tokens, words]`.
        ms: CPU milliseconds to the first of them.
        charged: the charged budget.
        cache: which holds the prompt and all of the answer but its last token.
    """

    logs: Tensor
    ms: float
    charged: float
    cache: BlendCache

    @classmethod
    def prefill(cls, bench: Bench, row: Row, answer: Tensor, store: ChunkStore, method: Method, ratio: float) -> Self:
        """Blend a prompt and force an answer, `[tokens]`, on it."""
        cache = BlendCache(
            bench.model, store, chunk_prefix_ids=bench.contexts[method.context], **method.settings(ratio)
        )
        cache.activate_past_recording()  # `own_answer` crops, also in windows
        inputs = bench.inputs(cache, row)
        began = time.process_time()
        logits = bench.model(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1:]
        ms = 1e3 * (time.process_time() - began)
        if cache.report.fallback_reason:
            raise HfBlendError(cache.report.fallback_reason)
        if len(answer) > 1:
            logits = torch.cat((logits, bench.model(answer[None, :-1], past_key_values=cache).logits), 1)
        return cls(torch.log_softmax(logits[0].float(), -1), ms, cache.report.charged_budget, cache)

    def own_answer(self, bench: Bench, answer: Tensor) -> list[int]:
        """Answer greedily: as full prefill does, up to the first token that differs, and on from there."""
        likeliest = self.logs.argmax(-1)
        different = (likeliest != answer).nonzero()
        if not len(different):
            return list(answer.tolist())
        agreed = int(different[0])
        own = [*answer[:agreed].tolist(), int(likeliest[agreed])]
        if surplus := len(answer) - 1 - agreed:
            self.cache.crop(-surplus)
        while len(own) < ANSWER_TOKENS and own[-1] != bench.tokenizer.eos_token_id:
            logits = bench.model(torch.tensor([own[-1:]]), past_key_values=self.cache).logits
            own.append(int(logits[0, -1].argmax()))
        return own


def run(arguments: argparse.Namespace) -> None:
    """Measure what is not yet in the file."""
    bench = Bench(parted_models.locate(arguments.model), {}, task=Task(), dtype=arguments.dtype)
    path = arguments.rows / f"{arguments.model}-{arguments.task}-{arguments.passages}.jsonl"
    lines = rows_so_far(path)
    done = {(line["id"], line["method"]) for line in lines}
    rows = prompts(arguments.data / f"{arguments.task}_natural.jsonl", bench, arguments.passages)
    apart = rows[-2:]
    rows = rows[: arguments.limit]
    ratios: dict[str, float | None] = {line["method"]: line["ratio"] for line in lines}
    methods = [Method(text) for text in METHODS if not arguments.methods or text in arguments.methods]
    for method in methods:
        if method.text not in ratios:
            ratios[method.text] = bench.ratio(method, apart)
            print(method.text, ratios[method.text], flush=True)
    bench._stores.clear()
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            open_methods = {}
            for method in methods:
                ratio = ratios[method.text]
                if ratio is not None and (row["id"], method.text) not in done:
                    open_methods[method] = ratio
            for line in measured(bench, row, open_methods):
                file.write(json.dumps({"id": row["id"], "dtype": str(bench.model.dtype)[6:], **line}) + "\n")
            file.flush()


def measured(bench: Bench, row: Row, methods: dict[Method, float]) -> Iterator[dict[str, Any]]:
    """Measure methods, each at its ratio, on one prompt, and full prefill beside them."""
    if not methods:
        return
    stores = {method.context: ChunkStore.open("memory://") for method in methods}
    ids = bench.inputs(BlendCache(bench.model, ChunkStore.open("memory://")), row)["input_ids"]
    answer, full, full_ms = bench.full(ids, ANSWER_TOKENS)
    for context, store in stores.items():
        Blended.prefill(bench, row, answer[:1], store, Method(f"none@{context}=0" if context else "none=0"), 0.0)
    for method, ratio in random.Random(row["id"]).sample(list(methods.items()), len(methods)):
        blended = Blended.prefill(bench, row, answer, stores[method.context], method, ratio)
        kl = (full.exp() * (full - blended.logs)).sum(-1)[:COMPARED_TOKENS]
        yield {
            "method": method.text,
            "ratio": ratio,
            "charged": round(blended.charged, 5),
            "kl": round(float(kl.mean()), 6),
            "kl_first": round(float(kl[0]), 6),
            "same": bool((blended.logs.argmax(-1) == answer).all()),
            "score": scored(bench, row, blended.own_answer(bench, answer)),
            "full_score": scored(bench, row, answer.tolist()),
            "ms": round(blended.ms, 1),
            "full_ms": round(full_ms, 1),
            "tokens": ids.shape[1],
        }


def scored(bench: Bench, row: Row, answer: list[int]) -> float:
    """F1 of the words of an answer's ids."""
    return round(float(WordF1().best(bench.tokenizer.decode(answer, skip_special_tokens=True), row["answers"])), 4)


def table(arguments: argparse.Namespace) -> None:
    """Write the table of all rows."""
    rows = []
    for path in sorted(arguments.rows.glob("*.jsonl")):
        model, task, count = path.stem.rsplit("-", 2)
        lines = read_rows(path)
        about = {"model": model, "family": FAMILIES[model], "task": task, "chunks": int(count)}
        rows += [{**about, "dtype": lines[0]["dtype"], **row} for row in summarise(lines)]
    settings = {
        "measure": __doc__.split("\n\n")[3].replace("\n", " "),
        "seed": SEED,
        "tokens": TOKENS[PASSAGES],
        "threads": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
    }
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    arguments.output.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n', "utf-8")
    for row in rows:
        print(
            f"{row['model']:18} {row['task']:8} {row['chunks']:2} n {row['n']:3} {row['method']:44} "
            f"{row['charged']:.3f} kl {row['kl']:.2f} [{row['low']:.2f}, {row['high']:.2f}] "
            f"median {row['kl_median']:.2f} first {row['kl_first']:.2f} of random {row['of_random']} "
            f"same {row['same_answer']:.2f} score {row['score']:.2f} ({row['full_score']:.2f}) {row['ttft_x']:.1f} x"
        )


def summarise(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give a row per method, over the prompts that every method of the file was measured on."""
    by_method: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        by_method.setdefault(line["method"], {})[line["id"]] = line
    most = len(by_method.get(UNIT, ()))
    if most < FEWEST:
        return
    # Leave out methods of a stopped run, and prompts that not all others were measured on
    by_method = {name: found for name, found in by_method.items() if len(found) >= COMPLETE * most}
    ids = set(by_method[UNIT]).intersection(*by_method.values())
    kept = {}
    for method, lines_by_id in by_method.items():
        kept[method] = [lines_by_id[name] for name in by_method[UNIT] if name in ids]

    for method, rows in kept.items():
        rule, _, charge = method.rpartition("=")
        yield {
            "method": rule,
            "target": float(charge),
            "ratio": _mean(rows, "ratio"),
            "charged": _mean(rows, "charged"),
            **_shares(rows, kept[UNIT]),
            "of_random": _of(rows, kept.get(f"random@text={charge}")),
            "of_default": _of(rows, kept.get(DEFAULT)),
            "same_answer": _mean(rows, "same"),
            "score": _mean(rows, "score"),
            "full_score": _mean(rows, "full_score"),
            "ttft_x": round(statistics.median(line["full_ms"] / line["ms"] for line in rows), 2),
            "tokens": round(_mean(rows, "tokens")),
            "n": len(ids),
        }


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    return round(statistics.fmean(line[name] for line in lines), 4)


def _shares(own: Sequence[dict[str, Any]], unit: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kl = [line["kl"] for line in own]
    whole = [line["kl"] for line in unit]
    low, high = share_interval(kl, whole)
    return {
        "kl": round(sum(kl) / sum(whole), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "kl_median": round(statistics.median(kl) / statistics.median(whole), 4),
        "kl_first": round(sum(line["kl_first"] for line in own) / sum(line["kl_first"] for line in unit), 4),
        "nats": round(statistics.fmean(kl), 5),
        "nats_median": round(statistics.median(kl), 5),
    }


def _of(own: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] | None) -> list[float] | None:
    """The error as a share of another method's, the ends of its interval, and on what share of prompts it is less."""
    if others is None:
        return None
    kl = [line["kl"] for line in own]
    other = [line["kl"] for line in others]
    low, high = share_interval(kl, other)
    better = statistics.fmean(mine < theirs for mine, theirs in zip(kl, other, strict=True))
    return [round(value, 4) for value in (sum(kl) / sum(other), low, high, better)]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("run")
    write = commands.add_parser("table")
    measure.add_argument("--model", choices=FAMILIES, required=True)
    measure.add_argument("--dtype", default="auto")
    measure.add_argument("--task", choices=("hotpotqa", "musique"), required=True)
    measure.add_argument("--data", type=Path, required=True, help="folder of TASK_natural.jsonl")
    measure.add_argument("--passages", type=int, choices=TOKENS, default=PASSAGES)
    measure.add_argument("--limit", type=int, default=60)
    measure.add_argument("--methods", nargs="+", choices=METHODS)
    measure.set_defaults(do=run)
    write.set_defaults(do=table)
    write.add_argument("--output", type=Path, default=RESULTS / "robust.json", help="the table")
    for command in (measure, write):
        command.add_argument("--rows", type=Path, default=RESULTS / "robust")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
