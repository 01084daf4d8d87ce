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
turns in one process. The first ten prompts of a file choose; the others report.
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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import parted_models
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.errors import HfBlendError
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.scores.word_f1 import WordF1
from hf_blend.evaluation.summary import share_interval
from hf_blend.model.capture import default_prefix
from hf_blend.selectors.base import TokenView

RESULTS = Path(__file__).parent / "results"
PRESCRIBED = str(Path(__file__).parent / "rules" / "prescribed.py")
FILES = {"musique": "musique_cacheblend.jsonl", "2wikimqa": "2wikimqa_cacheblend_clean.jsonl"}
SYSTEM = "Answer the question from the documents. Reply with the answer only, in a few words."
PLAIN = "Answer the question based on the passages.\n\n{}\n\nQuestion: {}\nShort answer:"  # without a chat template
SEED = 7
ANSWER_TOKENS = 20
CHOOSING = 10  # prompts
QUESTION_ROWS = 16
QUESTIONS = (
    "What is the name of the person, place, date or thing that is asked about?",
    "Which fact in this text would be looked up, and who or what is it about?",
    "When and where did it happen, and who was involved?",
)
COMMON = frozenset(
    "the a an of in on at to and or is was are were which what who whom when where how many much did does do for by "
    "with from that this it its his her their as be been one two".split()
)
UNIT = "none=0"
CHOICE = (
    UNIT,
    "random=0.15",
    "ramp=0.15",
    "kv-deviation=0.15",
    "expected-error=0.15",
    "stored=0.15",
    "stored-ramp=0.15",
    "stored-late-ramp=0.15",
    "stored-three-ramp=0.15",
    "stored-ramp-chunk=0.15",
    "stored-ramp-words=0.15",
    "stored-ramp-links=0.15",
    "stored-ramp-chunk-words-links=0.15",
)
REPORT = (
    UNIT,
    *(f"{rule}={charge}" for rule in ("random", "kv-deviation", "stored-ramp") for charge in (0.05, 0.1, 0.15, 0.3)),
    "ramp=0.15",
    "expected-error=0.15",
    "expected-error=0.3",
)
METHODS = {"choice": CHOICE, "report": REPORT}
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


# What is known of a prompt's tokens before the blend


@dataclass
class Features:
    """What a rule without a look multiplies; each `[tokens]` float32 over the tokens of a selector's view.

    Attributes:
        importance: what a question of no content takes of each token: attention times the length of V, mean of layers.
        late: the same of the last third of the layers.
        three: the mean over three such questions.
        ramp: the estimate of the error by the token's offset in its chunk and the chunk's offset in the prompt.
        chunk: how much of the question's rare words the token's chunk has, 1 on average.
        words: 3 within 8 tokens of a rare word of the question, else 1.
        links: 2 where a rare token stands in an earlier chunk, too, else 1.
    """

    importance: Tensor
    late: Tensor
    three: Tensor
    ramp: Tensor
    chunk: Tensor
    words: Tensor
    links: Tensor


