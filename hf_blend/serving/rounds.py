# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whose request is next: the tenants in turn."""

from collections.abc import Callable, Iterable
from itertools import zip_longest
from typing import TypeVar

__all__ = ["Rounds"]

T = TypeVar("T")


class Rounds:
    """Round robin by tenant: a tenant that waits is served before another is served twice."""

    def __init__(self) -> None:
        self._line: list[str] = []
        self._served: list[str] = []  # since they were ordered last

    def order(self, requests: Iterable[T], tenant_of: Callable[[T], str]) -> list[T]:
        """The first request of each tenant in line, then the second of each, and so on; tenants without one leave.

        A new tenant comes behind those in line, and one that was served behind all of them.
        """
        queues: dict[str, list[T]] = {}
        for request in requests:
            queues.setdefault(tenant_of(request), []).append(request)
        line = dict.fromkeys([*self._line, *(name for name in queues if name not in self._served), *self._served])
        self._line, self._served = [tenant for tenant in line if tenant in queues], []
        rows = zip_longest(*(queues[tenant] for tenant in self._line))
        return [request for row in rows for request in row if request is not None]

    def serve(self, tenant: str) -> None:
        """A request of this tenant was served: the others come before its next one."""
        self._line = [other for other in self._line if other != tenant]
        self._served.append(tenant)
