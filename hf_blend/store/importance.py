# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much attention stored tokens get, over requests, evictions and restarts.

Requests report what their questions look at; moving averages of it decide which tokens share blocks (`sparse.partial`)
and which chunks stay in a full tier (`store.eviction.importance`). The file may be lost, stale or damaged at no harm:
it decides about time, never about KV.
"""

import contextlib
import logging
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .locks import new_lock
from .seal import check_seal, seal, seal_size
from .tiers.base import EntryFault, as_fault
from .tiers.files import open_regular, write_atomically

__all__ = ["TokenImportance"]

logger = logging.getLogger(__name__)

NEW_SHARE = 0.2  # of the newest request in the moving averages
CAP_TOKENS = 1 << 24  # whose averages are known, 32 MiB; chunks that were not reported for longest leave first
SAVE_EVERY = 1024  # reports
_FORMAT = b"hf_blend.attn/1\0"
_HEAD = struct.Struct("<16sQ")
_ROW = struct.Struct("<32sIff")  # digest, tokens, requests so far, share of important tokens
_MAX = float(np.finfo(np.float16).max)


@dataclass
class _Known:
    scores: np.ndarray  # float16, one for each token
    requests: int
    share: float


class TokenImportance:
    """Moving averages of the attention that the tokens of chunks get. Threads may share it."""

    def __init__(self, path: Path | None = None, secret: bytes | None = None, cap_tokens: int = CAP_TOKENS) -> None:
        self._path, self._secret, self._cap_tokens = path, secret, cap_tokens
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._tokens = self._unsaved = 0
        self._is_loaded = path is None
        self._lock = new_lock()

    def note(self, digest: str, scores: Tensor, share: float) -> int:
        """Take in what one request found.

        Shapes: scores `[tokens]`.
        """
        new = np.nan_to_num(scores.detach().float().cpu().numpy(), nan=0.0).clip(0.0, _MAX)
        with self._lock:
            self._load()
            old = self._known.pop(digest, None)
            if old is None or len(old.scores) != len(new):
                known = _Known(new.astype(np.float16), 1, share)
            else:
                average = old.scores.astype(np.float32)
                average += NEW_SHARE * (new - average)
                share = old.share + NEW_SHARE * (share - old.share)
                known = _Known(average.astype(np.float16), old.requests + 1, share)
            self._tokens += len(known.scores) - (len(old.scores) if old else 0)
            self._keep(digest, known)
            self._unsaved += 1
            if self._unsaved >= SAVE_EVERY:
                self.save()
            return known.requests

    def scores(self, digest: str) -> Tensor | None:
        """`[tokens]` float32, the average attention of a chunk's tokens; None if no request has reported it."""
        with self._lock:
            self._load()
            known = self._known.get(digest)
            return None if known is None else torch.from_numpy(known.scores.astype(np.float32))

    def share(self, digest: str) -> float | None:
        """The average share of a chunk's tokens that were important; None if no request has reported it."""
        with self._lock:
            self._load()
            known = self._known.get(digest)
            return None if known is None else known.share

    def requests(self, digest: str) -> int:
        """How many requests have reported a chunk."""
        with self._lock:
            self._load()
            return self._known[digest].requests if digest in self._known else 0

    def digests(self) -> list[str]:
        """The chunks that requests have reported, the one that was reported last last."""
        with self._lock:
            self._load()
            return list(self._known)

    def forget(self, digest: str) -> None:
        """Drop what is known of a chunk."""
        with self._lock:
            self._load()
            known = self._known.pop(digest, None)
            if known is not None:
                self._tokens -= len(known.scores)
                self._unsaved += 1

    def save(self) -> None:
        """Write the file, if anything was reported since; a failure is logged and costs time later."""
        with self._lock:
            if self._path is None or not self._unsaved:
                return
            rows = [_HEAD.pack(_FORMAT, len(self._known))]
            for digest, one in self._known.items():
                rows += [_ROW.pack(bytes.fromhex(digest), len(one.scores), float(one.requests), one.share)]
                rows += [one.scores.tobytes()]
            body = b"".join(rows)
            self._unsaved = 0
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(self._path, [seal(self._secret, body), body], durable=False)
        except OSError as error:
            logger.info("%s could not be saved (%s); importance begins again at the next opening", self._path, error)

    def _keep(self, digest: str, known: _Known) -> None:
        self._known[digest] = known
        while self._tokens > self._cap_tokens and len(self._known) > 1:
            _, gone = self._known.popitem(last=False)
            self._tokens -= len(gone.scores)

    def _load(self) -> None:
        """Read the file, once, before anything is asked."""
        if self._is_loaded:
            return
        self._is_loaded = True
        try:
            for digest, known in self._read():
                self._tokens += len(known.scores)
                self._keep(digest, known)
        except (OSError, EntryFault, MemoryError) as error:
            logger.info("no usable importance at %s (%s)", self._path, error)

    def _read(self) -> list[tuple[str, _Known]]:
        source, start = open_regular(self._path), seal_size(self._secret)  # type: ignore[arg-type]
        with contextlib.closing(source):
            if source.stat.nbytes < start + _HEAD.size or source.stat.nbytes > 4 * self._cap_tokens + (1 << 26):
                raise EntryFault("format", f"{source.stat.nbytes} bytes")
            content = bytearray(source.stat.nbytes)
            source.read_into(0, memoryview(content))
        body = memoryview(content)[start:]
        check_seal(bytes(content[:start]), self._secret, bytes(body))
        with as_fault("the importance of tokens"):
            return _parsed(body)


def _parsed(body: memoryview) -> list[tuple[str, _Known]]:
    form, count = _HEAD.unpack_from(body)
    if form != _FORMAT:
        raise EntryFault("format", f"{form!r} is not how a file of importance begins")
    offset, found = _HEAD.size, []
    for _ in range(count):
        digest, tokens, requests, share = _ROW.unpack_from(body, offset)
        scores = np.frombuffer(body, "<f2", tokens, offset + _ROW.size).copy()
        offset += _ROW.size + 2 * tokens
        if not (np.isfinite(scores).all() and 0 <= share <= 1 and 1 <= requests < 1 << 31):
            raise EntryFault("format", f"chunk {digest.hex()} has numbers that cannot be")
        found.append((digest.hex(), _Known(scores, int(requests), share)))
    if offset != len(body):
        raise EntryFault("format", f"{len(body)} bytes, {offset} are expected")
    return found
