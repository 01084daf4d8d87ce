# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""In a store with a placement the file of a chunk is damaged in its tier, or beside a whole one in the other tier."""

from pathlib import Path

from hf_blend.store import ChunkKV, ChunkStore

from .damage import NODES, clear, damaged
from .fault import FaultClass, Verdict
from .world import drawn_chunk

CHUNKS = 6


class Placed(FaultClass):
    """Each chunk is in one of two tiers; a process that was killed may have left it in both."""

    share = 0.01

    def setup(self) -> None:
        """Write every chunk once, to know its name and its bytes."""
        self._roots = [self.folder / "near", self.folder / "far"]
        self._chunks = [drawn_chunk(number) for number in range(CHUNKS)]
        self._good: list[tuple[Path, bytes]] = []
        self._stores = {placement: self._opened(placement) for placement in ("disk", "remote")}
        for chunk in self._chunks:
            self._stores["disk"].put(chunk)
            self._stores["disk"].flush()
            (path,) = (self._roots[0] / "objects").rglob("*.safetensors")
            self._good.append((path.relative_to(self._roots[0]), path.read_bytes()))
            clear(path)

    def close(self) -> None:
        """Close the stores."""
        for store in self._stores.values():
            store.close()

    def inject(self, count: int) -> None:
        """Damage, ask, and look what stays."""
        for _ in range(count):
            number, placement = self.random.randrange(CHUNKS), self.random.choice(list(self._stores))
            here = self.random.randrange(2)
            is_twice = self.random.random() < 0.5
            (name, good), (_, other) = self._good[number], self._good[number - 1]
            kind = self._damage(self._roots[here] / name, good, other)
            if is_twice:
                self._write(self._roots[1 - here] / name, good)
            self.outcome.paths["beside a whole one" if is_twice else "alone"] += 1
            self.outcome.paths[f"placement {placement}"] += 1
            chunk = self._chunks[number]
            self.judge(kind, lambda: self._asked(placement, chunk, is_twice))  # noqa: B023
            self._stores[placement].flush()
            for root in self._roots:
                clear(root / name)

    def _asked(self, placement: str, chunk: ChunkKV, is_twice: bool) -> Verdict:
        """What is whole in one tier is found: at once, or by the next process, which knows of no slow tier."""
        verdict = self.expect(self._stores[placement], chunk)
        if verdict is Verdict.MISS and is_twice:
            with self._opened(placement) as fresh:
                got = self.find(fresh, chunk)
            return verdict if got is Verdict.RIGHT else got
        return verdict

    def _damage(self, path: Path, good: bytes, other: bytes) -> str:
        """Put something else in the place of a file, and say what."""
        path.parent.mkdir(parents=True, exist_ok=True)
        clear(path)
        if self.random.random() < 0.1:
            kind = self.random.choice(("gone", "directory", "link to nothing", "link to itself"))
            NODES[kind](path, path)
            return kind
        kind, bad = damaged(self.random, good, other)
        path.write_bytes(bad)
        return kind

    def _opened(self, placement: str) -> ChunkStore:
        near, far = self._roots
        given = {"memory_bytes": 0, "durability": "none", "remote_queue_bytes": 0}
        return ChunkStore.open(near, remote=f"file://{far}", placement=placement, **given)

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        clear(path)
        path.write_bytes(content)
