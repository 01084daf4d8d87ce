# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What can happen to the bytes of a file, each place in it as likely as any other, and to the file itself."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[random.Random, bytes, bytes], bytes]
PAGE = 512


def damaged(draw: random.Random, good: bytes, other: bytes) -> tuple[str, bytes]:
    """Damage bytes in a way that is drawn; half of the time one bit."""
    while True:
        kind = "bit" if draw.random() < 0.5 else draw.choice(list(BYTES))
        bad = BYTES[kind](draw, good, other)
        if bad != good:
            return kind, bad


def header_of(content: bytes) -> bytes:
    """The JSON at the beginning of a safetensors file."""
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


def body_of(content: bytes) -> bytes:
    """What follows it."""
    return content[8 + int.from_bytes(content[:8], "little") :]


def tensors_of(content: bytes) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file lies in it: first byte and the one behind the last."""
    start = 8 + len(header_of(content))
    rows = json.loads(header_of(content))
    places = {name: row["data_offsets"] for name, row in rows.items() if name != "__metadata__"}
    return {name: (start + first, start + last) for name, (first, last) in places.items()}


def _bit(draw: random.Random, good: bytes, _: bytes) -> bytes:
    bad = bytearray(good)
    bit = draw.randrange(len(good) * 8)
    bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


def _bits(draw: random.Random, good: bytes, other: bytes) -> bytes:
    for _ in range(draw.randint(2, 8)):
        good = _bit(draw, good, other)
    return good


def _stretch(draw: random.Random, good: bytes, filling: Callable[[int], bytes]) -> bytes:
    start = draw.randrange(len(good))
    stop = min(len(good), start + draw.choice((1, 8, 64, 512, 4096, 65536)))
    return good[:start] + filling(stop - start) + good[stop:]


def _page(draw: random.Random, good: bytes, source: bytes, there: int | None = None) -> bytes:
    """A page of `source`, that of the same place or of another."""
    here = draw.randrange(max(1, len(good) // PAGE)) * PAGE
    there = here if there is None else there
    return (good[:here] + source[there : there + PAGE] + good[here + PAGE :])[: len(good)]


def _shifted(draw: random.Random, good: bytes, _: bytes) -> bytes:
    here = draw.randrange(len(good))
    return good[:here] + draw.randbytes(1) + good[here:-1] if draw.random() < 0.5 else good[:here] + good[here + 1 :]


def _from(draw: random.Random, good: bytes, tail: Callable[[int], bytes]) -> bytes:
    """The bytes up to a place that is drawn, and others behind it."""
    here = draw.randrange(len(good))
    return good[:here] + tail(here)


def _tensors_swapped(draw: random.Random, good: bytes, _: bytes) -> bytes:
    """Two tensors of one size changed places, such as K and V, or two layers; not in a file of blocks."""
    if good[8:9] != b"{":
        return good
    places = list(tensors_of(good).values())
    one, two = sorted(draw.sample(places, 2))
    if one[1] - one[0] != two[1] - two[0]:
        return good
    return good[: one[0]] + good[slice(*two)] + good[one[1] : two[0]] + good[slice(*one)] + good[two[1] :]


BYTES: dict[str, Damage] = {
    "bit": _bit,
    "bits": _bits,
    "noise": lambda draw, good, _: _stretch(draw, good, draw.randbytes),
    "zeros": lambda draw, good, _: _stretch(draw, good, bytes),
    "page moved": lambda draw, good, _: _page(draw, good, good, draw.randrange(max(1, len(good) // PAGE)) * PAGE),
    "page of another": lambda draw, good, other: _page(draw, good, other),
    "cut": lambda draw, good, _: _from(draw, good, lambda here: b""),
    "empty": lambda draw, good, _: b"",
    "zero tail": lambda draw, good, _: _from(draw, good, lambda here: bytes(len(good) - here)),
    "longer": lambda draw, good, _: good + draw.choice((bytes, draw.randbytes))(draw.randint(1, 5000)),
    "shifted": _shifted,
    "torn": lambda draw, good, other: _from(draw, good, lambda here: other[here:]),
    "another entry": lambda draw, good, other: other,
    "body of another": lambda draw, good, other: good[: len(good) - len(body_of(good))] + body_of(other),
    "tensors swapped": _tensors_swapped,
}


def clear(path: Path) -> None:
    """Remove whatever stands at a path."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


NODES: dict[str, Callable[[Path, Path], None]] = {  # each is given a path where nothing stands, and another entry
    "gone": lambda path, other: None,
    "directory": lambda path, other: path.mkdir(),
    "link to another": lambda path, other: path.symlink_to(other),
    "link to nothing": lambda path, other: path.symlink_to("nothing"),
    "link to itself": lambda path, other: path.symlink_to(path),
    "hard link to another": lambda path, other: os.link(other, path),
    "fifo": lambda path, other: os.mkfifo(path),
}
