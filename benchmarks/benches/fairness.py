# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""First tokens of one tenant, alone and while another sends the worst that it may.

python benchmarks/bench.py fairness > benchmarks/results/fairness.json

A server of its own process, with two tenants, on 127.0.0.1. One asks about documents that are stored, reads the
answer, pauses for some seconds of the server, and asks again. Blocks of these requests take turns: alone, beside one
stream of the other tenant, and beside the worst that it may send: long prompts, new documents of nearly the model's
full length, prompts of many new documents, streams that are abandoned, streams that are read slowly, hostile schemas,
eight answers with all log probabilities, and prompts so long that they are refused. Two clocks: seconds that pass, as
a client sees it, and the CPU time of the server's process, all that it did until the first token, for this tenant or
for others, on whichever core. Without a pause a tenant asks for more than its share, and has to wait for that of the
other.
"""

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from .serve import _interval, _percentile

KEYS = {"worst": "0123456789-worst", "other": "0123456789-other"}
WORDS = "harbour clock ferry master slate bees garden pilot crane lamp rope tide anchor winter letter keeper".split()


@dataclass(frozen=True)
class FairnessPlan:
    """What is measured."""

    model: str = "smollm2"
    blocks: int = 6
    requests: int = 10
    attackers: int = 8
    library: int = 12
    documents: int = 4
    words: int = 60
    long_words: int = 1200
    longest_words: int = 7500
    body_words: int = 200_000
    pause_s: float = 1.0
    cache_tokens: int = 32768
    seed: int = 0


def measure_fairness(plan: FairnessPlan, progress: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Measure first tokens alone and beside the worst of another tenant, in turn."""
    say = progress or (lambda text: None)
    kinds = {"alone": (), "beside a stream": ("slow",), "attacked": tuple(KINDS)}
    rows: dict[str, list[list[dict[str, float]]]] = {name: [] for name in kinds}
    sent: Counter[str] = Counter()
    words = ["--model", plan.model, "--cache-tokens", str(plan.cache_tokens)]
    with server(words, [{"name": name, "api_key": key} for name, key in KEYS.items()]) as (url, process):
        for number in range(-2 * plan.library, 0):  # documents are stored, and what is made once is made
            _first_token(plan, url, process, number)
        for block in range(plan.blocks):
            for name, found in rows.items():
                say(f"block {block}: {name}")
                with _attack(plan, url, sent, kinds[name]):
                    number = (len(rows) * block + list(rows).index(name)) * plan.requests
                    found.append([_first_token(plan, url, process, number + one) for one in range(plan.requests)])
                say(str([round(one["cpu_s"], 2) for one in found[-1]]))
    table = []
    for name, blocks in rows.items():
        row: dict[str, Any] = {"run": name, "n": sum(map(len, blocks))}
        row["answered"] = int(sum(one["answered"] for block in blocks for one in block))
        for clock in ("cpu_s", "wall_s"):
            times = [[one[clock]] for block in blocks for one in block]
            row |= {f"{clock}_p{share}": _interval(times, lambda drawn, share=share: _percentile(drawn, share))
                    for share in (50, 95)}  # fmt: skip
        table.append(row)
    ratios = {clock: {name: _ratio(rows, name, clock) for name in ("beside a stream", "attacked")}
              for clock in ("cpu_s", "wall_s")}  # fmt: skip
    return {"plan": asdict(plan), "rows": table, "p95_ratios": ratios, "sent": dict(sent), "first_tokens": rows}


def _ratio(rows: dict[str, list[list[dict[str, float]]]], name: str, clock: str) -> list[float]:
    """The p95 of an arm over that of the one alone, with the interval of blocks that are drawn again in pairs."""
    pairs = [[pair] for pair in zip(rows["alone"], rows[name], strict=True)]

    def figure(drawn: Sequence[Any]) -> float:
        alone, other = ([one[clock] for block in side for one in block] for side in zip(*drawn, strict=True))
        return _percentile(other, 95) / _percentile(alone, 95)

    return _interval(pairs, figure)


