# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`hf-blend chat` in a terminal, turn by turn: what was healed when a question came, and when its answer began.

    python benchmarks/chat_turns.py run --data hotpotqa_natural.jsonl --pause 5
    python benchmarks/chat_turns.py run --data hotpotqa_natural.jsonl --pause 5 --top-k 4

A run is a conversation about the ten passages of a question of HotpotQA, each in a file of a folder: that question and
one about each of four passages, named by their titles. The command runs in a terminal of its own. Behind each answer
nobody types for a while; then `/stats` asks how many tokens are exact, and the next question is sent. With `--top-k
10` the first question brings all passages, with fewer later ones bring more.

Stock has the same conversation with the same answers, in this process, in turns with the command, which is stopped
(SIGSTOP) meanwhile: behind a `DynamicCache` of all that was said before, and by a full prefill. Milliseconds are those
of the clock: of the command from the end of the line to the first letter on the screen, of stock from the messages to
the first token. The passages are in the store before. What is measured is added to `--output`.
"""

import argparse
import json
import os
import pty
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from real_selectors import RESULTS, _commit
from transformers import DynamicCache

from hf_blend import ChunkStore
from hf_blend.evaluation.answering import AnswerStreamer, Turn, ids_of
from hf_blend.evaluation.asking import Chat, Pipeline
from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.documents import Document
from hf_blend.evaluation.retrieving import Retriever, Splitter
from hf_blend.prompt.history import shared_tokens

DOCUMENTS, TURNS, SEED = 10, 5, 7
FULL_TURNS = 2  # so many turns are prefilled in full, too
ASKED = "What is said about {}?"
END = re.compile(r"\nFirst token after .*\nRetrieved: .*\n\n> $")
EXACT = re.compile(r"(\d+) tokens were healed, (\d+) of (\d+) are exact\.\n> $")
WAIT_S = 300


class Terminal:
    """`hf-blend chat` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        attributes = termios.tcgetattr(slave)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(slave, termios.TCSANOW, attributes)
        command = [sys.executable, "-P", "-m", "hf_blend", "chat", *arguments]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
        os.close(slave)
        self.until(re.compile(r"> $"))

    def until(self, end: re.Pattern[str]) -> tuple[str, float]:
        """Read up to what ends with a pattern; gives the text, and when its first letter came."""
        text, first_s, last_s = "", 0.0, time.perf_counter() + WAIT_S
        while not end.search(text):
            if not select.select([self._master], [], [], max(0.0, last_s - time.perf_counter()))[0]:
                raise TimeoutError(
                    f"the command wrote {text!r} within {WAIT_S} s, expected {end.pattern!r} at the end"
                )
            new = os.read(self._master, 65536).decode("utf-8", "replace").replace("\r\n", "\n")
            first_s = first_s or time.perf_counter()
            text += new
        return text, first_s

    def send(self, line: str, end: re.Pattern[str]) -> tuple[str, float]:
        """Send a line; gives what is written behind it, and after how many milliseconds that began."""
        began_s = time.perf_counter()
        os.write(self._master, f"{line}\n".encode())
        text, first_s = self.until(end)
        return text, 1e3 * (first_s - began_s)

    def close(self) -> None:
        """End the command."""
        os.write(self._master, b"/quit\n")
        self.process.wait(60)
        os.close(self._master)


