# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How right every rule is where people blend: prompts of 6 or 10 chunks of some 540 tokens, the inputs of the paper.

    python benchmarks/regime.py run --model qwen2.5-coder-1.5b --dtype bfloat16 --task musique --data DIR
    python benchmarks/regime.py table

Prompts, rules and charges are fixed in this file. `run` appends a line per prompt and method to a file of its own and
skips what is there, so it may be stopped at any time. `table` writes `benchmarks/results/regime.json`.

A prompt has the chunks that hold the answer and those that share most rare words with the question, in the order of
the data, behind the model's chat template. The error is the KL divergence of the next-token distribution from full
prefill's, in nats: the mean over full prefill's own greedy answer of at most 20 tokens, teacher-forced. Chunks are
computed once for all rules. Times are CPU seconds of one thread up to the first token, all methods of a prompt in
turns in one process. The first ten prompts of a file chose the default rule, among more methods than are run now;
the others report.
"""

import argparse
import json
import math
import random
import re
import statistics
import string
import time
from collections import Counter
from pathlib import Path
from typing import Any

import parted_models
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import HfBlendError
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.scores.word_f1 import WordF1
from hf_blend.evaluation.summary import share_interval

RESULTS = Path(__file__).parent / "results"
FILES = {"musique": "musique_cacheblend.jsonl", "2wikimqa": "2wikimqa_cacheblend_clean.jsonl"}
SYSTEM = "Answer the question from the documents. Reply with the answer only, in a few words."
PLAIN = "Answer the question based on the passages.\n\n{}\n\nQuestion: {}\nShort answer:"  # without a chat template
SEED = 7
ANSWER_TOKENS = 20
CHOOSING = 10  # prompts
COMMON = frozenset(
    "the a an of in on at to and or is was are were which what who whom when where how many much did does do for by "
    "with from that this it its his her their as be been one two".split()
)
UNIT = "none=0"
METHODS = (
    UNIT,
    "random=0.15",
    "kv-deviation=0.15",
    *(f"stored-importance={charge}" for charge in (0.05, 0.1, 0.15, 0.3)),
)
Row = dict[str, Any]


# Prompts


def words_of(text: str) -> set[str]:
    """Words of a text that say something."""
    return set(re.findall(r"\w+", text.lower())) - COMMON


def shared_rarity(texts: list[str], question: str) -> list[float]:
    """For each text: the sum over words shared with the question of 1 / (texts that have the word)."""
    words = [words_of(text) for text in texts]
    texts_with = Counter(word for found in words for word in found)
    asked = words_of(question)
    return [sum(1 / texts_with[word] for word in asked & found) for found in words]


def chosen_chunks(row: Row, count: int) -> tuple[list[str], bool]:
    """The chunks of a prompt, in the order of the data, and whether the answer is in another one than the question."""
    texts = list(dict.fromkeys(row["chunks"]))
    rarity = shared_rarity(texts, row["question"])
    order = sorted(range(len(texts)), key=lambda index: -rarity[index])
    holds_answer = []
    for index in order:
        if any(answer.lower() in texts[index].lower() for answer in row["answers"]):
            holds_answer.append(index)
    others = [index for index in order if index not in holds_answer]
    chosen = sorted([*holds_answer, *others][:count])
    is_linked = order[0] not in holds_answer
    return [texts[index] for index in chosen], is_linked


def read_prompts(path: Path, count: int) -> list[Row]:
    """Rows `id, chunks, question, answers` in an order that the seed gives."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    random.Random(SEED).shuffle(rows)
    prompts = []
    for row in rows:
        chunks, is_linked = chosen_chunks(row, count)
        holds_answer = any(answer.lower() in chunk.lower() for chunk in chunks for answer in row["answers"])
        if len(chunks) == count and holds_answer:
            prompts.append({**row, "chunks": chunks, "linked": is_linked})
    return prompts