@contextmanager
def server(words: list[str], tenants: list[dict[str, Any]]) -> Iterator[tuple[str, psutil.Process]]:
    """A server of its own process, with a store of its own: its URL, and the process."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "tenants.json"
        rows.write_text(json.dumps({"tenants": tenants}))
        words = ["--tenants", str(rows), "--store", str(Path(folder) / "store"), "--port", "0", "--json", *words]
        command = [sys.executable, "-P", "-m", "hf_blend", "serve", "--no-access-log", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                said = ""
                while "}" not in said:
                    line = process.stdout.readline()  # type: ignore[union-attr]
                    if not line:
                        raise RuntimeError(f"the server ended: {said}")
                    said += line
                yield json.loads(said)["url"], psutil.Process(process.pid)
            finally:
                process.terminate()


def _first_token(plan: FairnessPlan, url: str, process: psutil.Process, number: int) -> dict[str, float]:
    """Ask about stored documents; seconds to the first token, by the server's CPU and on the wall."""
    draw = random.Random(f"{plan.seed} {number}")
    picked = draw.sample(range(plan.library), plan.documents)
    documents = [text(f"{plan.seed} document {one}", plan.words) for one in picked]
    asked = {**_asked(f"What of the {draw.choice(WORDS)} {number}?", 2), "stream": True, "documents": documents}
    cpu, wall = _cpu(process), time.perf_counter()
    is_answered = False
    with suppress(OSError), _open(url, "other", asked) as response:
        line = response.readline()
        while line and (b'"content": "' not in line or b'"content": ""' in line):
            line = response.readline()
        is_answered = b'"content": "' in line
        found = {"cpu_s": _cpu(process) - cpu, "wall_s": time.perf_counter() - wall, "answered": 1.0}
        response.read()
    if not is_answered:  # it waited so long at least
        found = {"cpu_s": _cpu(process) - cpu, "wall_s": time.perf_counter() - wall, "answered": 0.0}
    pause, cpu, wall = plan.pause_s * draw.uniform(0.5, 1.5), _cpu(process), time.perf_counter()
    while _cpu(process) < cpu + pause and time.perf_counter() < wall + 3 * pause:
        time.sleep(0.01)
    return found


@contextmanager
def _attack(plan: FairnessPlan, url: str, sent: Counter[str], kinds: tuple[str, ...]) -> Iterator[None]:
    """Threads that send requests of these kinds in turn, until the block ends and each has its answer."""
    is_over = threading.Event()

    def send(first: int) -> None:
        for number in range(first, 1 << 30):
            if is_over.is_set():
                return
            kind = kinds[number % len(kinds)]
            asked = KINDS[kind](plan, f"{plan.seed} {first} {number}")
            with suppress(OSError, ValueError):  # refused, cut: what became of these is not the question
                sent[kind] += 1
                _read(kind, _open(url, "worst", asked), is_over)

    count = min(len(kinds), plan.attackers)
    threads = [threading.Thread(target=send, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    if threads:
        time.sleep(5)
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _read(kind: str, response: Any, is_over: threading.Event) -> None:
    with response:
        if kind == "abandoned":
            response.readline()
        elif kind == "slow":
            while response.read(16) and not is_over.wait(0.2):
                pass
        else:
            response.read()


def _open(url: str, tenant: str, asked: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEYS[tenant]}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(asked).encode(), headers)
    return urllib.request.urlopen(request, timeout=600)


def _asked(text: str, new_tokens: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": new_tokens, "ignore_eos": True}


def text(seed: str, words: int) -> str:
    """Draw a text of so many words."""
    return " ".join(random.Random(seed).choices(WORDS, k=words)).capitalize() + ".\n"


def _schema(plan: FairnessPlan, seed: str) -> dict[str, Any]:
    names = [f"{word}{number}" for number in range(40) for word in WORDS]
    one = {"type": "object", "properties": {name: {"enum": names[:20]} for name in names[:60]}, "required": names[:60]}
    schema = {"type": "array", "minItems": 50, "items": {"anyOf": [one, {"type": "string", "minLength": 1000}]}}
    form = {"type": "json_schema", "json_schema": {"name": "worst", "schema": schema}}
    return {**_asked(text(seed, 20), 64), "response_format": form, "ignore_eos": False}


KINDS: dict[str, Callable[[FairnessPlan, str], dict[str, Any]]] = {
    "long": lambda plan, seed: _asked(text(seed, plan.long_words), 1),
    "chunks": lambda plan, seed: {
        **_asked(seed, 4),
        "documents": [text(f"{seed} {one}", 20) for one in range(plan.long_words // 20)],
    },
    "longest": lambda plan, seed: {**_asked(seed, 1), "documents": [text(seed, plan.longest_words)]},
    "abandoned": lambda plan, seed: {**_asked(text(seed, 100), 200), "stream": True},
    "slow": lambda plan, seed: {**_asked(text(seed, 20), 200), "stream": True},
    "schema": _schema,
    "refused": lambda plan, seed: _asked(text(seed, plan.body_words), 1),
    "answers": lambda plan, seed: {**_asked(text(seed, 50), 64), "n": 8, "logprobs": True, "top_logprobs": 20},
}


def _cpu(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)