class Stock:
    """The same conversation by stock transformers."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.cache = chat, DynamicCache(config=chat.pipeline.model.config)
        self._held: list[int] = []

    @property
    def tokens(self) -> int:
        """How many tokens are held."""
        return len(self._held)

    def answer(self, request: dict[str, Any], is_full: bool, tokens: int) -> tuple[str, float, int]:
        """An answer, milliseconds to its first token, and how many tokens were computed up to there."""
        pipeline, began_s = self.chat.pipeline, time.perf_counter()
        ids = ids_of(pipeline.tokenizer, request)
        cache: Any = DynamicCache(config=pipeline.model.config) if is_full else self.cache
        same = 0 if is_full else shared_tokens(ids[:-1], self._held)
        if not is_full and same < cache.get_seq_length():
            cache.crop(same - cache.get_seq_length())
        streamer, inputs = AnswerStreamer(pipeline.tokenizer, started=began_s), torch.tensor([ids])
        output = pipeline.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), past_key_values=cache, streamer=streamer,
            do_sample=False, max_new_tokens=tokens,
        )  # fmt: skip
        if not is_full:
            self._held = ids
        text = pipeline.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
        return text, streamer.ttft_ms, len(ids) - same

    def hear(self, answer: str) -> None:
        """Hold the answer of the command in the place of its own; not timed."""
        pipeline = self.chat.pipeline
        self.cache.crop(len(self._held) - self.cache.get_seq_length())
        ids = pipeline.tokenizer(answer, add_special_tokens=False).input_ids
        if ids:
            with torch.no_grad():
                pipeline.model(torch.tensor([ids]), past_key_values=self.cache, logits_to_keep=1)
        self._held = [*self._held, *ids]


def questions(row: dict[str, Any], number: int) -> list[str]:
    """What is asked about the passages of a row."""
    titles = [text.partition("\n")[0].strip() for text in row["chunks"]]
    return [row["question"], *map(ASKED.format, random.Random(number).sample(titles, TURNS - 1))]


def conversation(
    arguments: argparse.Namespace, chat: Chat, row: dict[str, Any], number: int, folder: Path
) -> list[dict[str, Any]]:
    """One run; a row for each turn."""
    own = folder / str(number)
    own.mkdir(exist_ok=True)
    documents = [Document(f"{place}.txt", text) for place, text in enumerate(row["chunks"])]
    for document in documents:
        (own / document.name).write_text(document.text, "utf-8")
    chat.turns.clear()
    chat.retriever = Retriever(Splitter(chat.pipeline.tokenizer).split_all(documents), 0)
    chat.pipeline.store_chunks(chat.prepare(row["question"]), chat.config)
    chat.retriever.top_k = arguments.top_k
    options = ("--model", arguments.model, "--store", f"{folder}/store", "--top-k", str(arguments.top_k),
               "--max-new-tokens", str(arguments.tokens))  # fmt: skip
    terminal, stock, rows, before = Terminal(str(own), *options), Stock(chat), list[dict[str, Any]](), 0
    for turn, question in enumerate(questions(row, number)[: arguments.turns]):
        healed = exact = cached = None
        if turn:
            time.sleep(arguments.pause)
            found = EXACT.search(terminal.send("/stats", EXACT)[0])
            healed, exact, cached = map(int, found.groups()) if found else (0, 0, 0)
        text, ms = terminal.send(question, END)
        answer = END.sub("", text).strip()
        os.kill(terminal.process.pid, signal.SIGSTOP)
        try:
            prepared = chat.prepare(question)
            full_ms = stock.answer(prepared.request, True, 1)[1] if turn < FULL_TURNS else None
            expected, stock_ms, stock_tokens = stock.answer(prepared.request, False, arguments.tokens)
            prompt_tokens = stock.tokens
            stock.hear(answer)
        finally:
            os.kill(terminal.process.pid, signal.SIGCONT)
        chat.turns.append(Turn(question, answer, prepared.documents))
        rows.append({
            "run": number, "turn": turn + 1, "pause_s": arguments.pause, "top_k": arguments.top_k,
            "tokens": prompt_tokens, "documents": len(prepared.documents), "new_tokens": stock_tokens,
            "answer_tokens": len(chat.pipeline.tokenizer(answer).input_ids),
            "healed_tokens": healed, "exact_tokens": exact, "cached_tokens": cached,
            "exact_share": round(min(1.0, exact / before), 4) if before and exact is not None else None,
            "chat_ms": round(ms, 1), "stock_ms": round(stock_ms, 1), "full_ms": full_ms and round(full_ms, 1),
            "is_same": answer == expected,
        })  # fmt: skip
        before = prompt_tokens
        print(json.dumps(rows[-1]), answer[:60].replace("\n", " "), "|", expected[:60].replace("\n", " "), flush=True)
    terminal.close()
    return rows


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each turn, by pause and number of passages; ratios are of the pairs."""
    kinds: dict[tuple[float, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((row["top_k"], row["pause_s"], row["turn"]), []).append(row)
    summary = []
    for (top_k, pause, turn), own in sorted(kinds.items(), key=lambda item: (-item[0][0], *item[0][1:])):
        names = ("tokens", "documents", "new_tokens", "answer_tokens", "chat_ms", "stock_ms")
        full = [row for row in own if row["full_ms"]]
        shares = [row["exact_share"] for row in own if row["exact_share"] is not None]
        summary.append({
            "top_k": top_k, "pause_s": pause, "turn": turn, "n": len(own),
            **{name: round(statistics.median(row[name] for row in own)) for name in names},
            "exact_share": round(statistics.median(shares), 3) if shares else None,
            "least_exact_share": min(shares, default=None),
            "of_stock": round(statistics.median(row["chat_ms"] / row["stock_ms"] for row in own), 2),
            "of_full": round(statistics.median(row["chat_ms"] / row["full_ms"] for row in full), 2) if full else None,
            "full_ms": round(statistics.median(row["full_ms"] for row in full)) if full else None,
            "same_answers": sum(row["is_same"] for row in own),
        })  # fmt: skip
    return summary


def run(arguments: argparse.Namespace) -> None:
    """Measure what is not measured yet."""
    torch.set_num_threads(arguments.threads)
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the command
    source = open_model(arguments.model, "auto", "auto")
    with tempfile.TemporaryDirectory() as folder, ChunkStore.open(f"{folder}/store") as store:
        pipeline = Pipeline(source.load(), source.tokenizer, store)
        config = store.recipe(pipeline.model).config()
        chat = Chat(pipeline, source, Retriever([]), config, None, arguments.tokens)
        lines = [json.loads(line) for line in arguments.data.read_text("utf-8").splitlines() if line]
        lines = [row for row in lines if len(row["chunks"]) == DOCUMENTS]
        random.Random(SEED).shuffle(lines)
        path: Path = arguments.output
        rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
        settings = {
            "model": arguments.model, "dtype": str(pipeline.model.dtype)[6:], "threads": arguments.threads,
            "most_answer_tokens": arguments.tokens, "seed": SEED, "torch": torch.__version__,
            "transformers": transformers.__version__, "commit": _commit(),
        }  # fmt: skip
        for number in range(1, arguments.runs + 1):
            kind = (number, arguments.pause, arguments.top_k)
            if kind in {(row["run"], row["pause_s"], row["top_k"]) for row in rows}:
                continue
            rows += conversation(arguments, chat, lines[number], number, Path(folder))
            parts = [",\n".join("  " + json.dumps(row) for row in part) for part in (table(rows), rows)]
            text = f'{{"settings": {json.dumps(settings)},\n"turns": [\n{parts[0]}\n],\n"rows": [\n{parts[1]}\n]}}\n'
            path.write_text(text, "utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run")
    runs.add_argument("--model", default="smollm2")
    runs.add_argument("--data", type=Path, required=True)
    runs.add_argument("--runs", type=int, default=5)
    runs.add_argument("--pause", type=float, default=5.0)
    runs.add_argument("--turns", type=int, default=TURNS)
    runs.add_argument("--top-k", type=int, default=DOCUMENTS)
    runs.add_argument("--tokens", type=int, default=64)
    runs.add_argument("--threads", type=int, default=1)
    runs.add_argument("--output", type=Path, default=RESULTS / "chat_turns.json")
    runs.set_defaults(act=run)
    chosen = parser.parse_args()
    chosen.act(chosen)
