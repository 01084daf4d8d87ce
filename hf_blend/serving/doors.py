# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Connections that carry no request, so that nobody can hold all of them."""

import asyncio
from collections import OrderedDict
from typing import Any, TypeAlias

from .limits import Limits

__all__ = ["Doors"]

Client: TypeAlias = tuple[str, int]


class Doors:
    """Cuts connections that are silent, half sent or kept alive: after a time, and the oldest of too many."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: dict[Client, Any] = {}
        self._waiting: dict[str, OrderedDict[Client, asyncio.TimerHandle]] = {}

    def idle(self, client: Client) -> None:
        """A connection carries no request from now on."""
        transport = self._open.get(client)
        if transport is None:
            return
        row = self._waiting.setdefault(client[0], OrderedDict())
        row[client] = asyncio.get_running_loop().call_later(self._limits.header_s, transport.abort)
        if len(row) > self._limits.connections:
            oldest = next(iter(row))
            self.busy(oldest)
            self._open.pop(oldest).abort()

    def busy(self, client: Client) -> None:
        """A connection carries a request from now on."""
        row = self._waiting.get(client[0], OrderedDict())
        if client in row:
            row.pop(client).cancel()
        if not row:
            self._waiting.pop(client[0], None)

    def guarded(self, protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
        """A protocol whose connections are looked after."""
        doors = self

        class Guarded(protocol):  # type: ignore[valid-type,misc]
            """Tells of its beginning and its end."""

            def connection_made(self, transport: Any) -> None:
                super().connection_made(transport)
                client = transport.get_extra_info("peername")[:2]
                doors._open[client] = transport
                doors.idle(client)
                self._hf_blend_client = client

            def connection_lost(self, exc: Exception | None) -> None:
                doors.busy(self._hf_blend_client)
                doors._open.pop(self._hf_blend_client, None)
                super().connection_lost(exc)

        return Guarded
