# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Requests to serve, the answers that a lone cache gives to them, and engines in small."""

import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import default_config
from hf_blend.prompt.pieces import Span, TextPrompt
from tests.conftest import random_ids as draw

NEW_TOKENS = 6
FAMILIES = {"llama": {}, "qwen3": {"head_dim": 16}, "mistral": {"sliding_window": None}}


@dataclass
class Ask:
    """One request; its chunks, of which the engine is told, may be missing from the store."""

    ids: list[int]
    chunks: list[list[int]] = field(default_factory=list)

    @property
    def prompt(self) -> TextPrompt:
        """With the chunks at their places, and what is before them as an entry."""
        words = [" ".join(map(str, ids)) for ids in (self.ids, *self.chunks)]
        starts = [words[0][: f" {words[0]} ".index(f" {chunk} ")].count(" ") for chunk in words[1:]]
        spans = map(Span.whole, starts, self.chunks)
        return TextPrompt(tuple(self.ids), tuple(sorted(spans)), min(starts, default=0))


class Workload:
    """Requests over a library of chunks: most share chunks, some bring new ones, some have none."""

    def __init__(self, seed: int = 0, chunks: int = 6) -> None:
        self.random = random.Random(seed)
        self.library = [draw(17 + 5 * number, 1000 * seed + number) for number in range(chunks)]
        self.prefixes = [[1, *draw(4, 7)], [1, *draw(11, 8)]]

    def ask(self, number: int) -> Ask:
        """A request of a kind drawn at random."""
        kind, question = self.random.random(), draw(self.random.randint(3, 14), 5000 + number)
        prefix = self.random.choice(self.prefixes)
        if kind < 0.15:
            return Ask([*prefix, *draw(self.random.randint(5, 60), 9000 + number), *question])
        picked = self.random.sample(self.library, self.random.randint(1, 3))
        if kind < 0.3:
            new = draw(19, 7000 + number)
            return Ask([*prefix, *picked[0], *new, *question], [picked[0], new])
        gap = draw(2, number) if kind < 0.6 else []
        return Ask([*prefix, *(token for chunk in picked for token in [*chunk, *gap]), *question])

    def asks(self, count: int) -> list[Ask]:
        """So many requests."""
        return [self.ask(number) for number in range(count)]


def generation(**settings: Any) -> GenerationConfig:
    """Greedy, a few tokens."""
    given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    return GenerationConfig(**{**given, **settings})


def batching(**settings: Any) -> ContinuousBatchingConfig:
    """Small pages, so that prompts have several."""
    return ContinuousBatchingConfig(**{"page_size": 16, "num_blocks": 96, "max_batch_tokens": 64, **settings})


def lone_answer(model: Any, store: ChunkStore, ids: Sequence[int], *, new: int = NEW_TOKENS, **settings: Any) -> list:
    """What a request gets that is alone with a cache of its own."""
    cache = BlendCache(model, store, default_config(is_blind=True), **settings)
    config = generation(max_new_tokens=new)
    output = model.generate(torch.tensor([ids]), past_key_values=cache, generation_config=config)
    return output[0, len(ids) :].tolist()


def collect(engine: Any, requests: Sequence[str], timeout_s: float = 60.0) -> dict[str, Any]:
    """The finished outputs of some requests."""
    found: dict[str, Any] = {}
    while len(found) < len(requests):
        output = engine.get_result(timeout=timeout_s)
        assert output is not None, f"{len(found)} of {len(requests)} came, the engine runs: {engine.is_running()}"
        if output.is_finished() and output.request_id in requests:
            found[output.request_id] = output
    return found


@pytest.fixture(autouse=True, scope="session")
def without_collection() -> Iterator[None]:
    """Let no engine and no server collect garbage when it begins or ends: half a second each among tests.

    What `few_objects` has frozen stays so.
    """
    from transformers.generation.continuous_batching import continuous_api

    from hf_blend.serving import run

    with pytest.MonkeyPatch.context() as patch:
        for module in (continuous_api, run):
            patch.setattr(module, "gc", SimpleNamespace(**dict.fromkeys(("collect", "freeze", "unfreeze"), lambda: 0)))
        yield


@pytest.fixture
def collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a server collect garbage and freeze what is left, as it does outside of tests."""
    monkeypatch.setattr("hf_blend.serving.run.gc", gc)
    yield
    gc.freeze()


class Bench:
    """What a test of the engine needs: requests, engines, and the answers of a lone cache."""

    FAMILIES, Ask = FAMILIES, Ask
    draw, generation, batching = staticmethod(draw), staticmethod(generation), staticmethod(batching)
    lone_answer, collect = staticmethod(lone_answer), staticmethod(collect)

    def __init__(self) -> None:
        self.workload = Workload()

    def engine(self, model: Any, store: ChunkStore, pages: dict[str, Any] | None = None, **settings: Any) -> Any:
        """An engine that is not started."""
        from hf_blend.serving.engine import BlendedBatching

        given = {"generation_config": generation(), "batching": batching(**(pages or {})), **settings}
        return BlendedBatching(model, store, **given)

    def answers(self, engine: Any, asks: Sequence[Ask], **settings: Any) -> list[list[int]]:
        """Have an engine answer requests; their answers, in their order."""
        return self.collected(engine, [engine.add_request(ask.prompt, **settings) for ask in asks])

    def answer(self, engine: Any, ids: Sequence[int], *given: Any, **settings: Any) -> Any:
        """Have an engine answer one request; its output, and what became of its prefill."""
        name = engine.add_request(ids, *given, **settings)
        return collect(engine, [name])[name].generated_tokens, engine.outcome(name)

    def collected(self, engine: Any, names: Sequence[str], timeout_s: float = 60.0) -> list[list[int]]:
        """The answers of requests, none of which failed, in their order."""
        found = collect(engine, names, timeout_s)
        assert not [output.error for output in found.values() if output.error]
        return [found[name].generated_tokens for name in names]

    def alone(self, model: Any, store: ChunkStore, asks: Sequence[Ask], **settings: Any) -> list[list[int]]:
        """What requests get that are each alone with a cache of their own."""
        return [lone_answer(model, store, ask.ids, **settings) for ask in asks]


@pytest.fixture
def bench() -> Bench:
    """Give `Bench`."""
    return Bench()


@pytest.fixture
def other() -> Iterator[ChunkStore]:
    """An empty store in memory, of the tenant b."""
    with ChunkStore.open("memory://", namespace="b") as opened:
        yield opened


@pytest.fixture
def guidance() -> None:
    """Skip what needs the library of JSON schemas where it is missing."""
    pytest.importorskip("llguidance", reason='JSON schemas need pip install "hf-blend[structured]"')
