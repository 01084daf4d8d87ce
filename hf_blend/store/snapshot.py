# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A copy of the index on disk, so that a large store opens fast. It may be lost, stale or damaged at no harm.

The truth is the directory of entries: a record is used only for an entry that is there, and the key made from it is
checked against the entry itself before any KV is used.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from .index import IndexRecord
from .tiers.base import EntryFault
from .tiers.files import open_regular, write_atomically

__all__ = ["load_order", "load_snapshot", "save_order", "save_snapshot"]

logger = logging.getLogger(__name__)

_FORMAT = "hf_blend.index/1"
_DIGEST_BYTES = 16
_MAX_BYTES = 4 << 30
_UNUSABLE = (OSError, EntryFault, SafetensorError, ValueError, KeyError)


def save_snapshot(path: Path, records: Sequence[tuple[str, IndexRecord]]) -> None:
    """Write the records; a failure is logged and costs only the next opening some time.

    Args:
        path: of the file; its directory is made if needed.
        records: digest and record of each entry.
    """
    groups = {group: place for place, group in enumerate(dict.fromkeys(map(_group, records)))}
    columns: dict[str, np.ndarray] = {
        "digests": np.frombuffer(bytes.fromhex("".join(digest for digest, _ in records)), np.uint8),
        "groups": np.array([groups[_group(row)] for row in records], np.int32),
        "lengths": np.array([len(record.packed) for _, record in records], np.int64),
        "nbytes": np.array([record.nbytes for _, record in records], np.int64),
        "created": np.array([record.created for _, record in records], np.float64),
        "packed": np.frombuffer(b"".join(record.packed for _, record in records), np.uint8),
        "about": np.frombuffer(json.dumps([_FORMAT, list(groups)]).encode(), np.uint8),
    }
    _save_columns(path, columns)


def load_snapshot(path: Path) -> dict[str, IndexRecord]:
    """Read the records back.

    Args:
        path: of the file.

    Returns:
        Records by digest; none if the file is missing or not exactly what was written.
    """
    try:
        return _parse(_read(path))
    except _UNUSABLE as error:
        logger.info("no usable index at %s (%s); reading the entries instead", path, error)
        return {}


def save_order(path: Path, states: Mapping[str, Sequence[float]]) -> None:
    """Write what an eviction policy remembers; a failure is logged and costs only a better choice of who leaves.

    Args:
        path: of the file; its directory is made if needed.
        states: name of the object → numbers, as many for each.
    """
    names = "".join(name.replace("/", "") for name in states)
    columns: dict[str, np.ndarray] = {
        "names": np.frombuffer(bytes.fromhex(names), np.uint8),
        "states": np.array(list(states.values()), np.float64),
    }
    _save_columns(path, columns)


def load_order(path: Path) -> dict[str, tuple[float, ...]]:
    """Read it back.

    Args:
        path: of the file.

    Returns:
        Numbers by name of the object; none if the file is missing or not exactly what was written.
    """
    try:
        columns = load(_read(path))
        names, states = columns["names"].tobytes().hex(), columns["states"].tolist()
    except _UNUSABLE as error:
        logger.info("no usable order at %s (%s)", path, error)
        return {}
    rows = (names[68 * place : 68 * place + 68] for place in range(len(states)))
    return {f"{row[:2]}/{row[2:4]}/{row[4:]}": tuple(state) for row, state in zip(rows, states, strict=True)}


def _save_columns(path: Path, columns: dict[str, np.ndarray]) -> None:
    body = save(columns)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(path, [xxhash.xxh3_128_digest(body), body], durable=False)
    except OSError as error:
        logger.info("the index at %s could not be saved (%s); the next opening reads the entries", path, error)


def _group(row: tuple[str, IndexRecord]) -> tuple[str, tuple[int, ...]]:
    return row[1].fingerprint, row[1].sink_ids


def _read(path: Path) -> bytes:
    source = open_regular(path)
    try:
        if not _DIGEST_BYTES < source.stat.nbytes <= _MAX_BYTES:
            raise ValueError(f"{source.stat.nbytes} bytes")
        content = bytearray(source.stat.nbytes)
        source.read_into(0, memoryview(content))
    finally:
        source.close()
    if xxhash.xxh3_128_digest(memoryview(content)[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
        raise ValueError(f"the digest of its {source.stat.nbytes} bytes does not match")
    return bytes(memoryview(content)[_DIGEST_BYTES:])


def _parse(body: bytes) -> dict[str, IndexRecord]:
    columns = load(body)
    form, groups = json.loads(columns["about"].tobytes())
    if form != _FORMAT:
        raise ValueError(f"format {form!r}")
    groups = [(fingerprint, tuple(sink_ids)) for fingerprint, sink_ids in groups]
    digests, packed = columns["digests"].tobytes().hex(), columns["packed"].tobytes()
    stops = np.cumsum(columns["lengths"]).tolist()
    rows = zip([0, *stops], stops, *(columns[name].tolist() for name in ("groups", "nbytes", "created")), strict=False)
    return {
        digests[64 * place : 64 * place + 64]: IndexRecord(
            groups[group][0], groups[group][1], packed[start:stop], nbytes, created
        )
        for place, (start, stop, group, nbytes, created) in enumerate(rows)
    }
