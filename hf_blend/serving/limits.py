# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How much of everything a server takes from those who ask."""

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What a server takes. `docs/serving.md` has the same rows.

    Attributes:
        requests: under way or waiting, of all tenants.
        connections: of one address that carry no whole request: silent, half sent, or kept alive.
        header_s: how long a connection may carry none.
        body_bytes: of a request.
        body_s: how long its body may take to arrive.
        request_s: how long it may take altogether.
        new_tokens: where an answer is cut that names no length.
        documents: of one request, and places of its prompt where they are.
        messages: of one request.
        stops: texts at which its answer ends.
        stop_chars: of each.
        stuck_s: after so long without any progress of what is under way the server is not ready.
    """

    requests: int = 64
    connections: int = 64
    header_s: float = 20.0
    body_bytes: int = 4 << 20
    body_s: float = 20.0
    request_s: float = 300.0
    new_tokens: int = 256
    documents: int = 256
    messages: int = 1024
    stops: int = 4
    stop_chars: int = 256
    stuck_s: float = 60.0

    @property
    def inside(self) -> int:
        """Requests whose body arrives or whose answer is made; those over the limit of requests are refused."""
        return 4 * self.requests + 64
