# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend serve` with and without healing: first tokens of conversations that come at random, and their error.

    python benchmarks/healing_server.py run --data hotpotqa_natural.jsonl
    python benchmarks/healing_server.py table

Two tenants have conversations of three turns over HTTP. The first question of each brings six passages, drawn from
twelve of HotpotQA that are stored before; all questions name one of the six. Conversations begin at random within a
round, and a turn comes a random time after the one before (exponential), or when that is answered. Each round goes to
both servers with the same times, in turns, while the other server is stopped (SIGSTOP): at one time one server works.

The first token is that of the stream, by the clock. Its ratio is of the same turn with and without healing; intervals
draw conversations again. The error is the KL divergence of the next-token distributions from stock's on the same
tokens, in nats, mean over the answer: over the 20 likeliest tokens that the server says and all others as one. A turn
is healed if the server says that it found exact blocks up to the end of the passages and blended nothing.
`run` appends a line for each turn to `--rows`, `table` writes `benchmarks/results/healing_server.json`.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers
from real_selectors import RESULTS, _commit
from torch import Tensor
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation.answering import REUSE, divergence, ids_of
from hf_blend.evaluation.bundled import open_model
from hf_blend.prompt.history import shared_tokens

LIBRARY, PASSAGES, PASSAGE_TOKENS, TURNS, SEED = 12, 6, (70, 160), 3, 11
ROUNDS, CONVERSATIONS = 5, 4  # of a round: 60 turns in all
BEGIN_S, PAUSE_S, LEAST_S = 60.0, 25.0, 1.0  # within which conversations begin; mean and least time behind an answer
ANSWER_TOKENS, LIKELIEST, DRAWS, PAGE = 12, 20, 2000, 32
ASKED = ("What is said about {}?", "And what about {}?", "Say in a few words what {} is.")
TENANTS = [{"name": name, "api_key": f"key-of-{name}-0123456789", "secret": f"{number}1" * 32}
           for number, name in enumerate(("north", "south"))]  # fmt: skip
MODES = ("no-heal", "heal")


