# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What selectors and capture contexts leave of full reuse's error on a real model, at equal charges.

    python benchmarks/real_selectors.py run --model smollm2 --task hotpotqa --data hotpotqa.jsonl --methods random=0.15
    python benchmarks/real_selectors.py table

`run` appends a row per prompt and method to a file of its own and skips what is there, so it may be stopped at any
time. `table` writes `benchmarks/results/real_selectors.json` from all of these files.

The error is the KL divergence of the next-token distribution from full prefill's, in nats: the mean over the first
tokens of full prefill's own greedy answer, teacher-forced, and that of the first token alone. A method is
`selector[:option=value…][@context]=charge`: a ratio is looked for, on two prompts that are not reported,
at which the measured charge is the one asked for. Times are CPU seconds of one thread up to the first token, all
methods of a prompt in turns in one process, with the chunks in memory.

Where a task has a score, each method also writes an answer, greedily. `--examples` puts examples before each row of a
summarisation: dialogues of another file with their summaries, as chunks, drawn for each row by its id.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.errors import HfBlendError
from hf_blend.evaluation.bundled import load_model
from hf_blend.evaluation.summary import interval
from hf_blend.evaluation.tasks.samsum import Samsum
from hf_blend.model.anatomy import bos_prefix
from hf_blend.model.capture import default_prefix

RESULTS = Path(__file__).parent / "results"
SYSTEM = "Answer the question from the documents. Reply with the answer only, in a few words."
PLAIN = "Answer the question based on the passages.\n\n{}\n\nQuestion: {}\nShort answer:"
DIALOGUE = "Dialogue: {}\nSummary: "
TEXT = "text"  # what the library computes chunks behind; without a context they are behind BOS alone
ANSWER_TOKENS = 10  # over which the divergence is the mean
TRIED_RATIOS = (0.03, 0.2)
CHOSEN_ON = 106  # prompts of a task: every other of them chose something; on those behind nothing was chosen
BYTES = {"smollm2": 46_080, "gemma3": 36_864}  # of K and V of a token, in float32


@dataclass(frozen=True)
class Task:
    """What the prompts of a task hold, and what scores its answers; without a score none is written."""

    passages: int = 10
    fewest: int = 6
    tokens: tuple[int, int] = (700, 2000)  # of the passages
    score: str = ""
    max_new_tokens: int = ANSWER_TOKENS


