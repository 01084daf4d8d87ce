# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a conversation loses whose history is edited, when K and V behind the edit are moved instead of computed.

    python benchmarks/edits.py run --model smollm2 --data DIR --limit 40
    python benchmarks/edits.py run --model qwen2.5-coder-1.5b --dtype bfloat16 --data DIR --limit 40
    python benchmarks/edits.py table

A conversation has a system prompt with a date and three turns: four passages of HotpotQA or MuSiQue as search results
with their question, a thought, and an answer; between two turns the user says a code word. Its K and V are computed
whole. Then it is edited in one way, and a further question is asked: the third again, or, where what is dropped is the
code word, that. `compute` computes all behind the edit; `moved` repairs nothing; `blended R` recomputes a share R of
the moved tokens by the default rule; `healed S` has then healed a share S of what is not exact.

The error is the KL divergence of the next-token distributions from stock's full prefill of the edited conversation, in
nats, mean over the first ten tokens of stock's answer. `says` is how often the code word is the most likely end of an
answer that begins to say it, `nats` what a token of it costs there; `not dropped` is the other end. Time is of one
thread's CPU to the first token, with finding and copying what is moved; `speed` is that of computing over it. `run`
appends a line per conversation and edit and skips those that are there. `table` writes
`benchmarks/results/edits.json`; intervals are over conversations.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import parted_models
import torch
from real_selectors import RESULTS, Bench, _commit, read_rows, rows_so_far
from robust import passages
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.summary import share_interval

SEED = 11
PASSAGES, TURNS = 4, 3
COMPARED_TOKENS = 10
EDITS = ("thought", "message", "output", "date", "answer", "secret")
WAYS: dict[str, dict[str, Any]] = {
    "compute": {"edits": "compute"},
    "moved": {"selector": "none", "recompute_ratio": 0.0},
    "blended .05": {"recompute_ratio": 0.05},
    "blended .15": {"recompute_ratio": 0.15},
}
HEALED = {"healed .5": 0.5, "healed 1": 1.0}  # a share of what the last of these has not computed
SECRET = "What is my code word?"
OPENING = "Your code word is"
Row = dict[str, Any]


def conversations(folder: Path) -> list[list[Row]]:
    """Give the rows of each conversation, of one task and then of the other."""
    found = []
    for task in ("hotpotqa", "musique"):
        lines = (folder / f"{task}_natural.jsonl").read_text("utf-8").splitlines()
        rows = [json.loads(line) for line in lines]
        random.Random(SEED).shuffle(rows)
        found.append([rows[start : start + TURNS] for start in range(0, len(rows) - TURNS, TURNS)])
    return [rows for pair in zip(*found, strict=True) for rows in pair]