class Bench:
    """A model and what is measured on it.

    Args:
        name: of the model.
        dtype: of its weights.
    """

    def __init__(self, name: str, dtype: str) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.model, self.tokenizer = load_model(parted_models.locate(name), dtype=dtype)

    def inputs(self, cache: BlendCache, row: Row) -> Any:
        """Build the prompt of a row for a cache."""
        documents = "\n\n".join(row["chunks"])
        if not self.tokenizer.chat_template:
            return cache.inputs_from_text(self.tokenizer, PLAIN.format(documents, row["question"]), row["chunks"])
        user = f"{documents}\n\nQuestion: {row['question']}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        return cache.inputs_from_messages(self.tokenizer, messages, row["chunks"])

    def full(self, ids: Tensor) -> tuple[Tensor, Tensor, float]:
        """Full prefill's greedy answer `[tokens]`, its log probabilities `[tokens, words]`, CPU ms to the first."""
        cache = DynamicCache(config=self.model.config)
        began = time.process_time()
        logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        spent_ms = 1e3 * (time.process_time() - began)
        answer: list[int] = []
        logs = []
        while len(answer) < ANSWER_TOKENS:
            logs.append(torch.log_softmax(logits[0].float(), -1))
            answer.append(int(logits.argmax()))
            if answer[-1] == self.tokenizer.eos_token_id:
                break
            logits = self.model(torch.tensor([answer[-1:]]), past_key_values=cache).logits[:, -1]
        return torch.tensor(answer), torch.stack(logs), spent_ms

    def blended(self, row: Row, store: ChunkStore, answer: Tensor, settings: Row) -> tuple[Tensor, float, BlendCache]:
        """Log probabilities of a forced answer behind a blended prefill, CPU ms to its first token, and the cache."""
        cache = BlendCache(self.model, store, **settings)
        cache.activate_past_recording()  # the answer is cropped again, also in windows
        inputs = self.inputs(cache, row)
        began = time.process_time()
        logits = self.model(**inputs, **cache.keyword, logits_to_keep=1).logits[:, -1:]
        spent_ms = 1e3 * (time.process_time() - began)
        if cache.report.fallback_reason:
            raise HfBlendError(cache.report.fallback_reason)
        if len(answer) > 1:
            others = self.model(answer[None, :-1], **cache.keyword).logits
            logits = torch.cat((logits, others), 1)
        return torch.log_softmax(logits[0].float(), -1), spent_ms, cache

    def free_answer(self, logs: Tensor, answer: Tensor, cache: BlendCache) -> str:
        """The greedy answer behind a blended prefill on which full prefill's answer was forced."""
        likeliest = logs.argmax(-1)
        different = (likeliest != answer).nonzero()
        if not len(different):
            return str(self.tokenizer.decode(answer, skip_special_tokens=True))
        agreed = int(different[0])
        tokens = [*answer[:agreed].tolist(), int(likeliest[agreed])]
        surplus = len(answer) - 1 - agreed
        if surplus:
            cache.crop(-surplus)
        while len(tokens) < ANSWER_TOKENS and tokens[-1] != self.tokenizer.eos_token_id:
            logits = self.model(torch.tensor([tokens[-1:]]), **cache.keyword).logits
            tokens.append(int(logits[0, -1].argmax()))
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


# Measuring


def settings_of(rule: str, ratio: float) -> Row:
    """What `BlendCache` takes for a rule."""
    return {"selector": rule, "recompute_ratio": ratio}


def ratio_of(bench: Bench, rule: str, charge: float, row: Row, store: ChunkStore) -> float | None:
    """The ratio at which a rule is charged so much, on a prompt that is not reported; None if at none."""
    charged = []
    for ratio in (0.02, 0.25):
        cache = bench.blended(row, store, torch.zeros(1, dtype=torch.long), settings_of(rule, ratio))[2]
        charged.append(float(cache.report.charged_budget))
    ratio = 0.02 + (charge - charged[0]) * 0.23 / (charged[1] - charged[0])
    return round(ratio, 4) if ratio > 0.002 else None


