# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A server under mixed load for a long time: its memory, what it leaves behind, and what became of the requests.

python benchmarks/bench.py soak --data FILE.jsonl > benchmarks/results/soak.json

A server of its own process on 127.0.0.1, and clients that ask as long as it has used less than its share of a core:
passages that come back by Zipf's law, new ones, streams, streams that are abandoned, schemas, several answers, and
bodies that are refused. Memory and disk hold less than the passages, so chunks are evicted and come again. Then the
same with a Redis behind the store, which is killed and started again some times.
"""

import http.client
import json
import random
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hf_blend.errors import ConfigError
from hf_blend.evaluation.rows import CHUNKS, QUESTION, read_rows

from .fairness import server, text

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "year": {"type": "integer", "maximum": 2030}},
    "required": ["name", "year"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class SoakPlan:
    """What is run."""

    model: str = "smollm2"
    data: str | None = None
    warm_s: float = 480.0
    seconds: float = 1800.0
    redis_s: float = 1800.0
    outages: int = 3
    redis: str = "redis-server"
    core_share: float = 0.5
    clients: int = 4
    library: int = 80
    zipf: float = 1.0
    documents: int = 4
    tenants: int = 16  # of whom two ask: the memory for chunks is shared by all
    quota_bytes: int = 400_000_000
    cache_tokens: int = 8192
    sample_s: float = 5.0
    windows: int = 6
    seed: int = 0


def measure_soak(plan: SoakPlan, progress: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Run both parts."""
    say = progress or (lambda text: None)
    found = {"plan": asdict(plan), "parts": list[dict[str, Any]]()}
    if plan.seconds:
        found["parts"].append(_run(plan, say, None))
    if plan.redis_s:
        with tempfile.TemporaryDirectory() as folder:
            redis = RedisServer(plan.redis, folder)
            try:
                found["parts"].append(_run(plan, say, redis))
            finally:
                redis.stop()
    return found


def _run(plan: SoakPlan, say: Callable[[str], Any], redis: "RedisServer | None") -> dict[str, Any]:
    tenants = [
        {"name": f"tenant{number}", "api_key": _key(number), "quota_bytes": plan.quota_bytes}
        for number in range(plan.tenants)
    ]
    words = ["--model", plan.model, "--cache-tokens", str(plan.cache_tokens)]
    words += ["--remote", f"redis://127.0.0.1:{redis.port}/0"] if redis else []
    with server(words, tenants) as (url, process):
        load = _Load(plan, url, process)
        with load.running():
            load.sample(plan.warm_s, say)
            warm = len(load.samples)
            if redis is None:
                load.sample(plan.seconds, say)
            else:
                for _ in range(plan.outages):
                    for is_up in (True, False):
                        redis.start() if is_up else redis.stop()
                        load.sample(plan.redis_s / (2 * plan.outages + 1), say)
                redis.start()
                load.sample(plan.redis_s / (2 * plan.outages + 1), say)
        return {"run": "alone" if redis is None else "with Redis", **load.found(warm)}


