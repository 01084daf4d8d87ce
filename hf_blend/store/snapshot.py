# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A copy of the index on disk, so that a large store opens fast. It may be lost, stale, damaged or forged at no harm.

The truth is the directory of entries: a record is used only for an entry that is there, and the key made from it is
checked against the entry itself before any KV is used. Any content of these files is read or passed over, never an
error: a seal over the raw bytes comes before parsing, and what was parsed must have the form of records.
"""

import json
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from .index import IndexRecord
from .seal import check_seal, seal, seal_size
from .tiers.base import EntryFault, as_fault
from .tiers.files import open_regular, write_atomically

__all__ = ["load_order", "load_snapshot", "save_order", "save_snapshot"]

logger = logging.getLogger(__name__)

_FORMAT = "hf_blend.index/2"
_ORDER = struct.Struct("<16sQQ")  # format, objects, numbers of each
_ORDER_FORMAT = b"hf_blend.order/2"
_NAME_BYTES = 34  # the hex digits of a name
_MAX_BYTES = 4 << 30
_COLUMNS = {
    "digests": np.uint8,
    "groups": np.int32,
    "lengths": np.int64,
    "nbytes": np.int64,
    "created": np.float64,
    "packed": np.uint8,
    "about": np.uint8,
}
OnFault = Callable[[str], None]


def save_snapshot(path: Path, records: Sequence[tuple[str, IndexRecord]], secret: bytes | None = None) -> None:
    """Write the records; a failure is logged and costs only the next opening some time."""
    groups = {group: number for number, group in enumerate(dict.fromkeys(map(_group, records)))}
    content = {
        "digests": np.frombuffer(bytes.fromhex("".join(digest for digest, _ in records)), np.uint8),
        "groups": np.array([groups[_group(row)] for row in records]),
        "lengths": np.array([len(record.packed) for _, record in records]),
        "nbytes": np.array([record.nbytes for _, record in records]),
        "created": np.array([record.created for _, record in records]),
        "packed": np.frombuffer(b"".join(record.packed for _, record in records), np.uint8),
        "about": np.frombuffer(json.dumps([_FORMAT, list(groups)]).encode(), np.uint8),
    }
    _save(path, save({name: content[name].astype(dtype) for name, dtype in _COLUMNS.items()}), secret)


def load_snapshot(path: Path, secret: bytes | None = None, on_fault: OnFault | None = None) -> dict[str, IndexRecord]:
    """Read the records back."""
    try:
        body = _read(path, secret)
        with as_fault("the index"):
            return _parse(body)
    except (OSError, EntryFault, MemoryError) as error:
        _passed_over("index", path, error, on_fault)
        return {}


def save_order(path: Path, states: Mapping[str, Sequence[float]]) -> None:
    """Write what an eviction policy remembers; a failure is logged and costs only a better choice of who leaves."""
    names = bytes.fromhex("".join(name.replace("/", "") for name in states))
    numbers = np.array(list(states.values()), "<f8")
    width = numbers.shape[1] if states else 0
    _save(path, _ORDER.pack(_ORDER_FORMAT, len(states), width) + names + numbers.tobytes())


def load_order(path: Path, on_fault: OnFault | None = None) -> dict[str, tuple[float, ...]]:
    """Read it back. The file is shared by all namespaces and secrets of a folder, so it proves nothing."""
    try:
        body = _read(path)
        with as_fault("the order"):
            return _parse_order(body)
    except (OSError, EntryFault, MemoryError) as error:
        _passed_over("order", path, error, on_fault)
        return {}


def _save(path: Path, body: bytes, secret: bytes | None = None) -> None:
    try:
        if path.parent.is_symlink():
            raise NotADirectoryError(f"{path.parent} is a link")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, [seal(secret, body), body], durable=False)
    except OSError as error:
        logger.info("%s could not be saved (%s); the next opening reads the entries", path, error)


def _passed_over(kind: str, path: Path, error: Exception, on_fault: OnFault | None) -> None:
    logger.info("no usable %s at %s (%s)", kind, path, error)
    if on_fault is not None and not isinstance(error, FileNotFoundError | NotADirectoryError):
        on_fault(f"{kind}:{error.reason if isinstance(error, EntryFault) else 'io'}")


def _group(row: tuple[str, IndexRecord]) -> tuple[str, tuple[int, ...]]:
    return row[1].fingerprint, row[1].chunk_prefix_ids


def _read(path: Path, secret: bytes | None = None) -> bytes:
    """What a file holds behind its seal."""
    source, start = open_regular(path), seal_size(secret)
    try:
        if not start <= source.stat.nbytes <= _MAX_BYTES:
            raise EntryFault("format", f"{source.stat.nbytes} bytes")
        content = bytearray(source.stat.nbytes)
        source.read_into(0, memoryview(content))
    finally:
        source.close()
    found, body = bytes(content[:start]), bytes(memoryview(content)[start:])
    check_seal(found, secret, body)
    return body


def _parse(body: bytes) -> dict[str, IndexRecord]:
    columns = load(body)
    if any(columns[name].dtype != dtype or columns[name].ndim != 1 for name, dtype in _COLUMNS.items()):
        raise EntryFault("format", f"columns {sorted(columns)!r:.80}, one of them of another type")
    form, rows = json.loads(columns["about"].tobytes())
    if form != _FORMAT:
        raise EntryFault("format", f"format {form!r:.40}")
    groups = [_checked_group(*row) for row in rows]
    digests, packed = columns["digests"].tobytes().hex(), columns["packed"].tobytes()
    names = ("groups", "lengths", "nbytes", "created")
    numbers, lengths, sizes, created = (columns[name].tolist() for name in names)
    stops = np.cumsum(columns["lengths"]).tolist()
    fits = len(digests) == 64 * len(stops) and sum(lengths) == len(packed)
    if not fits or any(size <= 0 or size % 4 for size in lengths) or not _are_sizes(numbers, sizes):
        raise EntryFault("format", f"the columns of {len(stops)} records do not fit together")
    if not np.isfinite(columns["created"]).all() or (np.frombuffer(packed, "<i4") < 0).any():
        raise EntryFault("format", f"{len(stops)} records with a time or a token that cannot be")
    records = zip([0, *stops], stops, numbers, sizes, created, strict=False)
    return {
        digests[64 * row : 64 * row + 64]: IndexRecord(
            groups[number][0], groups[number][1], packed[start:stop], nbytes, stamp
        )
        for row, (start, stop, number, nbytes, stamp) in enumerate(records)
    }


def _checked_group(fingerprint: object, chunk_prefix_ids: object) -> tuple[str, tuple[int, ...]]:
    is_list = isinstance(chunk_prefix_ids, list) and all(
        type(one) is int and 0 <= one < 1 << 31 for one in chunk_prefix_ids
    )
    if not isinstance(fingerprint, str) or not is_list:
        raise EntryFault(
            "format", f"{fingerprint!r:.40} with {chunk_prefix_ids!r:.40}, expected a fingerprint and token ids"
        )
    return fingerprint, tuple(chunk_prefix_ids)  # type: ignore[arg-type]


def _are_sizes(*columns: list[int]) -> bool:
    return all(min(column, default=0) >= 0 for column in columns)


def _parse_order(body: bytes) -> dict[str, tuple[float, ...]]:
    form, count, width = _ORDER.unpack_from(body)
    if form != _ORDER_FORMAT or len(body) != _ORDER.size + count * (_NAME_BYTES + 8 * width):
        raise EntryFault("format", f"{len(body)} bytes are not what {form!r} says")
    names = body[_ORDER.size : _ORDER.size + _NAME_BYTES * count].hex()
    states = np.frombuffer(body, "<f8", count * width, _ORDER.size + _NAME_BYTES * count).reshape(count, width)
    rows = (names[68 * number : 68 * number + 68] for number in range(count))
    return {
        f"{row[:2]}/{row[2:4]}/{row[4:]}": tuple(state)
        for row, state, good in zip(rows, states.tolist(), np.isfinite(states).all(axis=1), strict=True)
        if good
    }