def messages_of(rows: Sequence[Row], code: str, edit: str = "", question: str = "") -> list[dict[str, str]]:
    """Make the messages of a conversation, edited in one way; without a question the third is asked again."""
    date = "4 March" if edit == "date" else "3 March"
    said = [("system", f"Today is {date} 2026. You answer from search results, in one sentence.")]
    for number, row in enumerate(rows):
        if number == 1 and edit != "secret":
            said += [("user", f"My code word is {code}. Keep it in mind."), ("assistant", "I will.")]
        if number == 1 and edit == "message":
            continue
        found = passages(row, PASSAGES)
        answer = row["answers"][0]
        thought = (
            f"<think>\nI look for what helps with: {row['question']} {' '.join(found[-1].split()[:40])}\n</think>\n\n"
        )
        if number == 0 and edit == "output":
            found = found[: PASSAGES // 2]
        if number == 0 and edit == "thought":
            thought = ""
        if number == 0 and edit == "answer":
            answer = f"not in the results, but {rows[1]['answers'][0]} may be meant"
        said.append(("user", "\n\n".join(["Search results:", *found, row["question"]])))
        said.append(("assistant", f"{thought}It is {answer}."))
    said.append(("user", question or f"Say it again in one sentence: {rows[-1]['question']}"))
    return [{"role": role, "content": content} for role, content in said]


def measured(
    bench: Bench, messages: list[dict[str, str]], way: str, path: str, full: Sequence[Tensor], code: str
) -> Iterator[Any]:
    """Give each way's name, its error and cost; the last ways heal the cache of the one before.

    Args:
        bench: the model.
        messages: the edited conversation.
        way: of `WAYS`.
        path: of the conversation as it was.
        full: stock's answer `[tokens]`, and its log probabilities `[tokens, words]`.
        code: the word that is asked for; else empty.
    """
    cache = opened(bench, path, way)
    began = time.process_time()
    ids = cache.inputs_from_messages(bench.tokenizer, messages)["input_ids"]
    past = cache.get_seq_length()
    first = bench.model(ids[:, past:], past_key_values=cache, logits_to_keep=1).logits[0]
    ms = 1e3 * (time.process_time() - began)
    kept = (past + cache.report.reused_tokens) / ids.shape[1]
    row = {"ms": round(ms, 1), "kept": round(kept, 4), "charged": round(cache.report.charged_budget, 4)}
    row["kl"] = divergence(bench, cache, first, full)
    yield way, row | (recalled(bench, cache, code) if code else {})
    left = cache.heal(0)
    for name, share in HEALED.items() if way == [*WAYS][-1] else ():
        cache.heal(cache.heal(0) - round((1 - share) * left))
        cache.crop(-1)
        first = bench.model(ids[:, -1:], past_key_values=cache).logits[0]
        row = {"kl": divergence(bench, cache, first, full)}
        yield name, row | (recalled(bench, cache, code) if code else {})


def opened(bench: Bench, path: str, way: str) -> BlendCache:
    """The cache of the conversation as it was, which takes edits in one way."""
    return BlendCache.load(bench.model, ChunkStore.open("memory://"), path, **{"edits": "blend", **WAYS[way]})


def divergence(bench: Bench, cache: BlendCache, first: Tensor, full: Sequence[Tensor]) -> float:
    """The error behind a prompt, whose logits are `first`, `[1, words]`; the cache stays as it is."""
    answer, logs = full
    logits = torch.cat([first, bench.model(answer[None], past_key_values=cache).logits[0, :-1]])
    cache.crop(-len(answer))
    return round(float((logs.exp() * (logs - torch.log_softmax(logits.float(), -1))).sum(-1).mean()), 9)


def recalled(bench: Bench, cache: Any, code: str) -> Row:
    """How an answer that begins to say the code word goes on: nats of a token of it, and whether it is said."""
    opening, word = (bench.tokenizer(text, add_special_tokens=False).input_ids for text in (OPENING, f" {code}"))
    logits = bench.model(torch.tensor([[*opening, *word]]), past_key_values=cache).logits[0, len(opening) - 1 : -1]
    cache.crop(-len(opening) - len(word))
    nats = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(word))
    return {"nats": round(float(nats), 4), "says": logits.argmax(-1).tolist() == word}


def code_word(number: int) -> str:
    """The code word of a conversation."""
    return f"{random.Random(number).choice(('velvet', 'granite', 'saffron', 'harbor'))}-{4271 + 37 * number}"


def save_held(bench: Bench, messages: list[dict[str, str]], path: str) -> int:
    """Compute a conversation whole and save its cache; gives how many tokens it has."""
    held = bench.tokenizer.apply_chat_template(messages, return_dict=False)
    cache = BlendCache(bench.model, ChunkStore.open("memory://"))
    bench.model(torch.tensor([held]), past_key_values=cache, logits_to_keep=1)
    cache.save(path)
    return len(held)