RULES: dict[str, Callable[[Features], Tensor]] = {
    "stored": lambda known: known.importance,
    "stored-ramp": lambda known: known.importance * known.ramp,
    "stored-late-ramp": lambda known: known.late * known.ramp,
    "stored-three-ramp": lambda known: known.three * known.ramp,
    "stored-ramp-chunk": lambda known: known.importance * known.ramp * known.chunk,
    "stored-ramp-words": lambda known: known.importance * known.ramp * known.words,
    "stored-ramp-links": lambda known: known.importance * known.ramp * known.links,
    "stored-ramp-chunk-words-links": lambda known: (
        known.importance * known.ramp * known.chunk * known.words * known.links
    ),
}


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
        self.prefix_ids = default_prefix(self.model, self.tokenizer)

    def inputs(self, cache: BlendCache, row: Row) -> Any:
        """Build the prompt of a row for a cache."""
        documents = "\n\n".join(row["chunks"])
        if not self.tokenizer.chat_template:
            return cache.inputs_from_text(self.tokenizer, PLAIN.format(documents, row["question"]), row["chunks"])
        user = f"{documents}\n\nQuestion: {row['question']}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        return cache.inputs_from_messages(self.tokenizer, messages, row["chunks"])

    def question_ids(self, question: str) -> list[int]:
        """What stands behind the chunks of a prompt that asks a question."""
        if not self.tokenizer.chat_template:
            text = PLAIN.format("|||", question)
        else:
            messages = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"|||\n\nQuestion: {question}"},
            ]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        behind = text.partition("|||")[2]
        return list(self.tokenizer(behind, add_special_tokens=False).input_ids)

    def importance(self, chunk_ids: list[int]) -> Tensor:
        """What questions of no content take of a chunk computed alone, `[questions, layers, tokens]` float32.

        Layers with a window are left out: in a prompt the question does not see most chunks there.
        """
        cache = DynamicCache()
        self.model(torch.tensor([[*self.prefix_ids, *chunk_ids]]), past_key_values=cache, logits_to_keep=1)
        known = cache.get_seq_length()
        kinds = getattr(self.model.config, "layer_types", None) or ["full_attention"] * len(cache.layers)
        before = len(self.prefix_ids)
        self.model.set_attn_implementation("eager")
        by_question = []
        for question in QUESTIONS:
            ids = self.question_ids(question)
            attentions = self.model(torch.tensor([ids]), past_key_values=cache, output_attentions=True).attentions
            by_layer = []
            for layer, weights in enumerate(attentions):
                if kinds[layer] == "full_attention":
                    by_layer.append(taken(weights, cache.layers[layer].values)[before:known])
            by_question.append(torch.stack(by_layer))
            cache.crop(-len(ids))
        self.model.set_attn_implementation("sdpa")
        return torch.stack(by_question)

    def features(self, view: TokenView, row: Row, prompt_ids: Tensor) -> Features:
        """What is known of the tokens of a selector's view; the prompt's ids are `[tokens]`."""
        offset = view.offset[0]
        starts = torch.where(view.reusable[0], view.columns[0] - offset, -1)
        chunk_starts = starts.unique().tolist()[1:]  # a chunk may be reused in several runs, numbered apart
        chunk = torch.tensor([chunk_starts.index(start) if start >= 0 else -1 for start in starts.tolist()])
        ids = prompt_ids[view.columns[0]]
        late = torch.zeros(len(chunk))
        three = torch.zeros(len(chunk))
        first = torch.zeros(len(chunk))
        for number in range(int(chunk.max()) + 1):
            inside = (chunk == number).nonzero().flatten()
            start = chunk_starts[number]
            end = start + int(view.chunk_tokens[0, inside[0]])
            of_tokens = self.importance(prompt_ids[start:end].tolist())[:, :, offset[inside]]
            layers = of_tokens.shape[1]
            first[inside] = of_tokens[0].mean(0)
            three[inside] = of_tokens.mean((0, 1))
            late[inside] = of_tokens[0, layers - math.ceil(layers / 3) :].mean(0)
        ramp = plugins.load("selectors", "ramp")({}).score(view)[0]
        return Features(
            first, late, three, ramp, chunk_weight(row, chunk), self.near_words(row, ids, chunk), linked(ids, chunk)
        )

    def near_words(self, row: Row, ids: Tensor, chunk: Tensor) -> Tensor:
        """3 within 8 tokens of a token that the question has and at most half of the chunks, else 1: `[tokens]`."""
        texts = [row["question"], f" {row['question']}", f" {row['question'].lower()}"]
        asked = {token for text in texts for token in self.tokenizer(text, add_special_tokens=False).input_ids}
        chunks_with = Counter()
        for number in range(len(row["chunks"])):
            chunks_with.update(set(ids[chunk == number].tolist()))
        rare = {token for token in asked if chunks_with[token] <= len(row["chunks"]) / 2}
        weight = torch.ones(len(ids))
        for index, token in enumerate(ids.tolist()):
            if token in rare and chunk[index] >= 0:
                weight[max(0, index - 8) : index + 9] = 3.0
        return weight

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


def taken(weights: Tensor, values: Tensor) -> Tensor:
    """Attention of the last rows times the length of V, mean over rows and heads.

    Shapes: weights `[1, heads, rows, keys]`, values `[1, kv_heads, keys, head_dim]` → `[keys]` float32.
    """
    by_head = weights[0, :, -QUESTION_ROWS:].float().mean(1)
    by_kv_head = by_head.view(values.shape[1], -1, by_head.shape[-1]).mean(1)
    return (by_kv_head * values[0].float().norm(dim=-1)).mean(0)


def chunk_weight(row: Row, chunk: Tensor) -> Tensor:
    """How much of the question's rare words a token's chunk has, 1 on average over the chunks: `[tokens]`."""
    rarity = torch.tensor(shared_rarity(row["chunks"], row["question"])) + 0.5
    weight = rarity / rarity.mean()
    return torch.where(chunk >= 0, weight[chunk.clamp_min(0)], 1.0).float()


