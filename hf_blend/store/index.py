# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a tier holds, in one SQLite file that processes share: names, sizes, order of eviction, and chunks by content.

The file may be lost, stale, damaged or forged at no harm to KV. The truth is the tier: a part of its listing is read
again when its stamp is another one, or when its rows are not what they were when it was listed. What a row says of a
chunk is used only if the name of the object, which is a digest of the chunk's key, proves it.
"""

import contextlib
import errno
import fcntl
import json
import logging
import math
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from ..errors import ConfigError
from .chunk import ChunkKey
from .content import WINDOW, Run, hashes, longest_run, pack_tokens, unpack_tokens, window_of
from .eviction.base import EvictionPolicy
from .tiers.base import Tier

__all__ = ["Group", "Index"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
OnFault = Callable[[str], object]
Use = tuple[str, float, float | None]  # name, time in seconds since 1970; which share was important, None is a use
BUSY_S = 2.0  # for another process that writes
DECAY = math.log(2) / 512  # of a frequency, per use of the tier
NEW_SHARE = 0.3  # of the newest report in the moving average of the important share
_PAGE = 5_000  # rows that are held at once
_WARM_S = 0.05  # of a search, at most, for reading what saves later ones time
_NEXT_TOKENS = 16  # behind a window: chunks that share it are in the order of these
_NEAR, _ALIKE = 2, 64  # chunks that are compared with a prompt: of those before it, and of those like it
_SIZE = "max(0, ifnull(CAST(nbytes AS INTEGER), 0))"  # so that no damaged row gives another type
_TOKENS, _CREATED = "ifnull(CAST(tokens AS INTEGER), 0)", "ifnull(CAST(created AS REAL), 0)"
_ENTER = (
    "INSERT INTO objects(name, nbytes, created, owner, score, used, frequency) VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT(name) DO UPDATE SET nbytes = excluded.nbytes, created = excluded.created"
)
_JOINED = (
    "objects o LEFT JOIN chunks c ON c.id = o.chunk LEFT JOIN texts t ON t.id = o.chunk LEFT JOIN groups g "
    "ON g.id = c.grp"
)
_CHANGED = "UPDATE parts SET digest = '' WHERE prefix IN (substr(?1, 1, 6), substr(?1, 1, 3), '')"
_WIDTHS = (
    f"SELECT value FROM json_each('{[*range(1, WINDOW + 1)]}') WHERE EXISTS "
    "(SELECT 1 FROM chunks WHERE grp = ? AND width = value)"
)
_LIKE = "SELECT ids FROM chunks JOIN texts USING(id) WHERE grp = ?1 AND inside = ?2 AND at = ?3 AND next"
_NEAREST = (
    f"SELECT * FROM ({_LIKE} >= ?4 ORDER BY next LIMIT {_ALIKE}) UNION ALL "
    f"SELECT * FROM ({_LIKE} < ?4 ORDER BY next DESC LIMIT {_NEAR})"
)
_FORMAT = 2
_SCHEMA = (
    "CREATE TABLE objects(name TEXT PRIMARY KEY, nbytes INTEGER, created REAL, score REAL, used REAL, "
    "frequency REAL, share REAL, owner TEXT, chunk INTEGER) WITHOUT ROWID",
    "CREATE INDEX by_score ON objects(score)",
    "CREATE INDEX unread ON objects(name) WHERE chunk IS NULL",
    "CREATE TABLE groups(id INTEGER PRIMARY KEY, owner TEXT, fingerprint TEXT, prefix BLOB, "
    "UNIQUE(owner, fingerprint, prefix))",
    "CREATE TABLE chunks(id INTEGER PRIMARY KEY AUTOINCREMENT, grp INTEGER, tokens INTEGER, width INTEGER, head TEXT, "
    "at INTEGER, inside TEXT, next BLOB)",
    "CREATE INDEX by_head ON chunks(grp, width, head, tokens)",
    "CREATE INDEX by_inside ON chunks(grp, inside, at, next) WHERE inside IS NOT NULL",
    "CREATE TABLE texts(id INTEGER PRIMARY KEY, ids BLOB)",
    "CREATE TRIGGER gone AFTER DELETE ON objects BEGIN DELETE FROM chunks WHERE id = OLD.chunk; "
    "DELETE FROM texts WHERE id = OLD.chunk; END",
    "CREATE TABLE parts(prefix TEXT PRIMARY KEY, stamp TEXT, digest TEXT)",
    "CREATE TABLE policy(name TEXT, uses REAL)",
)


class Index:
    """The objects of one tier. Threads may share it; what cannot be read or written now raises OSError.

    The file is at `path`, None keeps it in memory; `on_fault` receives why a file was not used. A policy scores the
    uses of objects.
    """

    def __init__(
        self, path: Path | None = None, policy: EvictionPolicy | None = None, on_fault: OnFault | None = None
    ) -> None:
        self._path, self._on_fault, self._policy = path, on_fault or (lambda _: None), policy
        self._lock = threading.RLock()
        self._inherited: list[Any] = []  # connections of the parent, which a child must not close
        self._db: Any = None
        self._pid = os.getpid()
        self.doubts = 0  # how often it turned out that what was read may have been wrong
        self._begin()

    def _begin(self) -> None:
        """Forget what was read of the file."""
        self._parts: dict[str, str] = {}  # stamps of what is known to be in step
        self._checked: set[str] = set()  # those whose rows were compared with their digest
        self._windows, self._newest = np.zeros(1, np.uint64), 0  # hashes of heads and windows, sorted; of which chunk
        self._doubted = False  # sizes that are known
        self._uses = -1.0  # of all objects so far, by all processes; below nothing if that is not known yet

    def enter(self, objects: Iterable[tuple[str, int, float, str | None]]) -> None:
        """Enter objects (name, bytes, time of writing, owner) as used when written, or correct their size and time."""
        uses = [self._first_use(*entry) for entry in objects]
        self._write_rows((_ENTER, uses), (_CHANGED, [row[:1] for row in uses]))

    def describe(self, said: Iterable[tuple[str, ChunkKey]], owner: str) -> None:
        """Enter which chunk each of some objects holds; objects that are not entered are passed over."""
        rows = [(name, key, pack_tokens(key.token_ids)) for name, key in said]

        def act(db: Any) -> None:
            for name, key, packed in rows:
                if db.execute("SELECT 1 FROM objects WHERE name = ? AND chunk IS NULL", (name,)).fetchone():
                    group = self._group(db, owner, key.fingerprint, key.chunk_prefix_ids, make=True)
                    columns = "grp, tokens, width, head, at, inside, next"
                    sql = f"INSERT INTO chunks({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)"
                    chunk = db.execute(sql, (group, *_recognised_by(np.frombuffer(packed, np.int32)))).lastrowid
                    db.execute("INSERT INTO texts VALUES (?, ?)", (chunk, packed))
                    db.execute("UPDATE objects SET chunk = ?, owner = ? WHERE name = ?", (chunk, owner, name))
            db.executemany(_CHANGED, [(name,) for name, *_ in rows])

        self._write(act)

    def remove(self, *names: str) -> None:
        """Remove objects, and the chunks that they hold."""
        if rows := [(name,) for name in names if name in self]:
            self._write_rows(("DELETE FROM objects WHERE name = ?", rows), (_CHANGED, rows))

    def row(self, name: str) -> tuple[int, str | None] | None:
        """Size and owner of an object."""
        rows = self._read(f"SELECT {_SIZE}, owner FROM objects WHERE name = ?", name)
        return rows[0] if rows else None

    def __contains__(self, name: object) -> bool:
        return bool(self._read("SELECT 1 FROM objects WHERE name = ?", name))

    def nbytes(self, owner: str | None = None) -> int:
        """Bytes of all objects, or of those of one owner."""
        return int(self._read(f"SELECT total({_SIZE}) FROM objects WHERE ?1 IS NULL OR owner = ?1", owner)[0][0])

    def larger(self, nbytes: int | None) -> list[str]:
        """Names of the objects that are larger than that."""
        return [row[0] for row in self._read(f"SELECT name FROM objects WHERE {_SIZE} > ?", nbytes)]

    def in_order(self, owner: str | None = None) -> Iterator[tuple[str, int]]:
        """Walk over names and sizes, the lowest score first; nobody may change the index meanwhile."""
        count, score, last = 16, -math.inf, ""
        while True:
            sql = f"SELECT name, {_SIZE}, score FROM objects WHERE (score, name) > (?1, ?2) AND (?3 IS NULL OR "
            page = self._read(f"{sql} owner = ?3) ORDER BY score, name LIMIT {count}", score, last, owner)
            yield from (row[:2] for row in page)
            if len(page) < count:
                return
            count, score, last = min(2 * count, _PAGE), page[-1][2], page[-1][0]

    def note(self, uses: Sequence[Use]) -> None:
        """Record uses of objects and reports of their important share; unknown names are passed over."""
        records: dict[str, tuple[float, float, float | None]] = {}
        self._uses = max(self._count_uses(), self._stored_uses())  # others count, too
        for name, time_s, share in uses:
            self._uses += share is None
            if (use := records.get(name) or self._last_use(name)) is None:
                continue
            used_s, frequency, average = use
            if share is None:
                used_s, frequency = time_s, one_more(frequency, self._uses)
            else:
                average = share if average is None else average + NEW_SHARE * (share - average)
            records[name] = used_s, frequency, average
        rows = [(self._score(*use), *use, name) for name, use in records.items()]
        sql = "UPDATE objects SET score = ?, used = ?, frequency = ?, share = ? WHERE name = ?"
        if uses:
            self._write_rows((sql, rows), ("UPDATE policy SET uses = ?", [(self._uses,)]))

    def _first_use(self, name: str, nbytes: int, created: float, owner: str | None = None) -> tuple[Any, ...]:
        """The row of an object that was used once, when it was written."""
        self._uses = self._count_uses() + 1
        use = (created, DECAY * self._uses)
        return name, nbytes, created, owner, self._score(*use, None), *use

    def _last_use(self, name: str) -> tuple[float, float, float | None] | None:
        """Time of the last use, frequency and important share; a file that others wrote may hold any numbers."""
        sql = "ifnull(CAST(used AS REAL), 0), ifnull(CAST(frequency AS REAL), 0), min(1, max(0, CAST(share AS REAL)))"
        rows = self._read(f"SELECT {sql} FROM objects WHERE name = ?", name)
        return (rows and (rows[0] if math.isfinite(sum(rows[0][:2])) else (0.0, 0.0, None))) or None

    def _score(self, used_s: float, frequency: float, share: float | None) -> float:
        return 0.0 if self._policy is None else self._policy.score(used_s, frequency, 1.0 if share is None else share)

    def _stored_uses(self) -> float:
        ((uses,),) = self._read("SELECT total(CAST(uses AS REAL)) FROM policy")
        return uses if 0 <= uses < 1e15 else 0.0

    def _count_uses(self) -> float:
        """Count the uses so far; scores that another policy made are made again."""
        if self._uses < 0:
            self._uses, kind = self._stored_uses(), type(self._policy).__qualname__
            if self._policy is not None and not self._read("SELECT 1 FROM policy WHERE name = ?", kind):
                names = [row[0] for row in self._read("SELECT name FROM objects")]
                rows = [(self._score(*use), name) for name in names if (use := self._last_use(name))]
                scores = "UPDATE objects SET score = ? WHERE name = ?", rows
                self._write_rows(scores, ("UPDATE policy SET name = ?", [(kind,)]))
        return self._uses

    def sync(self, tier: Tier, space: str, thorough: bool) -> None:
        """Bring the rows of a space, or of all, in step with what the tier lists; costs little if nothing changed.

        With `thorough` the rows of parts that did not change are compared with what they were.
        """
        doubts = -1
        while doubts != self.doubts:  # a file that is made again meanwhile knows nothing of the first parts
            doubts, parts = self.doubts, self._within("SELECT prefix FROM parts", space, "prefix")
            shards = dict(tier.shards(space))  # after the parts: another store may list one that is made meanwhile
            for (prefix,) in parts:
                if prefix not in shards and "" not in shards:
                    self._list(tier, prefix, None)
            for prefix, stamp in shards.items():
                if thorough:
                    self._verify(prefix)
                if not stamp or self._parts.get(prefix) != stamp:
                    rows = self._read("SELECT 1 FROM parts WHERE prefix = ? AND stamp = ?", prefix, stamp)
                    if not stamp or not rows:
                        self._list(tier, prefix, stamp)
                    if doubts == self.doubts:
                        self._parts[prefix] = stamp
        self._doubted = self._doubted and bool(space)

    def distrust(self) -> None:
        """Have the next `sync` list everything again, with its size."""
        self._parts.clear()
        self._write_rows(("UPDATE parts SET stamp = ''", [()]))
        self._doubted = True
        self.doubts += 1

    def remake(self) -> None:
        """Start the file again after a row turned out to be wrong."""
        with self._lock:
            self._give_up(0, sqlite3.DatabaseError("a row is wrong"))

    def unread(self, space: str) -> list[str]:
        """Names of a space whose chunks were not read yet."""
        return [row[0] for row in self._within("SELECT name FROM objects WHERE chunk IS NULL", space)]

    def names(self, space: str) -> list[str]:
        """All names of a space."""
        return [row[0] for row in self._within("SELECT name FROM objects", space)]

    def starts(self, group: "Group", ids: np.ndarray) -> list[tuple[int, int]]:
        """Give (position, tokens) of chunks whose first tokens are in a prompt; the rest of a chunk may differ."""
        number = self._run(lambda db: self._group(db, *group))
        spans: list[tuple[int, int]] = []
        for (width,) in self._read(_WIDTHS, number):
            positions = _positions_by_hash(
                ids, width, self._positions(ids) if width == WINDOW else np.arange(len(ids))
            )
            sql = f"SELECT DISTINCT head, {_TOKENS} FROM chunks WHERE grp = ? AND width = ? AND head IN"
            rows = self._read(f"{sql} (SELECT value FROM json_each(?))", number, width, json.dumps([*positions]))
            spans += [(start, tokens) for head, tokens in rows for start in positions.get(head, ())]
        return spans

    def inside(self, group: "Group", ids: np.ndarray) -> Iterator[Run]:
        """Give the longest run around each window that a chunk and the prompt share, if it is worth reading."""
        number = self._run(lambda db: self._group(db, *group))
        raw, done = ids.tobytes(), dict[tuple[str, int], int]()
        positions = _positions_by_hash(ids, WINDOW, self._positions(ids))
        sql = "SELECT DISTINCT inside, ifnull(CAST(at AS INTEGER), 0) FROM chunks WHERE grp = ? AND inside IN"
        rows = self._read(f"{sql} (SELECT value FROM json_each(?))", number, json.dumps([*positions]))
        for at, window, offset in sorted((at, *row) for row in rows for at in positions.get(row[0], ())):
            if at < done.get((window, offset), 0):
                continue
            run = longest_run(self._like(number, window, offset, raw, at), raw, at, offset)
            if run.is_worth_reading:
                done[window, offset] = run.stop  # a text that repeats itself is looked at once
                yield run

    def key(self, name: str, namespace: str) -> ChunkKey | None:
        """The key of the chunk that an object holds, as its row says."""
        rows = self._read(f"SELECT fingerprint, prefix, ids FROM {_JOINED} WHERE name = ?", name)
        return _key(rows[0], namespace) if rows else None

    def records(self, owner: str, namespace: str) -> Iterator[tuple[str, ChunkKey | None, int, float]]:
        """Name, key, bytes and time of the chunks of an owner, by name; the key is None if the row cannot be one."""
        columns = f"name, {_SIZE}, {_CREATED}, fingerprint, prefix, ids FROM {_JOINED}"
        for name, nbytes, created, *key in self._owned(columns, owner, _PAGE // 10):
            yield name, _key(key, namespace), nbytes, created

    def owned(self, owner: str) -> Iterator[str]:
        """Names of the chunks of an owner, in order."""
        return (row[0] for row in self._owned("name FROM objects o", owner, _PAGE))

    def _owned(self, columns: str, owner: str, rows: int) -> Iterator[Any]:
        """Columns of the chunks of an owner, by name, so many rows at once."""
        last, sql = "", f"SELECT {columns} WHERE name > ? AND o.owner = ? AND o.chunk > 0 ORDER BY name LIMIT {rows}"
        while page := self._read(sql, last, owner):
            yield from page
            last = page[-1][0]

    def count(self, owner: str, fingerprint: str | None = None) -> int:
        """How many chunks of an owner there are, or of a model."""
        if fingerprint is None:
            return int(self._read("SELECT count(*) FROM objects WHERE owner = ? AND chunk > 0", owner)[0][0])
        groups = "SELECT id FROM groups WHERE owner = ? AND fingerprint = ?"
        return int(self._read(f"SELECT count(*) FROM chunks WHERE grp IN ({groups})", owner, fingerprint)[0][0])

    def sample(self, group: "Group") -> bytes:
        """The packed ids of any chunk of a model and sink; empty if there is none."""
        number = self._run(lambda db: self._group(db, *group))
        rows = self._read("SELECT CAST(ids AS BLOB) FROM chunks JOIN texts USING(id) WHERE grp = ? LIMIT 1", number)
        return bytes(rows[0][0]) if rows else b""

    def prefixes(self, owner: str, fingerprint: str) -> list[bytes]:
        """Packed ids of the tokens before chunks of a fingerprint."""
        groups = "groups g WHERE owner = ? AND fingerprint = ? AND EXISTS (SELECT 1 FROM chunks WHERE grp = g.id)"
        return [bytes(row[0]) for row in self._read(f"SELECT CAST(prefix AS BLOB) FROM {groups}", owner, fingerprint)]

    def close(self) -> None:
        """Close the file; it is opened again when it is needed."""

        def act(db: Any) -> None:
            for (prefix,) in db.execute("SELECT prefix FROM parts WHERE digest = ''").fetchall():
                db.execute("UPDATE parts SET digest = ? WHERE prefix = ?", (_digest(db, prefix), prefix))

        with self._lock:
            with contextlib.suppress(OSError):
                self._write(act)
            if self._path is not None and self._db is not None and self._pid == os.getpid():
                self._db.close()
                self._db = None

    def _list(self, tier: Tier, prefix: str, stamp: str | None) -> None:
        """Bring the rows of a part in step with the listing of the tier; without a stamp the part is gone."""
        self._verify(prefix)
        doubts = self.doubts
        rows = self._within("SELECT name, nbytes, created FROM objects", prefix)
        listed = {name: (nbytes, created) for name, nbytes, created in rows}
        there = {} if stamp is None else dict(tier.listing(prefix, () if self._doubted else listed))
        gone = [(name, *row) for name, row in listed.items() if name not in there]
        new = [(stat.created, name, stat.nbytes) for name, stat in there.items() if stat is not None]
        changed = [
            self._first_use(name, nbytes, created)
            for created, name, nbytes in sorted(new)
            if listed.get(name) != (nbytes, created)
        ]

        def act(db: Any) -> None:
            if doubts != self.doubts:  # the file was made again: what changed is not what changed in this one
                return
            db.executemany("DELETE FROM objects WHERE name = ? AND nbytes IS ? AND created IS ?", gone)
            db.executemany(_ENTER, changed)
            db.execute("DELETE FROM parts WHERE prefix = ?", (prefix,))
            if stamp is not None:
                db.execute("INSERT INTO parts VALUES (?, ?, ?)", (prefix, stamp, _digest(db, prefix)))

        if gone or changed or stamp != "" or not self._read("SELECT 1 FROM parts WHERE prefix = ?", prefix):
            self._write(act)

    def _verify(self, prefix: str) -> None:
        """Start the file again if the rows of a part changed since they were listed; each part is compared once."""

        def act(db: Any) -> None:
            sql = "SELECT 1 FROM parts WHERE prefix = ? AND digest NOT IN (?, '')"
            with db:  # what others write is not between the two
                db.execute("BEGIN")
                row = db.execute(sql, (prefix, _digest(db, prefix))).fetchone()
            if row:
                raise sqlite3.DatabaseError(f"its rows of {prefix} are others")

        if prefix not in self._checked:
            self._run(act)
            self._checked.add(prefix)

    def _within(self, sql: str, prefix: str, column: str = "name") -> list[Any]:
        """Read rows whose name, or another column, begins with a prefix."""
        joined = "AND" if " WHERE " in sql else "WHERE"
        if not prefix:
            return self._read(sql)
        return self._read(f"{sql} {joined} {column} >= ? AND {column} < ?", prefix, f"{prefix}g")

    def _group(
        self, db: Any, owner: str, fingerprint: str, chunk_prefix_ids: Sequence[int], make: bool = False
    ) -> int | None:
        named = (owner, fingerprint, pack_tokens(chunk_prefix_ids))
        if make:
            db.execute("INSERT OR IGNORE INTO groups(owner, fingerprint, prefix) VALUES (?, ?, ?)", named)
        sql = "SELECT id FROM groups WHERE owner = ? AND fingerprint = ? AND prefix = ?"
        row = db.execute(sql, named).fetchone()
        return row and int(row[0])

    def _positions(self, ids: np.ndarray) -> np.ndarray:
        """Positions of a prompt where a head or window of a chunk may begin; all of them until every hash is read."""
        stop_s = time.monotonic() + _WARM_S
        columns = "max(id), group_concat(head || coalesce(inside, head), '')"
        page = f"SELECT {columns} FROM (SELECT * FROM chunks WHERE id > ? AND width = {WINDOW} LIMIT {_PAGE})"
        while time.monotonic() < stop_s:
            with self._lock:
                windows, newest = self._windows, self._newest
            ((newest, positions),) = self._read(page, newest)
            merged = windows
            with contextlib.suppress(ValueError, TypeError):  # no page, or no digits in a file that was damaged
                new = np.sort(np.frombuffer(bytes.fromhex(positions), ">u8").astype(np.uint64))
                merged = np.insert(windows, np.searchsorted(windows, new), new)
            with self._lock:
                if self._windows is not windows:  # another thread was faster, or the file was made again
                    continue
                if newest is not None:
                    self._windows, self._newest = merged, newest
                    continue
            at = hashes(ids, WINDOW)
            return np.flatnonzero(windows.take(np.searchsorted(windows, at), mode="clip") == at)
        return np.arange(len(ids))

    def _like(self, number: int | None, window: str, offset: int, raw: bytes, at: int) -> Iterator[bytes]:
        """Packed ids of the chunks with a window whose next tokens are nearest to those of a prompt."""
        behind = raw[4 * (at + WINDOW) :][: 4 * _NEXT_TOKENS]
        for (packed,) in self._read(_NEAREST, number, window, offset, behind):
            if isinstance(packed, bytes) and len(packed) % 4 == 0:
                yield packed

    def _read(self, sql: str, *values: object) -> list[Any]:
        rows: list[Any] = self._run(lambda db: db.execute(sql, values).fetchall())
        return rows

    def _write_rows(self, *changes: tuple[str, Sequence[Sequence[Any]]]) -> None:
        """Run statements, each over its rows, in one transaction."""
        self._write(lambda db: [db.executemany(sql, rows) for sql, rows in changes])

    def _write(self, act: Callable[[Any], object]) -> None:
        """Change rows in one transaction."""

        def change(db: Any) -> None:
            db.execute("BEGIN IMMEDIATE")
            try:
                act(db)
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

        self._run(change)

    def _run(self, act: Callable[[Any], Answer]) -> Answer:
        """Read or change; a file that cannot be used is started again, and if that fails memory takes its place."""
        with self._lock:
            for attempt in range(3):
                try:
                    return act(self._connected())
                except (sqlite3.Error, OSError, OverflowError, UnicodeError) as error:
                    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                    is_busy = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
                    if attempt == 2 or code == sqlite3.SQLITE_FULL or (is_busy and self._has_locks()):
                        raise OSError(errno.EIO, f"the index {self._path} cannot be used now ({error})") from error
                    self._give_up(max(attempt, is_busy), error)
            raise AssertionError("never here")

    def _has_locks(self) -> bool:
        """Return False where the file system has no locks: SQLite takes that for a file that others hold."""
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self._path and self._path.parent) as probe:
            fcntl.lockf(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _give_up(self, attempt: int, error: Exception) -> None:
        """Start the file again, or continue in memory if that was tried."""
        logger.info("no usable index at %s (%s)", self._path, error)
        self._on_fault(f"index:{'format' if attempt == 0 else 'io'}")
        with contextlib.suppress(sqlite3.Error):
            self._db and self._db.close()
        self._db = None
        self.doubts += 1
        self._begin()
        if attempt:
            self._path = None
        elif self._path is not None and getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY_DBMOVED:
            _clear(self._path)  # but for a new one that another process made in its place
            self._path = None if self._path.exists() else self._path

    def _connected(self) -> Any:
        """The connection of this process; a forked child has its own."""
        if self._db is not None and self._pid != os.getpid() and self._path is not None:
            self._inherited.append(self._db)
            self._db = None
        if self._db is None:
            self._pid = os.getpid()
            self._db = self._opened()
        return self._db

    def _opened(self) -> Any:
        options: dict[str, Any] = {"timeout": BUSY_S, "isolation_level": None, "check_same_thread": False}
        if self._path is None:
            return _prepared(sqlite3.connect(":memory:", **options))
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._path.parent.is_symlink():
            raise NotADirectoryError(f"{self._path.parent} is a link")
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        if not stat.S_ISREG(os.lstat(self._path).st_mode):  # opening it would end locks of this process on it
            raise sqlite3.DatabaseError(f"{self._path} is no file")
        if all(os.access(path, os.W_OK) for path in (self._path, self._path.parent)):
            return _prepared(sqlite3.connect(self._path, **options))
        with tempfile.NamedTemporaryFile() as mine, open(self._path, "rb") as theirs:  # what we may only read
            shutil.copyfileobj(theirs, mine)
            mine.flush()
            copied = sqlite3.connect(mine.name, **options)
            copied.execute("PRAGMA journal_mode = MEMORY")
            return _prepared(copied)


Group = tuple[str, str, Sequence[int]]  # owner, fingerprint, tokens before the chunks


def _prepared(db: Any) -> Any:
    """Make the tables, or refuse a file that has others."""
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "synchronous = OFF", "journal_mode = TRUNCATE"):
        db.execute(f"PRAGMA {setting}")
    with db:  # others may be making the tables, and are not between the two
        db.execute("BEGIN")
        made = {row[0] for row in db.execute("SELECT sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%'")}
        (version,) = db.execute("PRAGMA user_version").fetchone()
    if not made and version == 0:
        with db:
            db.execute("BEGIN IMMEDIATE")  # another process may do the same
            if not db.execute("SELECT 1 FROM sqlite_schema").fetchone():
                for statement in _SCHEMA:
                    db.execute(statement)
                db.execute("INSERT INTO policy VALUES ('', 0)")
                db.execute(f"PRAGMA user_version = {_FORMAT}")
    elif made != {*_SCHEMA} or version != _FORMAT:
        db.close()
        raise sqlite3.DatabaseError(f"tables of form {version} are not those of form {_FORMAT}")
    return db


def _clear(path: Path) -> None:
    """Remove a file, or what is in its place, and what SQLite left beside it."""
    beside = path.with_name(f"{path.name}-journal")
    for file in () if path.parent.is_symlink() else (path, beside):
        with contextlib.suppress(OSError):
            os.unlink(file)
        with contextlib.suppress(OSError):
            os.rmdir(file)


def one_more(frequency: float, uses: float) -> float:
    """Add one use to a frequency, the log of a count of uses that halves with every 512 uses of the tier.

    It is kept as of the first use of the tier, so that the order of two objects changes only when one is used.
    """
    high, low = max(frequency, DECAY * uses), min(frequency, DECAY * uses)
    return high + math.log1p(math.exp(low - high))


def _digest(db: Any, prefix: str) -> str:
    """Digest the rows of a part, without what only the order of eviction depends on."""
    columns = "name || nbytes || '@' || created || ifnull(owner, '') || ifnull(chunk, '')"
    sql = f"SELECT group_concat({columns}, ',') FROM objects WHERE name >= ? AND name < ?"
    digest: str = db.execute(sql, (prefix, f"{prefix}g")).fetchone()[0] or ""
    return xxhash.xxh3_128_hexdigest(digest.encode())


def _positions_by_hash(ids: np.ndarray, width: int, at: np.ndarray) -> dict[str, list[int]]:
    """Positions by the hash of the `width` tokens there, for some positions of a prompt."""
    positions: dict[str, list[int]] = {}
    window_hashes = hashes(ids, width)
    for start in at[at < len(window_hashes)].tolist():
        positions.setdefault(_hex(window_hashes[start]), []).append(start)
    return positions


def _hex(number: Any) -> str:
    return f"{int(number):016x}"


def _recognised_by(ids: np.ndarray) -> list[Any]:
    """The columns that find a chunk: tokens, width and hash of its head; offset, hash and next ids of its window."""
    width, window = min(WINDOW, len(ids)), window_of(ids)
    row = [len(ids), width, _hex(hashes(ids[:width], width)[0])]
    if window is None:
        return [*row, None, None, None]
    offset, window_ids = window
    behind = ids[offset + WINDOW : offset + WINDOW + _NEXT_TOKENS]
    return [*row, offset, _hex(hashes(window_ids, WINDOW)[0]), behind.tobytes()]


def _key(row: Sequence[Any], namespace: str) -> ChunkKey | None:
    """The key of a row of fingerprint, prefix and ids, or None if they cannot be those of a chunk."""
    fingerprint, prefix, ids = row
    try:
        return ChunkKey(str(fingerprint), unpack_tokens(prefix), unpack_tokens(ids), namespace)
    except (ConfigError, TypeError, ValueError):
        return None
