# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The files of saved states are damaged: checkpoints of prompts, and sessions."""

from pathlib import Path
from typing import Any

import torch

from hf_blend.context.checkpoints import StateCheckpoints
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.context.session import load_session, save_session

from .damage import NODES, clear, damaged
from .fault import FaultClass, Verdict
from .oracle import is_equal, is_near, stock_kv
from .world import SECRET

SECRETS = (None, SECRET)
SPARSE_BYTES = 1 << 43  # what a file is cut to the length of; takes no room on the disk


class StateFiles(FaultClass):
    """Damages one file, asks, and puts the file back."""

    def setup(self) -> None:
        self._files: dict[bytes | None, list[tuple[Path, bytes]]] = {}
        for secret in SECRETS:
            folder = self.folder / ("plain" if secret is None else "signed")
            folder.mkdir()
            self.save(folder, secret)
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            self._files[secret] = [(path, path.read_bytes()) for path in paths]

    def save(self, folder: Path, secret: bytes | None) -> None:
        """Write the files."""
        raise NotImplementedError

    def ask(self, path: Path, secret: bytes | None) -> Verdict:
        """Use what was saved, whose file was damaged."""
        raise NotImplementedError

    def inject(self, count: int) -> None:
        for _ in range(count):
            secret = self.random.choice(SECRETS)
            place = self.random.randrange(len(self._files[secret]))
            (path, good), (_, other) = self._files[secret][place], self._files[secret][place - 1]
            kind = self._damage(path, good, other)
            self.outcome.paths["plain" if secret is None else "signed"] += 1
            self.judge(kind, lambda: self.ask(path, secret), may_refuse=True)  # noqa: B023
            for one, content in self._files[secret]:  # what continues a damaged prefix is removed with it
                clear(one)
                one.write_bytes(content)

    def _damage(self, path: Path, good: bytes, other: bytes) -> str:
        drawn = self.random.random()
        if drawn < 0.06:
            kind = self.random.choice(("gone", "directory", "link to nothing", "link to itself", "fifo"))
            clear(path)
            NODES[kind](path, path)
            return kind
        if drawn < 0.12:
            with open(path, "r+b") as file:
                file.truncate(self.random.choice((len(good) + 1, 1 << 36, SPARSE_BYTES)))
            return "sparse"
        kind, bad = damaged(self.random, good, other)
        path.write_bytes(bad)
        return kind


class Checkpoints(StateFiles):
    """A prompt is resumed from its longest prefix whose files are whole."""

    share = 0.01
    ends = (16, 32, 48)

    def save(self, folder: Path, secret: bytes | None) -> None:
        saved = StateCheckpoints(self.world.model, folder, secret=secret)
        self._ids = torch.tensor([[*self.world.chunks[4], 7]])
        saved.prefill(self._ids[:, :-1], ends=self.ends)
        truth = stock_kv(self.world.model, (), self._ids[0, : self.ends[-1]].tolist()).layers
        self._expected = self._states(saved.resume(self._ids))
        assert all(is_near(*pair) for pair in zip(self._expected, sum(truth, ()), strict=True))

    def ask(self, path: Path, secret: bytes | None) -> Verdict:
        got = self._states(StateCheckpoints(self.world.model, folder_of(path), secret=secret).resume(self._ids))
        held = got[0].shape[1] if got else 0
        if held not in (0, *self.ends):
            return Verdict.WRONG
        same = all(is_equal(one, other[:, :held]) for one, other in zip(got, self._expected, strict=False))
        return Verdict.WRONG if not same else Verdict.RIGHT if held == self.ends[-1] else Verdict.MISS

    @staticmethod
    def _states(cache: Any) -> list[torch.Tensor]:
        """K and V of each layer, `[kv_heads, tokens, head_dim]`."""
        if not cache.get_seq_length():
            return []
        return [part[0].clone() for layer in cache.layers for part in (layer.keys, layer.values)]


class Sessions(StateFiles):
    """A session is loaded whole, or refused while the cache stays as it was."""

    share = 0.01
    forms = (None, 8)

    def save(self, folder: Path, secret: bytes | None) -> None:
        self._caches = {bits: SequenceCache(self.world.model, kv_bits=bits) for bits in self.forms}
        self._before = {bits: cache.state() for bits, cache in self._caches.items()}
        self._saved: dict[str, dict[str, torch.Tensor]] = {}
        for bits in self.forms:
            cache = SequenceCache(self.world.model, kv_bits=bits)
            with torch.no_grad():
                self.world.model(torch.tensor([self.world.chunks[2]]), past_key_values=cache)
            save_session(cache, folder / f"{bits}.session", secret=secret)
            self._saved[f"{bits}.session"] = cache.state()

    def ask(self, path: Path, secret: bytes | None) -> Verdict:
        bits = next(bits for bits in self.forms if path.name == f"{bits}.session")
        cache, is_loaded = self._caches[bits], False
        try:
            load_session(cache, path, secret=secret)
            is_loaded = True
        finally:
            expected = self._saved[path.name] if is_loaded else self._before[bits]
            is_right = _are_equal(cache.state(), expected)
            if is_loaded:
                self._caches[bits] = SequenceCache(self.world.model, kv_bits=bits)
            if not is_right:
                return Verdict.WRONG  # noqa: B012 (what is wrong is more than what was refused)
        return Verdict.RIGHT


def folder_of(path: Path) -> Path:
    """The folder of checkpoints that holds a file."""
    return next(one.parent for one in path.parents if one.name == "states")


def _are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(is_equal(one[name], other[name]) for name in one)