def linked(ids: Tensor, chunk: Tensor) -> Tensor:
    """2 where a token that at most half of the chunks have is in an earlier chunk too, else 1: `[tokens]`."""
    count = int(chunk.max()) + 1
    by_chunk = [set(ids[chunk == number].tolist()) for number in range(count)]
    chunks_with = Counter(token for tokens in by_chunk for token in tokens)
    seen: set[int] = set()
    weight = torch.ones(len(ids))
    for number in range(count):
        for index in (chunk == number).nonzero().flatten().tolist():
            token = int(ids[index])
            if token in seen and chunks_with[token] <= count / 2:
                weight[index] = 2.0
        seen |= by_chunk[number]
    return weight


# Measuring


def settings_of(rule: str, ratio: float, score: Callable[[TokenView], Tensor] | None) -> Row:
    """What `BlendCache` takes for a rule."""
    if score is None:
        return {"selector": rule, "recompute_ratio": ratio}
    plugins.load("selectors", PRESCRIBED).rule = score
    return {"selector": PRESCRIBED, "recompute_ratio": ratio}


def ratio_of(bench: Bench, rule: str, charge: float, row: Row, store: ChunkStore) -> float | None:
    """The ratio at which a rule is charged so much, on a prompt that is not reported; None if at none."""
    charged = []
    for ratio in (0.02, 0.25):
        cache = bench.blended(row, store, torch.zeros(1, dtype=torch.long), settings_of(rule, ratio, None))[2]
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
    if arguments.limit:
        rows = rows[: arguments.limit]
    for number, row in enumerate(rows):
        methods = METHODS["choice" if number < CHOOSING else "report"]
        missing = [method for method in methods if (row["id"], method) not in done]
        if not missing:
            continue
        for method in missing:
            rule, charge = method.split("=")
            if method not in ratios:
                like = "ramp" if rule in RULES else rule  # they choose late tokens as it does, at its price
                if (like, charge) not in found:
                    found[like, charge] = ratio_of(bench, like, float(charge), apart, apart_store)
                ratios[method] = found[like, charge]
                print(method, ratios[method], flush=True)
        missing = [method for method in missing if ratios[method] is not None]
        measured = measure(bench, row, {method: ratios[method] for method in missing})
        with path.open("a", encoding="utf-8") as file:
            for line in measured:
                file.write(json.dumps({"id": row["id"], "number": number, "linked": row["linked"], **line}) + "\n")


def prescribed(scores: Tensor, view: TokenView) -> Tensor:
    """Scores found before, `[1, tokens]`."""
    return scores


def seen_view(bench: Bench, row: Row, store: ChunkStore) -> TokenView:
    """What a selector sees of a prompt before its first layer."""
    views: list[TokenView] = []

    def score(view: TokenView) -> Tensor:
        views.append(view)
        return view.offset.float()

    bench.blended(row, store, torch.zeros(1, dtype=torch.long), settings_of("", 0.02, score))
    return views[0]


def measure(bench: Bench, row: Row, ratios: dict[str, float]) -> list[Row]:
    """Measure methods, each at its ratio, on one prompt, and full prefill beside them."""
    store = ChunkStore.open("memory://")
    answer_none = torch.zeros(1, dtype=torch.long)
    bench.blended(row, store, answer_none, settings_of("none", 0.0, None))  # computes and stores the chunks
    ids = bench.inputs(BlendCache(bench.model, ChunkStore.open("memory://")), row)["input_ids"]
    answer, full, full_ms = bench.full(ids)
    full_text = str(bench.tokenizer.decode(answer, skip_special_tokens=True))
    known = None
    if any(method.split("=")[0] in RULES for method in ratios):
        known = bench.features(seen_view(bench, row, store), row, ids[0])
    lines = []
    for method in random.Random(row["id"]).sample(list(ratios), len(ratios)):
        rule = method.split("=")[0]
        score = None
        if known is not None and rule in RULES:
            scores = RULES[rule](known)[None]
            score = partial(prescribed, scores)
        logs, spent_ms, cache = bench.blended(row, store, answer, settings_of(rule, ratios[method], score))
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
    measuring.add_argument("--limit", type=int, default=0, help="the first prompts only")
    writing = commands.add_parser("table", help="write the table")
    writing.set_defaults(do=table)
    writing.add_argument("--part", choices=["choice", "report"], default="report")
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
