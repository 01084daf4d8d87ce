# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much attention stored tokens get, over requests, evictions and restarts.

Requests report what their questions look at; moving averages of it decide which tokens share blocks. The file may be
lost, stale or damaged at no harm: it decides about time, never about KV.
"""

import contextlib
import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...store.format import EntryFile, pack_entry
from ...store.tiers.base import EntryFault, as_fault
from ...store.tiers.files import open_regular, write_atomically

__all__ = ["TokenImportance", "TokenRecord"]

logger = logging.getLogger(__name__)

NEW_SHARE = 0.2  # of the newest request in the moving averages
CAP_TOKENS = 1 << 24  # whose averages are known, 32 MiB; chunks that were not reported for longest leave first
SAVE_EVERY = 1024  # reports
KIND = "hf_blend.importance/3"
_MAX = float(np.finfo(np.float16).max)


@dataclass
class TokenRecord:
    """Averages over the requests that reported a chunk: scores `[tokens]` in float16."""

    scores: np.ndarray
    requests: int


class TokenImportance:
    """Moving averages of the attention that the tokens of chunks get. Threads may share it."""

    def __init__(self, path: Path | None = None, cap_tokens: int = CAP_TOKENS) -> None:
        self._path, self._cap_tokens = path, cap_tokens
        self._records: OrderedDict[str, TokenRecord] = OrderedDict()
        self._tokens = self._unsaved = 0
        self._is_loaded = path is None
        self._lock = threading.RLock()

    def record(self, digest: str, scores: Tensor) -> None:
        """Average what one request found with what was known.

        Shapes: scores `[tokens]`.
        """
        new = np.nan_to_num(scores.detach().float().cpu().numpy(), nan=0.0).clip(0.0, _MAX)
        with self._lock:
            self._load()
            old = self._records.pop(digest, None)
            if old is None or len(old.scores) != len(new):
                record = TokenRecord(new.astype(np.float16), 1)
            else:
                average = old.scores.astype(np.float32)
                average += NEW_SHARE * (new - average)
                record = TokenRecord(average.astype(np.float16), old.requests + 1)
            self._tokens -= len(old.scores) if old else 0
            self._keep(digest, record)
            self._unsaved += 1
            if self._unsaved >= SAVE_EVERY:
                self.save()

    def get(self, digest: str) -> TokenRecord | None:
        """Give what is recorded of a chunk; None if no request has reported it."""
        with self._lock:
            self._load()
            return self._records.get(digest)

    def digests(self) -> list[str]:
        """The chunks that requests have reported, the one that was reported last last."""
        with self._lock:
            self._load()
            return list(self._records)

    def save(self) -> None:
        """Write the file, if anything was reported since; a failure is logged and costs time later."""
        with self._lock:
            if self._path is None or not self._unsaved:
                return
            records = self._records.values()
            digests = np.frombuffer(bytearray.fromhex("".join(self._records)), np.uint8).reshape(-1, 32)
            tensors = {
                "digests": torch.from_numpy(digests),
                "tokens": torch.tensor([len(record.scores) for record in records]),
                "requests": torch.tensor([record.requests for record in records]),
                "scores": torch.from_numpy(
                    np.concatenate([np.zeros(0, np.float16), *(record.scores for record in records)])
                ),
            }
            content = pack_entry(KIND, {}, tensors.items())
            self._unsaved = 0
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._path, content, durable=False)
        except OSError as error:
            logger.info("%s could not be saved (%s); importance begins again at the next opening", self._path, error)

    def _keep(self, digest: str, record: TokenRecord) -> None:
        self._records[digest] = record
        self._tokens += len(record.scores)
        while self._tokens > self._cap_tokens and len(self._records) > 1:
            _, gone = self._records.popitem(last=False)
            self._tokens -= len(gone.scores)

    def _load(self) -> None:
        """Read the file, once, before anything is asked."""
        if self._is_loaded:
            return
        self._is_loaded = True
        try:
            for digest, record in self._read():
                self._keep(digest, record)
        except (OSError, EntryFault, MemoryError) as error:
            logger.info("no usable importance at %s (%s)", self._path, error)

    def _read(self) -> list[tuple[str, TokenRecord]]:
        source = open_regular(self._path)  # type: ignore[arg-type]
        with contextlib.closing(source):
            tensors = EntryFile(source, KIND, 4 * self._cap_tokens + (1 << 26)).tensors()
        with as_fault("the importance of tokens"):
            digests, tokens, requests, scores = (tensor.numpy() for tensor in tensors.values())
            scores = scores.astype(np.float16)
            are_counts = (requests >= 1).all() and (tokens >= 0).all()
            if not (are_counts and np.isfinite(scores).all()):
                raise EntryFault("format", "scores or counts cannot be those of tokens")
            parts = np.split(scores, tokens.cumsum()[:-1])
            records = []
            for digest, count, times, token_scores in zip(digests, tokens, requests, parts, strict=True):
                if len(token_scores) == count:
                    records.append((digest.tobytes().hex(), TokenRecord(token_scores, int(times))))
        if len(records) != len(tokens):
            raise EntryFault("format", f"{len(records)} chunks have their scores, {len(tokens)} are expected")
        return records