def library(path: Path, tokenizer: Any) -> list[str]:
    """The first passages of the right length, of rows in the order of the seed."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
    random.Random(SEED).shuffle(rows)
    texts = dict.fromkeys(text for row in rows for text in row["chunks"])
    low, high = PASSAGE_TOKENS
    return [text for text in texts if low <= len(tokenizer(text).input_ids) <= high][:LIBRARY]


def plan(texts: list[str], number: int) -> list[dict[str, Any]]:
    """The conversations of a round: passages, questions, and the times before each turn."""
    draw, conversations = random.Random(f"{SEED} {number}"), list[dict[str, Any]]()
    for place in range(CONVERSATIONS):
        chosen = draw.sample(texts, PASSAGES)
        titles = [text.partition("\n")[0] for text in draw.sample(chosen, TURNS)]
        conversations.append({
            "id": f"{number}.{place}", "tenant": TENANTS[place % 2], "passages": chosen,
            "questions": [ask.format(title) for ask, title in zip(ASKED, titles, strict=True)],
            "waits_s": [draw.uniform(0, BEGIN_S), *(draw.expovariate(1 / PAUSE_S) for _ in range(TURNS - 1))],
        })  # fmt: skip
    return conversations


def messages_of(conversation: dict[str, Any], answers: list[str]) -> list[dict[str, str]]:
    """All messages up to the next question."""
    texts = ["\n\n".join([*conversation["passages"], conversation["questions"][0]]), *conversation["questions"][1:]]
    messages = []
    for text, answer in zip(texts, [*answers, None], strict=False):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
    return messages[:-1]


@contextmanager
def server(folder: Path, mode: str, model: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server in a process of its own; gives it and its URL."""
    (folder / "tenants.json").write_text(json.dumps({"tenants": TENANTS}), "utf-8")
    options = {"store": folder / "store", "tenants": folder / "tenants.json", "model": model, "cache-tokens": 16384}
    command = [sys.executable, "-P", "-m", "hf_blend", "serve", f"--{mode}", "--json", "--port", "0"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (folder / f"{mode}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        said = b""
        while b"}" not in said:
            line = process.stdout.readline() if process.stdout else b""
            if not line:
                raise RuntimeError((folder / f"{mode}.log").read_text())
            said += line
        yield process, json.loads(said)["url"]
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(60)


def talk(url: str, name: str, conversation: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Have one conversation with a server; appends a row for each turn."""
    answers = list[str]()
    with httpx.Client(timeout=600) as client:
        for turn, (wait_s, _) in enumerate(zip(conversation["waits_s"], range(TURNS), strict=True)):
            time.sleep(wait_s if turn == 0 else max(LEAST_S, wait_s))
            messages = messages_of(conversation, answers)
            body: dict[str, Any] = {
                "model": name, "messages": messages, "stream": True, "stream_options": {"include_usage": True},
                "temperature": 0, "max_tokens": ANSWER_TOKENS, "logprobs": True, "top_logprobs": LIKELIEST,
            }  # fmt: skip
            if turn == 0:
                body["documents"] = conversation["passages"]
            began_s, first_s, text, tokens, usage = time.perf_counter(), 0.0, "", list[Any](), dict[str, Any]()
            headers = {"authorization": f"Bearer {conversation['tenant']['api_key']}"}
            with client.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as response:
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    first_s = first_s or time.perf_counter()
                    event = json.loads(line.removeprefix("data: "))
                    usage = event.get("usage") or usage
                    for choice in event.get("choices", ()):
                        text += choice["delta"].get("content") or ""
                        tokens += (choice.get("logprobs") or {}).get("content") or []
            answers.append(text)
            said = [[(one["bytes"], one["logprob"]) for one in (token, *token["top_logprobs"])] for token in tokens]
            rows.append({
                "id": conversation["id"], "turn": turn + 1, "first_ms": round(1e3 * (first_s - began_s), 1),
                "messages": messages, "answer": text, "said": said, "usage": usage,
            })  # fmt: skip


class Stock:
    """Stock's distributions on the tokens of prompts and answers."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache, self._held = DynamicCache(config=model.config), list[int]()
        byte_of = {char: byte for byte, char in _byte_chars().items()}
        names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.id_of = {
            tuple(byte_of[char] for char in name): number
            for number, name in enumerate(names)
            if number not in tokenizer.all_special_ids and all(char in byte_of for char in name)
        }

    @torch.no_grad()
    def kl(self, row: dict[str, Any]) -> tuple[float, int]:
        """The divergence of a turn, and how many first tokens of its prompt have the passages."""
        rows = [entry for entry in row["said"] if tuple(entry[0][0]) in self.id_of]
        answer = [self.id_of[tuple(entry[0][0])] for entry in rows]
        ids = ids_of(self.tokenizer, {"messages": row["messages"]})
        prompt = [*ids, *answer[:-1]]
        same = min(shared_tokens(prompt, self._held), len(ids) - 1)
        if same < self.cache.get_seq_length():
            self.cache.crop(same - self.cache.get_seq_length())
        new = torch.tensor([prompt[same:]])
        logits = self.model(new, past_key_values=self.cache, logits_to_keep=len(answer)).logits[0]
        self._held = prompt
        errors = [self._one(entry, logs) for entry, logs in zip(rows, logits.double().log_softmax(-1), strict=True)]
        return statistics.fmean(errors), len(ids)

    def _one(self, entry: list[Any], full: Tensor) -> float:
        """The divergence at one token: the likeliest tokens, and all others as one."""
        said = {self.id_of[tuple(bytes_)]: logprob for bytes_, logprob in entry if tuple(bytes_) in self.id_of}
        places, got = torch.tensor([*said]), torch.tensor([*said.values()], dtype=torch.double)
        pairs = []
        for logs in (got, full[places]):
            rest = torch.log((1 - logs.exp().sum()).clamp_min(1e-12))
            pairs.append(torch.cat([logs, rest[None]]))
        return float(divergence(pairs[0][None], pairs[1][None])[0])


def _byte_chars() -> dict[int, str]:
    """The letters that byte-level BPE writes for bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + at) for at, byte in enumerate(others)}}


def stored(folder: Path, model: Any, tokenizer: Any, texts: list[str]) -> None:
    """Store the passages for both tenants."""
    for tenant in TENANTS:
        with ChunkStore.open(
            str(folder / "store"), namespace=tenant["name"], secret=bytes.fromhex(tenant["secret"])
        ) as store:
            prefix = store.default_prefix(model, tokenizer)
            cache = BlendCache(model, store, REUSE, chunk_prefix_ids=prefix)
            messages = [{"role": "user", "content": "\n\n".join([*texts, "?"])}]
            with torch.no_grad():
                model(
                    **cache.inputs_from_messages(tokenizer, messages, texts), past_key_values=cache, logits_to_keep=1
                )
            print(cache.report, flush=True)


def run(arguments: argparse.Namespace) -> None:
    """Measure the rounds that are not measured yet."""
    torch.set_num_threads(1)
    source = open_model(arguments.model, "auto", "auto")
    model, tokenizer = source.load(), source.tokenizer
    texts, path = library(arguments.data, tokenizer), arguments.rows
    done = {json.loads(line)["round"] for line in path.read_text("utf-8").splitlines()} if path.exists() else set()
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stored(folder, model, tokenizer, texts)
        servers = {mode: stack.enter_context(server(folder, mode, arguments.model)) for mode in MODES}
        for process, _ in servers.values():
            process.send_signal(signal.SIGSTOP)
        for number in (number for number in range(arguments.rounds) if number not in done):
            found = list[dict[str, Any]]()
            for mode in MODES[:: 1 if number % 2 else -1]:
                process, url = servers[mode]
                os.kill(process.pid, signal.SIGCONT)
                rows, began_s = list[dict[str, Any]](), time.perf_counter()
                threads = [threading.Thread(target=talk, args=(url, arguments.model, conversation, rows))
                           for conversation in plan(texts, number)]  # fmt: skip
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                os.kill(process.pid, signal.SIGSTOP)
                print(number, mode, f"{time.perf_counter() - began_s:.0f} s", len(rows), flush=True)
                found += [{"round": number, "mode": mode, **row} for row in rows]
            with path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)


def compare(arguments: argparse.Namespace) -> None:
    """Add the divergences from stock, which take a prefill of each conversation."""
    torch.set_num_threads(1)
    source = open_model(arguments.model, "auto", "auto")
    lines = [json.loads(line) for line in arguments.rows.read_text("utf-8").splitlines()]
    stock = Stock(source.load(), source.tokenizer)
    for row in sorted(lines, key=lambda row: (row["id"], row["mode"], row["turn"])):
        if "kl" not in row:
            row["kl"], row["tokens"] = stock.kl(row)
            print(
                row["id"], row["mode"], row["turn"], row["first_ms"], row["usage"]["hf_blend"], row["kl"], flush=True
            )
            arguments.rows.write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    table(arguments)


def table(arguments: argparse.Namespace) -> None:
    """Write the figures of all turns, and a short row of each."""
    lines = [json.loads(line) for line in arguments.rows.read_text("utf-8").splitlines()]
    rows = [
        {
            "round": row["round"], "id": row["id"], "turn": row["turn"], "mode": row["mode"],
            "first_ms": row["first_ms"], "prefill": row["usage"]["hf_blend"]["prefill"],
            "prefix_tokens": row["usage"]["hf_blend"]["prefix_tokens"], "tokens": row["usage"]["prompt_tokens"],
            "computed_chunks": row["usage"]["hf_blend"]["computed_chunks"], "kl": row.get("kl"),
        } for row in lines
    ]  # fmt: skip
    first = {(row["id"], row["mode"]): row["tokens"] for row in rows if row["turn"] == 1}
    for row in rows:
        before = first[row["id"], row["mode"]]
        row["is_healed"] = row["turn"] > 1 and row["prefill"] == "plain" and row["prefix_tokens"] > before - 2 * PAGE
    summary = {"turns": len(rows) // 2, "conversations": len({row["id"] for row in rows})}
    for turns, name in (((1, 2, 3), "all"), ((1,), "first"), ((2, 3), "later")):
        own = [row for row in rows if row["turn"] in turns]
        summary[name] = {
            f"p{share}": [_interval(own, share, mode) for mode in MODES] + [_interval(own, share, None)]
            for share in (50, 95)
        }  # of both servers in ms, and with healing of without
    kinds = {
        "without healing": [row for row in rows if row["mode"] == MODES[0] and row["turn"] > 1],
        "healed": [row for row in rows if row["mode"] == MODES[1] and row["is_healed"]],
        "not yet": [row for row in rows if row["mode"] == MODES[1] and row["turn"] > 1 and not row["is_healed"]],
    }  # fmt: skip
    summary["kl_of_later_turns"] = {name: _errors(own) for name, own in kinds.items()}
    settings = {
        "model": arguments.model, "threads": 1, "seed": SEED, "tenants": len(TENANTS), "passages": PASSAGES,
        "begin_s": BEGIN_S, "pause_s": PAUSE_S, "torch": torch.__version__,
        "transformers": transformers.__version__, "commit": _commit(),
    }  # fmt: skip
    text = ",\n".join("  " + json.dumps(row) for row in rows)
    arguments.output.write_text(
        f'{{"settings": {json.dumps(settings)},\n"summary": {json.dumps(summary)},\n"rows": [\n{text}\n]}}\n', "utf-8"
    )
    print(json.dumps(summary, indent=1))


def _errors(rows: list[dict[str, Any]]) -> dict[str, Any]:
    values = [row["kl"] for row in rows if row["kl"] is not None]
    if not values:
        return {"n": 0}
    return {
        "n": len(values),
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "most": max(values),
    }


def _percentile(values: list[float], share: int) -> float:
    return sorted(values)[max(0, -(-share * len(values) // 100) - 1)]


def _interval(rows: list[dict[str, Any]], share: int, mode: str | None) -> list[float]:
    """A percentile of the first token in ms, or its ratio of both servers, and its interval of 95 %."""
    by_id: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_id.setdefault(row["id"], []).append(row)

    def figure(ids: list[str]) -> float:
        values = [
            _percentile([row["first_ms"] for one in ids for row in by_id[one] if row["mode"] == name], share)
            for name in MODES
        ]
        return values[1] / values[0] if mode is None else values[MODES.index(mode)]

    draw, names = random.Random(0), sorted(by_id)
    again = sorted(figure(draw.choices(names, k=len(names))) for _ in range(DRAWS))
    return [round(value, 3) for value in (figure(names), again[DRAWS // 40], again[-DRAWS // 40 - 1])]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--rounds", type=int, default=ROUNDS)
    runs.set_defaults(act=run)
    comparisons = commands.add_parser("compare")
    comparisons.set_defaults(act=compare)
    tables = commands.add_parser("table")
    tables.set_defaults(act=table)
    for command in (runs, comparisons, tables):
        command.add_argument("--model", default="smollm2")
        command.add_argument("--rows", type=Path, required=True)
        command.add_argument("--output", type=Path, default=RESULTS / "healing_server.json")
    chosen = parser.parse_args()
    chosen.act(chosen)
