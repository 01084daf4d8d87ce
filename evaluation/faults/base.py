# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a class of faults is given, and what it counts.

Promises of a store, whatever is injected: no wrong KV is ever handed out; nothing torn is visible; what was
acknowledged and not damaged since is there; every call comes back.
"""

import contextlib
import random
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from hf_blend.errors import ConfigError
from hf_blend.store import ChunkKey, ChunkKV, ChunkStore
from hf_blend.store.entry import encode_entry
from hf_blend.store.header import hash_namespace
from hf_blend.store.seal import keyed

__all__ = ["FaultClass", "Outcome", "content_of", "is_same", "name_of", "tiny_chunk"]

HANG_S = 60  # of one batch, or of one kill and the look after it
BATCH = 200
FINGERPRINT = "ab" * 32


@dataclass
class Outcome:
    """Counts of one class.

    Attributes:
        faults: injected, kills included.
        kills: processes that were killed.
        wrong_kv: chunks handed out that were not bit for bit what was stored.
        torn: entries that were visible and not whole.
        lost: acknowledged entries that were gone, though nothing was done to them.
        hangs: calls that did not come back.
        regions: how often which part was hit, where that is known.
    """

    faults: int = 0
    kills: int = 0
    wrong_kv: int = 0
    torn: int = 0
    lost: int = 0
    hangs: int = 0
    regions: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


class FaultClass(ABC):
    """One kind of damage, done many times.

    Args:
        folder: an empty one.
        seed: of all that is drawn.

    Attributes:
        share: of the faults that are asked for; 0 for a class that kills.
        kill_share: of the kills that are asked for.
    """

    share: ClassVar[float] = 0.0
    kill_share: ClassVar[float] = 0.0

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.outcome = Outcome()

    @abstractmethod
    def inject(self, count: int) -> None:
        """Inject at least so many faults, or kills, and count them in `outcome`."""

    def run(self, count: int) -> Outcome:
        """Inject, with an alarm for whatever hangs.

        Args:
            count: of faults, or of kills.

        Returns:
            What happened.
        """
        while self.done < count:
            before = self.done
            with self._alarm():
                self.inject(min(count - before, BATCH))
            if self.done == before and not self.outcome.hangs:
                raise ConfigError(
                    f"{type(self).__name__} injected nothing of {count - before} more that are wanted. Mend it."
                )
            if self.outcome.hangs:
                break
        return self.outcome

    @property
    def done(self) -> int:
        """How many of what is asked for were injected."""
        return self.outcome.kills if self.kill_share else self.outcome.faults

    def expect(self, store: ChunkStore, chunk: ChunkKV) -> bool:
        """Ask for a chunk; whatever comes must be exactly it.

        Args:
            store: to be asked.
            chunk: as it was stored.

        Returns:
            Whether it came.
        """
        got = store.get(chunk.key)
        if got is not None and not is_same(got, chunk):
            self.outcome.wrong_kv += 1
        return got is not None

    def hit(self, region: str) -> None:
        """Count one fault."""
        self.outcome.faults += 1
        self.outcome.regions[region] = self.outcome.regions.get(region, 0) + 1

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        def ring(*_: object) -> None:
            raise TimeoutError(f"an operation of the store did not come back within {HANG_S} s")

        before = signal.signal(signal.SIGALRM, ring)
        signal.alarm(HANG_S)
        try:
            yield
        except TimeoutError:
            sys.stderr.write(traceback.format_exc())
            self.outcome.hangs += 1
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


def tiny_chunk(number: int, fingerprint: str = FINGERPRINT, namespace: str = "") -> ChunkKV:
    """Make a chunk of two tokens, one layer and one rotary table; the same bits for the same arguments."""
    random_bits = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random_bits)

    key = ChunkKey(fingerprint, (1,), (5, number), namespace)
    return ChunkKV(key, ((normal(1, 2, 4), normal(1, 2, 4)),), ((normal(2, 4), normal(2, 4)),), (0,))


def is_same(got: ChunkKV, wanted: ChunkKV) -> bool:
    """Compare bit for bit."""
    if got.key != wanted.key or got.layer_table != wanted.layer_table:
        return False
    pairs = zip(got.named_tensors(), wanted.named_tensors(), strict=True)
    return all(a == b and one.dtype == two.dtype and one.equal(two) for (a, one), (b, two) in pairs)


def content_of(chunk: ChunkKV, secret: bytes | None = None) -> bytes:
    """The bytes of an entry."""
    return b"".join(encode_entry(chunk, secret))


def name_of(key: ChunkKey, secret: bytes | None = None) -> str:
    """What an entry is called in every tier of a store with this secret."""
    space, called = keyed(secret, "space", hash_namespace(key.namespace)), keyed(secret, "name", key.digest)
    return f"{space[:2]}/{called[:2]}/{called}"