class _Load:
    """Threads that ask, and what came of it."""

    def __init__(self, plan: SoakPlan, url: str, process: psutil.Process) -> None:
        self.plan, self.url, self.process = plan, url, process
        self.samples, self.errors = list[dict[str, float]](), list[str]()
        self.sent, self.how = Counter[str](), Counter[str]()
        self.library, self.questions = _passages(plan)
        self._weights = [1 / (rank + 1) ** plan.zipf for rank in range(len(self.library))]
        self._started, self._cpu, self._is_over = time.monotonic(), _cpu(process), threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask until the block ends, and then until all is answered."""
        threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(self.plan.clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def sample(self, seconds: float, say: Callable[[str], Any]) -> None:
        """Look at the process for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(self.plan.sample_s, max(0.0, until - time.monotonic())))
            known = self.process.memory_info()
            self.samples.append(
                {"s": round(time.monotonic() - self._started, 1), "rss": known.rss,
                 "threads": self.process.num_threads(), "files": self.process.num_fds()}
            )  # fmt: skip
        say(f"{self.samples[-1]} {dict(self.sent)}, {len(self.errors)} errors {self.errors[-1:]}")

    def found(self, warm: int) -> dict[str, Any]:
        """All that was seen; memory by windows behind the warm-up."""
        rows = self.samples[warm:]
        size = max(1, len(rows) // self.plan.windows)
        levels = [statistics.median(row["rss"] for row in rows[at : at + size]) for at in range(0, len(rows), size)]
        levels = levels[: self.plan.windows]
        _wait(lambda: not _metrics(self.url)["hf_blend_requests_running"], "the end of all requests")
        _wait(lambda: not _metrics(self.url)["hf_blend_blocks_used"], "the return of all blocks")
        return {
            "seconds": self.samples[-1]["s"], "cpu_s": _cpu(self.process) - self._cpu,
            "sent": dict(self.sent), "prefills": dict(self.how), "errors": self.errors,
            "rss_levels": levels, "rss_change": max(levels) / min(levels) - 1,
            "rss_trend": levels[-1] / levels[0] - 1,
            "threads": [rows[0]["threads"], rows[-1]["threads"]], "files": [rows[0]["files"], rows[-1]["files"]],
            "counters": {
                name: one for name, one in sorted(_metrics(self.url).items())
                if "_bucket" not in name and "_created" not in name
            },
            "samples": [[row["s"], int(row["rss"]) >> 20] for row in self.samples[::6]],  # MiB
        }  # fmt: skip

    def _ask(self, first: int) -> None:
        for number in range(first, 1 << 30, self.plan.clients):
            while _cpu(self.process) - self._cpu > self.plan.core_share * (time.monotonic() - self._started):
                if self._is_over.wait(0.1):
                    break
            if self._is_over.is_set():
                return
            kind = random.Random(f"{self.plan.seed} kind {number}").choice(list(KINDS))
            try:
                self._answered(kind, number)
            except Exception as error:  # each is an error of the run
                self.errors.append(f"{kind} {number}: {type(error).__name__}: {error}"[:300])
            self.sent[kind] += 1

    def _answered(self, kind: str, number: int) -> None:
        """Send a request of a kind, and look at its answer."""
        draw = random.Random(f"{self.plan.seed} {number}")
        picked = list(dict.fromkeys(draw.choices(self.library, self._weights, k=self.plan.documents)))
        asked = {
            "messages": [{"role": "user", "content": draw.choice(self.questions)}], "documents": picked,
            "max_tokens": draw.randint(4, 24), "temperature": 0, "stream": kind in ("stream", "abandoned"),
            **KINDS[kind](f"{self.plan.seed} {number}", picked),
        }  # fmt: skip
        host = self.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=600)
        headers = {"content-type": "application/json", "authorization": f"Bearer {_key(number % 2)}"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(asked).encode(), headers)
            response = connection.getresponse()
            expected = 400 if kind == "refused" else 200
            if response.status != expected:
                raise ValueError(f"{response.status}, expected {expected}: {response.read()[:300]!r}")
            if kind == "abandoned":
                for _ in range(draw.randint(0, 6)):
                    response.readline()
            elif kind == "stream":
                lines = [line for line in response.read().split(b"\n\n") if line]
                if lines[-1] != b"data: [DONE]" or any(b'"error"' in line for line in lines):
                    raise ValueError(f"the stream ends with {lines[-2:]}")
            elif kind != "refused":
                self._check(kind, json.load(response))
        finally:
            connection.close()

    def _check(self, kind: str, answer: dict[str, Any]) -> None:
        for choice in answer["choices"]:
            written, reason = choice["message"]["content"], choice["finish_reason"]
            if reason not in ("stop", "length") or (reason == "length" and not written):
                raise ValueError(f"{reason} after {written!r}")
            if kind == "schema" and reason == "stop":
                json.loads(written)
        self.how[answer["usage"]["hf_blend"]["prefill"]] += 1


KINDS: dict[str, Callable[[str, list[str]], dict[str, Any]]] = {
    "passages": lambda seed, picked: {},
    "again": lambda seed, picked: {"documents": sorted(picked)[:2]},
    "new": lambda seed, picked: {"documents": [text(seed, 80), *picked[:2]]},
    "stream": lambda seed, picked: {},
    "abandoned": lambda seed, picked: {"max_tokens": 100},
    "schema": lambda seed, picked: {
        "max_tokens": 60, "documents": picked[:1],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    },
    "answers": lambda seed, picked: {"n": 2, "logprobs": True, "top_logprobs": 3, "temperature": 1},
    "plain": lambda seed, picked: {"documents": [], "top_p": 0.9, "temperature": 0.7, "presence_penalty": 0.5},
    "refused": lambda seed, picked: {"echo": True},
}  # fmt: skip


class RedisServer:
    """A server of Redis on a port that it keeps; what it holds is lost when it is killed."""

    def __init__(self, command: str, folder: str) -> None:
        found = shutil.which(command)
        if found is None:
            raise ConfigError(f"there is no {command!r}, expected a server of Redis. Install one, or give --redis.")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory", "512mb"]
        self._command = [found, "--port", str(self.port), *words, "--maxmemory-policy", "allkeys-lru"]
        self._folder, self._process = folder, None  # type: str, subprocess.Popen[bytes] | None
        self.start()

    def start(self) -> None:
        """Start it, if it does not run."""
        if self._process is None:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=subprocess.DEVNULL)
            _wait(self._answers, "the start of Redis")

    def stop(self) -> None:
        """Kill it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", self.port)) == 0


def _passages(plan: SoakPlan) -> tuple[list[str], list[str]]:
    if plan.data is None:
        return [text(f"{plan.seed} {one}", 60) for one in range(plan.library)], ["What of the lamp?"]
    rows = read_rows(Path(plan.data), (CHUNKS, QUESTION))
    chunks = list(dict.fromkeys(chunk for row in rows for chunk in row[CHUNKS]))
    random.Random(plan.seed).shuffle(chunks)
    return chunks[: plan.library], [row[QUESTION] for row in rows]


def _key(number: int) -> str:
    return f"0123456789abcdef-{number}"


def _metrics(url: str) -> dict[str, float]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def _wait(happened: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come within {seconds:g} s")
        time.sleep(0.1)


def _cpu(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)
