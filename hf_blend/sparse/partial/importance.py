# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much attention stored tokens get, over the requests of a process.

Requests report what their questions look at; moving averages of it decide which tokens share blocks. They decide about
time, never about KV.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

NEW_SHARE = 0.2  # of the newest request in the moving averages
CAP_TOKENS = 1 << 24  # whose averages are known, 32 MiB; chunks that were not reported for longest leave first
LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class TokenRecord:
    """Averages over the requests that reported a chunk: scores `[tokens]` in float16."""

    scores: Tensor
    requests: int


class TokenImportance:
    """Moving averages of the attention that the tokens of chunks get. Threads may share it."""

    def __init__(self, cap_tokens: int = CAP_TOKENS) -> None:
        self._cap_tokens = cap_tokens
        self._records: OrderedDict[str, TokenRecord] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def record(self, digest: str, scores: Tensor) -> TokenRecord:
        """Average what one request found with what was known of a chunk.

        Shapes: scores `[tokens]`.
        """
        new = scores.detach().float().cpu().nan_to_num(nan=0.0).clamp(0.0, LARGEST)
        with self._lock:
            old = self._records.pop(digest, None)
            if old is None:
                record = TokenRecord(new.half(), 1)
                self._tokens += len(new)
            else:
                average = torch.lerp(old.scores.float(), new, NEW_SHARE)
                record = TokenRecord(average.half(), old.requests + 1)
            self._records[digest] = record
            while self._tokens > self._cap_tokens and len(self._records) > 1:
                _, gone = self._records.popitem(last=False)
                self._tokens -= len(gone.scores)
        return record

    def get(self, digest: str) -> TokenRecord | None:
        """Give what is recorded of a chunk; None if no request has reported it."""
        with self._lock:
            return self._records.get(digest)