def run(arguments: argparse.Namespace) -> None:
    """Measure what is not measured yet."""
    bench = Bench(parted_models.locate(arguments.model), {}, dtype=arguments.dtype)
    path = arguments.rows / f"{arguments.model}.jsonl"
    lines = rows_so_far(path)
    done = {(line["id"], line["edit"]) for line in lines}
    for number, rows in [*enumerate(conversations(arguments.data)[: arguments.limit])][arguments.first :]:
        code = code_word(number)
        if all((number, edit) in done for edit in EDITS):
            continue
        with tempfile.TemporaryDirectory() as folder:
            session = f"{folder}/session"
            held = save_held(bench, messages_of(rows, code)[:-1], session)
            for edit in (one for one in EDITS if (number, one) not in done):
                question = SECRET if edit == "secret" else ""
                messages = messages_of(rows, code, edit, question)
                ids = bench.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                *full, _ = bench.full(torch.tensor([ids]), COMPARED_TOKENS)
                about = {"id": number, "dtype": str(bench.model.dtype)[6:], "edit": edit, "code": code, "held": held}
                line = {**about, "tokens": len(ids), "ways": {}}
                for way in WAYS:
                    line["ways"] |= dict(measured(bench, messages, way, session, full, question and code))
                if question:
                    messages = messages_of(rows, code, question=question)
                    ids = bench.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                    whole = DynamicCache(config=bench.model.config)
                    bench.model(torch.tensor([ids]), past_key_values=whole, logits_to_keep=1)
                    line["ways"]["not dropped"] = {"kl": 0.0, **recalled(bench, whole, code)}
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def table(arguments: argparse.Namespace) -> None:
    """Write the table of all rows, and print it."""
    results = []
    for path in sorted(arguments.rows.glob("*.jsonl")):
        lines = read_rows(path)
        for edit in EDITS:
            of_edit = [line for line in lines if line["edit"] == edit]
            for way in of_edit[0]["ways"] if of_edit else ():
                about = {"model": path.stem, "dtype": lines[0].get("dtype", "float32"), "edit": edit, "way": way}
                results.append({**about, **summarised(of_edit, way)})
                print(*results[-1].values())
    text = ",\n".join("  " + json.dumps(row) for row in results)
    settings = {"seed": SEED, "threads": 1, "torch": torch.__version__, "commit": _commit()}
    arguments.output.write_text(f'{{"settings": {json.dumps(settings)},\n"rows": [\n{text}\n]}}\n', "utf-8")


def summarised(lines: Sequence[Row], way: str) -> Row:
    """The figures of one way of one edit: `of_moved` is its error as a share of moving alone, with an interval."""
    of_way = [line["ways"][way] for line in lines]
    kl = [found["kl"] for found in of_way]
    moved = [max(1e-9, line["ways"]["moved"]["kl"]) for line in lines]  # some edits change nothing
    row = {
        "n": len(lines),
        "tokens": round(statistics.median(line["tokens"] for line in lines)),
        "kl": round(statistics.fmean(kl), 5),
        "kl_median": round(statistics.median(kl), 5),
        "of_moved": [round(value, 3) for value in (sum(kl) / sum(moved), *share_interval(kl, moved))],
    }
    if "says" in of_way[0]:
        row["says"] = sum(found["says"] for found in of_way)
        row["nats"] = round(statistics.fmean(found["nats"] for found in of_way), 3)
    if "ms" in of_way[0]:
        row["speed"] = round(
            statistics.median(line["ways"]["compute"]["ms"] / line["ways"][way]["ms"] for line in lines), 2
        )
        row["kept"] = round(statistics.fmean(found["kept"] for found in of_way), 3)
        row["charged"] = round(statistics.fmean(found["charged"] for found in of_way), 3)
    return row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.set_defaults(act=run)
    runs.add_argument("--first", type=int, default=0, help="the first conversation; a second process may take others")
    runs.add_argument("--model", required=True)
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--dtype", default="auto")
    runs.add_argument("--limit", type=int, default=40)
    tables = commands.add_parser("table")
    tables.add_argument("--output", type=Path, default=RESULTS / "edits.json")
    tables.set_defaults(act=table)
    for command in (runs, tables):
        command.add_argument("--rows", type=Path, default=RESULTS / "edits")
    chosen = parser.parse_args()
    chosen.act(chosen)