TASKS = {
    "2wikimqa": Task(passages=3, fewest=3, score="word-f1", max_new_tokens=32),
    # without a chat template, with the pieces of `hf-blend eval`
    "samsum": Task(passages=5, fewest=5, tokens=(500, 1200), score="rouge-l", max_new_tokens=48),
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def rows_so_far(path: Path) -> list[dict[str, Any]]:
    """The rows that runs have appended to a file until now; makes the file where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return read_rows(path)


def read_prompts(path: Path, task: Task = Task(), seed: int = 7) -> list[dict[str, Any]]:
    """Read rows `id, chunks, question`, in an order that the seed gives, the chunks cut to the first few."""
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    random.Random(seed).shuffle(rows)
    return [{**row, "chunks": list(dict.fromkeys(row["chunks"]))[: task.passages]} for row in rows]


def behind_examples(rows: Sequence[dict[str, Any]], path: Path, task: Task) -> list[dict[str, Any]]:
    """Put examples of a file before rows whose one chunk is a dialogue to summarise."""
    examples = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        examples.append(f"{DIALOGUE.format(row['chunks'][0])}{row['answers'][0]}\n")
    prompts = []
    for row in rows:
        chunks = random.Random(row["id"]).sample(examples, task.passages)
        prompts.append({**row, "chunks": chunks, "question": DIALOGUE.format(row["chunks"][0])})
    return prompts


class Method:
    """One way to blend, as it is written on the command line.

    Args:
        text: `selector[:option=value…][@context]=charge`.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        body, _, charge = text.rpartition("=")
        self.charge = float(charge)
        body, _, self.context = body.partition("@")
        self.selector, *options = re.split(":(?=[a-z_]+=)", body)
        self.options = {}
        for option in options:
            name, value = option.split("=")
            self.options[name] = _value(value)

    def settings(self, ratio: float) -> dict[str, Any]:
        """Return what `BlendCache` takes."""
        found: dict[str, Any] = {"recompute_ratio": ratio, "selector": self.selector}
        if self.options:
            found["selector_options"] = self.options
        return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Bench:
    """A model, and what is measured on it.

    Args:
        model: name or folder.
        contexts: name → text that each chunk is computed behind, instead of BOS; `text` is the library's own.
        task: whose prompts are asked.
        dtype: of the weights; as they are stored where left out.
    """

    def __init__(self, model: str, contexts: dict[str, str], task: Task = Task(), dtype: str = "auto") -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.name = Path(model).name
        self.model, self.tokenizer = load_model(model, dtype=dtype)
        self.is_chat = bool(self.tokenizer.chat_template)
        self.contexts = {
            "": bos_prefix(self.model),
            TEXT: default_prefix(self.model, self.tokenizer),
            **{name: self._context(text) for name, text in contexts.items()},
        }
        self.task = task
        self.score = plugins.load("evaluation.scores", task.score)(self.tokenizer) if task.score else None
        self._stores: dict[tuple[str, str], ChunkStore] = {}  # of the prompts that ratios are looked for on

    def _context(self, text: str) -> tuple[int, ...]:
        if self.is_chat:
            head = self.tokenizer.apply_chat_template(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], tokenize=False
            )
            text = head[: head.index(text) + len(text)]
            return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)
        return tuple(self.tokenizer(text).input_ids)

    def inputs(self, cache: BlendCache, row: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Build the prompt of a row for a cache."""
        if self.task.score == "rouge-l":
            question = f"\n\n{row['question']}"
            return cache.inputs(self.tokenizer, prefix=Samsum.prefix, chunks=row["chunks"], question=question)
        documents = "\n\n".join(row["chunks"])
        if not self.is_chat:
            return cache.inputs_from_text(self.tokenizer, PLAIN.format(documents, row["question"]), row["chunks"])
        user = f"{documents}\n\nQuestion: {row['question']}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        return cache.inputs_from_messages(self.tokenizer, messages, row["chunks"])

    def full(self, ids: torch.Tensor, tokens: int = ANSWER_TOKENS) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Prefill a prompt whole and answer greedily.

        Args:
            ids: `[1, tokens]`.
            tokens: of the answer, at most.

        Returns:
            The answer's ids `[tokens]`, the log probabilities of each of its tokens `[tokens, words]`, and the CPU
            milliseconds to the first of them.
        """
        cache = DynamicCache(config=self.model.config)
        began = time.process_time()
        logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        spent = 1e3 * (time.process_time() - began)
        return *self.continued(cache, logits, tokens), spent

    def continued(self, cache: Any, logits: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Go on greedily from logits `[1, words]`: ids `[tokens]`, log probabilities `[tokens, words]`."""
        answer = []
        found = []
        while len(answer) < tokens:
            found.append(torch.log_softmax(logits[0].float(), -1))
            answer.append(int(logits.argmax()))
            if answer[-1] == self.tokenizer.eos_token_id or (self.score and self._is_line(answer)):
                break
            logits = self.model(torch.tensor([answer[-1:]]), past_key_values=cache).logits[:, -1]
        return torch.tensor(answer), torch.stack(found)

    def _is_line(self, answer: list[int]) -> bool:
        """Return True if an answer has its first line, behind which nothing is scored."""
        return "\n" in self.tokenizer.decode(answer).lstrip("\n")

    def scored(self, row: dict[str, Any], answer: torch.Tensor) -> float:
        """Score an answer."""
        return float(self.score.best(self.tokenizer.decode(answer, skip_special_tokens=True), row["answers"]))

    def blended(
        self, row: dict[str, Any], answer: torch.Tensor, store: ChunkStore, context: str, settings: dict[str, Any]
    ) -> tuple[torch.Tensor, float, Any, float | None]:
        """Prefill a prompt with stored chunks and force the answer on it.

        Returns:
            Log probabilities of each answer token `[tokens, words]`, CPU milliseconds to the first, the report, and
            the score of the answer that this prefill writes itself, where the task has one.
        """
        cache = BlendCache(self.model, store, chunk_prefix_ids=self.contexts[context], **settings)
        inputs = self.inputs(cache, row)
        began = time.process_time()
        first = self.model(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1:]
        spent = 1e3 * (time.process_time() - began)
        report = cache.report
        if report.fallback_reason:
            raise HfBlendError(report.fallback_reason)
        score = None
        held = cache.get_seq_length()
        if self.score and len(answer) > 1:
            score = self.scored(row, self.continued(cache, first[:, -1], self.task.max_new_tokens)[0])
            if cache.get_seq_length() > held:
                cache.crop(held - cache.get_seq_length())
        if len(answer) > 1:
            first = torch.cat((first, self.model(answer[None, :-1], past_key_values=cache).logits), 1)
        return torch.log_softmax(first[0].float(), -1), spent, report, score

    def ratio(self, method: Method, rows: Sequence[dict[str, Any]]) -> float | None:
        """Find the ratio at which a method is charged what it should be; None where even a small one is dearer."""
        if method.charge == 0:
            return 0.0
        charges = []
        for ratio in TRIED_RATIOS:
            charges.append(statistics.fmean(self._charge(row, method, method.settings(ratio)) for row in rows))
        low, high = TRIED_RATIOS
        slope = (charges[1] - charges[0]) / (high - low)
        ratio = low + (method.charge - charges[0]) / slope
        return round(ratio, 4) if 0.005 <= ratio <= 1 else None

    def _charge(self, row: dict[str, Any], method: Method, settings: dict[str, Any]) -> float:
        store = self._stores.setdefault((row["id"], method.context), ChunkStore.open("memory://"))
        found = self.blended(row, torch.zeros(1, dtype=torch.long), store, method.context, settings)
        return float(found[2].charged_budget)


def run(asked: argparse.Namespace) -> None:
    """Measure what is not yet in the file."""
    contexts = {name: Path(file).read_text("utf-8") for name, file in asked.context}
    task = TASKS.get(asked.task, Task())
    bench = Bench(asked.model, contexts, task)
    path = asked.rows / f"{bench.name}-{asked.task}.jsonl"
    lines = rows_so_far(path)
    done = {(line["id"], line["method"]) for line in lines}
    prompts = read_prompts(asked.data, task)
    if asked.examples:
        prompts = behind_examples(prompts, asked.examples, task)
    fitting = (row for row in prompts if is_fitting(bench, row))
    apart = list(itertools.islice(fitting, 2))
    rows = list(itertools.islice(fitting, asked.limit))

    # Find the ratio of each method that has something left to measure
    methods = []
    ratios: dict[str, float | None] = {line["method"]: line["ratio"] for line in lines}
    for text in asked.methods:
        method = Method(text)
        if all((row["id"], text) in done for row in rows[asked.skip :]):
            continue
        if text not in ratios:
            ratios[text] = bench.ratio(method, apart)
        if ratios[text] is not None:
            methods.append(method)
    print(ratios, flush=True)

    # Measure
    with path.open("a", encoding="utf-8") as file:
        for number, row in enumerate(rows[asked.skip :], asked.skip):
            open_methods = [method for method in methods if (row["id"], method.text) not in done]
            for line in measured(bench, row, open_methods, ratios):
                half = "choose" if number % 2 == 0 and number < CHOSEN_ON else "report"
                file.write(json.dumps({"id": row["id"], "half": half, **line}) + "\n")
            file.flush()


def is_fitting(bench: Bench, row: dict[str, Any]) -> bool:
    """Return True if a row's prompt has a length that is measured here."""
    low, high = bench.task.tokens
    tokens = sum(len(bench.tokenizer(chunk).input_ids) for chunk in row["chunks"])
    return len(row["chunks"]) >= bench.task.fewest and low <= tokens <= high


def measured(
    bench: Bench, row: dict[str, Any], methods: Sequence[Method], ratios: dict[str, float | None]
) -> Iterator[dict[str, Any]]:
    """Measure methods on one prompt, and full prefill beside them."""
    if not methods:
        return
    stores = {method.context: ChunkStore.open("memory://") for method in methods}
    ids = bench.inputs(BlendCache(bench.model, ChunkStore.open("memory://")), row)["input_ids"]
    answer, full, full_ms = bench.full(ids, bench.task.max_new_tokens)
    scores = {"full_score": round(bench.scored(row, answer), 4)} if bench.score else {}
    answer = answer[:ANSWER_TOKENS]
    full = full[:ANSWER_TOKENS]
    for context, store in stores.items():  # fill the stores
        bench.blended(row, answer[:1], store, context, {"recompute_ratio": 0.0})
    for method in random.Random(row["id"]).sample(methods, len(methods)):
        ratio = ratios[method.text]
        found, spent, report, score = bench.blended(
            row, answer, stores[method.context], method.context, method.settings(ratio)
        )
        if score is not None:
            scores["score"] = round(score, 4)
        kl = (full.exp() * (full - found)).sum(-1)
        yield {
            "method": method.text,
            "ratio": ratio,
            "charged": round(report.charged_budget, 5),
            "kl": round(float(kl.mean()), 6),
            "kl_first": round(float(kl[0]), 6),
            "ms": round(spent, 1),
            "full_ms": round(full_ms, 1),
            "tokens": ids.shape[1],
            "same": int((found.argmax(-1) == answer).sum()),
            "of": len(answer),
            **scores,
        }


def table(asked: argparse.Namespace) -> None:
    """Write the table of all rows."""
    rows = []
    for path in sorted(
        asked.rows.glob("*.jsonl"), key=lambda path: (path.stem.rpartition("-")[2] in TASKS, path.name)
    ):
        model, _, task = path.stem.rpartition("-")
        lines = read_rows(path)
        first = [line["id"] for line in lines if line["method"] == "none=0"][: asked.limit]
        lines = [line for line in lines if line["id"] in first]
        for half in ("choose", "report", "both"):
            for found in summarise([line for line in lines if half in ("both", line["half"])]):
                kept = BYTES.get(model, 0)
                rows.append({"model": model, "task": task, "half": half, "bytes_per_token": kept, **found})
    settings = {
        "measure": __doc__.split("\n\n")[3].replace("\n", " "),
        "answer_tokens": ANSWER_TOKENS,
        "passages": Task().passages,
        "tokens": Task().tokens,
        "other_tasks": {name: vars(task) for name, task in TASKS.items()},
        "dtype": "float32",
        "threads": 1,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": _commit(),
    }
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    asked.output.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n', "utf-8")
    for row in rows:
        if row["half"] == "both":
            print(
                f"{row['model']:8} {row['task']:9} {row['selector']:34} n {row['n']:3} charged {row['charged']:.3f} "
                f"kl {row['kl']:.2f} [{row['low']:.2f}, {row['high']:.2f}] first {row['kl_first']:.2f} "
                f"[{row['low_first']:.2f}, {row['high_first']:.2f}] {row['speedup']:.1f} x"
            )


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=RESULTS, capture_output=True, text=True, check=True).stdout.strip()


def summarise(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Give a row per method: means over the prompts that full reuse was measured on, as shares of full reuse's."""
    found: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        found[line["method"]][line["id"]] = line
    reuse = found.get("none=0", {})
    for text, own in found.items():
        rows = [line for name, line in own.items() if name in reuse]
        if not rows:
            continue
        selector, _, target = text.rpartition("=")
        unit = [reuse[line["id"]] for line in rows]
        draws = np.random.default_rng(1).integers(len(rows), size=(4000, len(rows)))
        speedups = np.array([line["full_ms"] / line["ms"] for line in rows])
        low, high = np.quantile(np.median(speedups[draws], 1), (0.025, 0.975))
        yield {
            "selector": selector,
            "target": float(target),
            "ratio": statistics.fmean(line["ratio"] for line in rows),
            "charged": _mean(rows, "charged"),
            "n": len(rows),
            **_shares(rows, unit, "kl", ""),
            **_shares(rows, unit, "kl_first", "_first"),
            "kl_nats": _mean(rows, "kl"),
            "kl_first_nats": _mean(rows, "kl_first"),
            **_answers(rows),
            "same": round(sum(line["same"] for line in rows) / sum(line["of"] for line in rows), 4),
            "ttft_ms": round(statistics.median(line["ms"] for line in rows), 1),
            "speedup": round(float(np.median(speedups)), 2),
            "speedup_low": round(float(low), 2),
            "speedup_high": round(float(high), 2),
        }


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return round(statistics.fmean(row[name] for row in rows), 4)


def _shares(rows: Sequence[dict[str, Any]], unit: Sequence[dict[str, Any]], key: str, suffix: str) -> dict[str, float]:
    """The error of a method as a share of the unit's, its interval, and its median in nats."""
    pairs = np.array([(row[key], whole[key]) for row, whole in zip(rows, unit, strict=True)])
    draws = np.random.default_rng(0).integers(len(rows), size=(4000, len(rows)))
    drawn = pairs[draws].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return {
        key: round(float(pairs[:, 0].sum() / pairs[:, 1].sum()), 4),
        f"low{suffix}": round(float(low), 4),
        f"high{suffix}": round(float(high), 4),
        f"median{suffix}": round(float(np.median(pairs[:, 0])), 4),
    }


def _answers(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean scores of a method's answers and of full prefill's, and the interval of their difference."""
    if "score" not in lines[0]:
        return {}
    found = {name: round(statistics.fmean(line[name] for line in lines), 4) for name in ("score", "full_score")}
    return {**found, "score_difference": interval([line["score"] - line["full_score"] for line in lines])}


def command_line(about: str | None, name: str, run: Any, table: Any) -> tuple[argparse.ArgumentParser, Any, Any]:
    """Parse `run` for a model and `table`, over rows in a folder of this name; gives their parent and both."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measure = commands.add_parser("run")
    write = commands.add_parser("table")
    measure.add_argument("--model", default="smollm2")
    measure.set_defaults(do=run)
    write.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    write.set_defaults(do=table)
    for command in (measure, write):
        command.add_argument("--rows", type=Path, default=RESULTS / name)
    return parser, measure, write


def main() -> None:
    """Read the command line."""
    parser, measure, write = command_line(__doc__, "real_selectors", run, table)
    measure.add_argument("--task", required=True)
    measure.add_argument("--data", type=Path, required=True)
    measure.add_argument("--methods", nargs="+", required=True)
    measure.add_argument("--context", nargs=2, action="append", default=[], metavar=("NAME", "FILE"))
    measure.add_argument("--examples", type=Path, help="what is put before each row of a summarisation")
    measure.add_argument("--skip", type=int, default=0, help="prompts that something was chosen on")
    measure.add_argument("--limit", type=int, default=40)
    write.add_argument("--limit", type=int, default=40, help="prompts of a task that are counted, in their order")
    asked = parser.parse_args()
    asked.do(asked)


if __name__ == "__main__":
    main()