def plain(text: str) -> str:
    """Words of a text without case, punctuation and articles."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def is_right(answer: str, golds: list[str]) -> bool:
    """Whether an answer holds a right one, word for word."""
    return any(f" {plain(gold)} " in f" {plain(answer)} " for gold in golds)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is not yet in the file."""
    bench = Bench(arguments.model, arguments.dtype)
    path = RESULTS / "regime" / f"{arguments.model}-{arguments.task}-{arguments.chunks}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    done = {(line["id"], line["method"]) for line in lines}
    ratios = {line["method"]: line["ratio"] for line in lines}
    rows = read_prompts(arguments.data / FILES[arguments.task], arguments.chunks)
    apart = rows.pop()
    apart_store = ChunkStore.open("memory://")
    found: dict[tuple[str, str], float | None] = {("none", "0"): 0.0}
    numbered = list(enumerate(rows))[arguments.first : arguments.limit or None]
    for number, row in numbered:
        missing = [method for method in METHODS if (row["id"], method) not in done]
        if not missing:
            continue
        for method in missing:
            rule, charge = method.split("=")
            if method not in ratios:
                if (rule, charge) not in found:
                    found[rule, charge] = ratio_of(bench, rule, float(charge), apart, apart_store)
                ratios[method] = found[rule, charge]
                print(method, ratios[method], flush=True)
        missing = [method for method in missing if ratios[method] is not None]
        measured = measure(bench, row, {method: ratios[method] for method in missing})
        with path.open("a", encoding="utf-8") as file:
            for line in measured:
                file.write(json.dumps({"id": row["id"], "number": number, "linked": row["linked"], **line}) + "\n")


def measure(bench: Bench, row: Row, ratios: dict[str, float]) -> list[Row]:
    """Measure methods, each at its ratio, on one prompt, and full prefill beside them."""
    store = ChunkStore.open("memory://")
    answer_none = torch.zeros(1, dtype=torch.long)
    bench.blended(row, store, answer_none, settings_of("none", 0.0))  # computes and stores the chunks
    ids = bench.inputs(BlendCache(bench.model, ChunkStore.open("memory://")), row)["input_ids"]
    answer, full, full_ms = bench.full(ids)
    full_text = str(bench.tokenizer.decode(answer, skip_special_tokens=True))
    lines = []
    for method in random.Random(row["id"]).sample(list(ratios), len(ratios)):
        rule = method.split("=")[0]
        logs, spent_ms, cache = bench.blended(row, store, answer, settings_of(rule, ratios[method]))
        kl = (full.exp() * (full - logs)).sum(-1)
        charged = cache.report.charged_budget
        text = bench.free_answer(logs, answer, cache)
        lines.append(
            {
                "method": method,
                "ratio": ratios[method],
                "charged": round(float(charged), 5),
                "kl": round(float(kl.mean()), 6),
                "kl_first": round(float(kl[0]), 6),
                "same": bool((logs.argmax(-1) == answer).all()),
                "right": is_right(text, row["answers"]),
                "full_right": is_right(full_text, row["answers"]),
                "f1": round(float(WordF1().best(text, row["answers"])), 4),
                "full_f1": round(float(WordF1().best(full_text, row["answers"])), 4),
                "ms": round(spent_ms, 1),
                "full_ms": round(full_ms, 1),
                "tokens": ids.shape[1],
            }
        )
        print(row["id"], method, lines[-1]["charged"], lines[-1]["kl"], lines[-1]["same"], flush=True)
    return lines


# The table


