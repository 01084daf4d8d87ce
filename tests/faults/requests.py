# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entries in blocks are damaged, and whole requests run while entries are damaged or reading them fails."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hf_blend import BlendCache, plugins
from hf_blend.sparse.partial.reader import keep_in_blocks
from hf_blend.store import ChunkStore

from .damage import NODES, clear, damaged
from .fault import FaultClass, Verdict
from .faulty_tier import FaultyTier
from .oracle import is_equal, is_near, stock_logits

PREFIX = [1, 17, 23, 5]
QUESTION = [90, 14, 33, 71, 8]
NEW_TOKENS = 2
STORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"codec": "int8"},
    "blocks": {},
}
REQUESTS = (
    (1.0, "query-attention"),
    (0.0, "none"),
    (0.15, "query-attention"),
    (0.3, "kv-deviation"),
    (0.2, "boundary"),
)
NEAR = 2e-4  # of logits, whose noise is that of all layers
READING = {"read.flip": 0.05, "read.io": 0.05, "read.zero": 0.05, "read.truncate": 0.05, "open.io": 0.05}


class Prefills(FaultClass):
    """Three chunks and a prefix, generated from."""

    share = 0.02

    def setup(self) -> None:
        self._chunks = [list(self.world.chunks[place]) for place in (0, 2, 4)]
        self._truth: torch.Tensor | None = None
        self._clean: dict[tuple[str, tuple[float, str]], torch.Tensor] = {}
        self._files: dict[str, dict[Path, bytes]] = {}

    def _prepare(self, name: str, request: tuple[float, str]) -> None:
        """Have the chunks of a store computed, and answer a request on it while it is whole."""
        if name not in self._files:
            with self._opened(name) as store:
                self._answer(store, REQUESTS[0])
            files = list((self.folder / name / "objects").rglob("*.safetensors"))
            self._files[name] = {path: path.read_bytes() for path in sorted(files)}
            assert len(self._files[name]) == 1 + len(self._chunks), "an entry for the prefix and one for each chunk"
        if (name, request) not in self._clean:
            with self._opened(name) as store:
                self._clean[name, request] = self._answer(store, request)

    def inject(self, count: int) -> None:
        for _ in range(count):
            name = self.random.choice(list(STORES))
            request = self.random.choice(REQUESTS)
            self.outcome.paths[name] += 1
            self.outcome.paths[f"{request[1]} at {request[0]}"] += 1
            self._prepare(name, request)
            reading = READING if self.random.random() < 0.2 else {}
            kind = "reading fails" if reading else self._damage(name)
            self.judge(kind, lambda: self._generate(name, request, reading))  # noqa: B023
            for path, content in self._files[name].items():
                clear(path)
                path.write_bytes(content)

    def _damage(self, name: str) -> str:
        files = self._files[name]
        kind = ""
        for path in self.random.sample(list(files), self.random.randint(1, len(files))):
            other = self.random.choice([one for one in files if one != path])
            if self.random.random() < 0.1:
                kind = self.random.choice(list(NODES))
                clear(path)
                NODES[kind](path, other)
                continue
            kind, bad = damaged(self.random, files[path], files[other])
            clear(path)
            path.write_bytes(bad)
        return kind

    def _generate(self, name: str, request: tuple[float, str], reading: dict[str, float]) -> Verdict:
        with self._opened(name, reading) as store:
            got = self._answer(store, request)
        gc.collect()
        same = is_equal(got, self._clean[name, request])
        if request[0] == 1.0 and name != "int8":  # its exact prefix is rounded
            same = is_near(got, self._true_logits(got), NEAR)
        return Verdict.MISS if same else Verdict.WRONG

    def _answer(self, store: Any, request: tuple[float, str]) -> torch.Tensor:
        """Logits of all new tokens, `[tokens, vocabulary]`; the new tokens are remembered with them."""
        model = self.world.model
        cache = BlendCache(model, store, recompute_ratio=request[0], selector=request[1])
        inputs = cache.inputs(None, prefix=PREFIX, chunks=self._chunks, question=QUESTION)
        settings = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False, "output_logits": True}
        output = model.generate(**inputs, past_key_values=cache, **settings, return_dict_in_generate=True)
        self._inputs = inputs["input_ids"]
        return torch.cat(output.logits)

    def _true_logits(self, got: torch.Tensor) -> torch.Tensor:
        if self._truth is None:
            ids = self._inputs
            rows = []
            for _ in range(len(got)):
                rows.append(stock_logits(self.world.model, ids))
                ids = torch.cat([ids, rows[-1].argmax()[None, None]], 1)
            self._truth = torch.stack(rows)
        return self._truth

    @contextmanager
    def _opened(self, name: str, reading: dict[str, float] | None = None) -> Iterator[Any]:
        """A store over the files, as a new process has it; one whose reads fail, where that is asked for."""
        tier = plugins.load("store.tiers", "disk")(self.folder / name, durable=False)
        faulty = FaultyTier(tier, self.random.randrange(1 << 30), reading) if reading else tier
        if name == "blocks":
            store = ChunkStore(None, [faulty])
            keep_in_blocks(store, 8)
            yield store
        else:
            with ChunkStore(None, [faulty], **STORES[name]) as store:
                yield store