def table(arguments: argparse.Namespace) -> None:
    """Write the table of all rows; `--part choice` prints that of the prompts that chose and writes nothing."""
    rows = []
    for path in sorted((RESULTS / "regime").glob("*.jsonl")):
        model, task, chunks = path.stem.rsplit("-", 2)
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        lines = [line for line in lines if (line["number"] < CHOOSING) == (arguments.part == "choice")]
        for linked in (None, False, True):
            some = [line for line in lines if linked is None or line["linked"] == linked]
            for row in summarise(some):
                rows.append({"model": model, "task": task, "chunks": int(chunks), "linked": linked, **row})
    for row in rows:
        if row["linked"] is None:
            print(
                f"{row['model']:18} {row['task']:8} {row['chunks']:2} n {row['n']:3} {row['method']:36} "
                f"{row['charged']:.3f} kl {row['kl_mean']:.3f} median {row['kl_median']:.3f} of reuse "
                f"{row['of_reuse']:.2f} [{row['low']:.2f}, {row['high']:.2f}] geometric {row['geometric']:.2f} "
                f"worse {row['made_worse']:.2f} same {row['same_answer']:.2f} kept {row['kept']} {row['ttft_x']:.1f} x"
            )
    if arguments.part == "report":
        text = ",\n".join("  " + json.dumps(row) for row in rows)
        (RESULTS / "regime.json").write_text(f'{{"measure": {json.dumps(__doc__)},\n"rows": [\n{text}\n]}}\n', "utf-8")


def summarise(lines: list[Row]) -> list[Row]:
    """A row per method, over the prompts on which it and reuse were measured."""
    by_method: dict[str, dict[str, Row]] = {}
    for line in lines:
        by_method.setdefault(line["method"], {})[line["id"]] = line
    rows = []
    for method, by_id in by_method.items():
        names = [name for name in by_id if name in by_method.get(UNIT, {})]
        if len(names) < 2:
            continue
        found = [by_id[name] for name in names]
        reuse = [by_method[UNIT][name] for name in names]
        kl = [line["kl"] for line in found]
        reuse_kl = [line["kl"] for line in reuse]
        low, high = share_interval(kl, reuse_kl)
        logs = [math.log(max(a, 1e-6) / max(b, 1e-6)) for a, b in zip(kl, reuse_kl, strict=True)]
        right = [line["right"] for line in found if line["full_right"]]
        rows.append(
            {
                "method": method,
                "charged": round(statistics.fmean(line["charged"] for line in found), 4),
                "kl_mean": round(statistics.fmean(kl), 5),
                "kl_median": round(statistics.median(kl), 5),
                "of_reuse": round(sum(kl) / sum(reuse_kl), 4),
                "low": round(low, 4),
                "high": round(high, 4),
                "geometric": round(math.exp(statistics.fmean(logs)), 4),
                "made_worse": round(statistics.fmean(a > b for a, b in zip(kl, reuse_kl, strict=True)), 4),
                "same_answer": round(statistics.fmean(line["same"] for line in found), 4),
                "kept": round(statistics.fmean(right), 4) if right else None,
                "kept_of": len(right),
                "right": sum(line["right"] for line in found),
                "f1": round(statistics.fmean(line["f1"] for line in found), 4),
                "full_f1": round(statistics.fmean(line["full_f1"] for line in found), 4),
                "ttft_x": round(statistics.median(line["full_ms"] / line["ms"] for line in found), 2),
                "tokens": round(statistics.fmean(line["tokens"] for line in found)),
                "n": len(found),
            }
        )
    return rows


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("run", help="measure what is not yet in the file")
    measuring.set_defaults(do=run)
    measuring.add_argument("--model", required=True)
    measuring.add_argument("--dtype", default="float32")
    measuring.add_argument("--task", choices=[*FILES], required=True)
    measuring.add_argument("--chunks", type=int, default=6)
    measuring.add_argument("--data", type=Path, required=True, help="the folder of the inputs")
    measuring.add_argument("--first", type=int, default=CHOOSING, help="number of the first prompt")
    measuring.add_argument("--limit", type=int, default=0, help="prompts before this number only")
    writing = commands.add_parser("table", help="write the table")
    writing.set_defaults(do=table)
    writing.add_argument("--part", choices=["choice", "report"], default="report")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
