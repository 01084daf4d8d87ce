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
        damage = _bit if draw.random() < 0.5 else draw.choice(BYTES)
        bad = damage(draw, good, other)
        if bad != good:
            return damage.__name__, bad


def header_of(content: bytes) -> bytes:
    """The JSON at the beginning of a safetensors file."""
    return content[8 : 8 + int.from_bytes(content[:8], "little")]


def body_of(content: bytes) -> bytes:
    """What follows it."""
    return content[8 + len(header_of(content)) :]


def tensors_of(content: bytes) -> dict[str, tuple[int, int]]:
    """Where each tensor of a safetensors file lies in it: first byte and the one behind the last."""
    header = header_of(content)
    start = 8 + len(header)
    places = {}
    for name, row in json.loads(header).items():
        if name != "__metadata__":
            first, last = row["data_offsets"]
            places[name] = (start + first, start + last)
    return places


def _bit(draw: random.Random, good: bytes, _: bytes) -> bytes:
    bad = bytearray(good)
    bit = draw.randrange(len(good) * 8)
    bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


def _noise(draw: random.Random, good: bytes, _: bytes) -> bytes:
    start = draw.randrange(len(good))
    length = draw.choice((1, 8, 64, 512, 4096, 65536))
    noise = draw.randbytes(length)
    return (good[:start] + noise + good[start + length :])[: len(good)]


def _zeros(draw: random.Random, good: bytes, _: bytes) -> bytes:
    start = draw.randrange(len(good))
    length = draw.choice((1, 8, 64, 512, 4096, 65536))
    return (good[:start] + bytes(length) + good[start + length :])[: len(good)]


def _page_moved(draw: random.Random, good: bytes, _: bytes) -> bytes:
    """A page stands where another was."""
    pages = max(1, len(good) // PAGE)
    here = draw.randrange(pages) * PAGE
    there = draw.randrange(pages) * PAGE
    page = good[there : there + PAGE]
    return (good[:here] + page + good[here + PAGE :])[: len(good)]


def _page_of_other(draw: random.Random, good: bytes, other: bytes) -> bytes:
    here = draw.randrange(max(1, len(good) // PAGE)) * PAGE
    page = other[here : here + PAGE]
    return (good[:here] + page + good[here + PAGE :])[: len(good)]


def _byte_more(draw: random.Random, good: bytes, _: bytes) -> bytes:
    here = draw.randrange(len(good))
    return good[:here] + draw.randbytes(1) + good[here:-1]


def _byte_less(draw: random.Random, good: bytes, _: bytes) -> bytes:
    here = draw.randrange(len(good))
    return good[:here] + good[here + 1 :]


def _cut(draw: random.Random, good: bytes, _: bytes) -> bytes:
    here = draw.randrange(len(good))
    return good[:here]


def _empty(draw: random.Random, good: bytes, _: bytes) -> bytes:
    return b""


def _zero_tail(draw: random.Random, good: bytes, _: bytes) -> bytes:
    here = draw.randrange(len(good))
    return good[:here] + bytes(len(good) - here)


def _torn(draw: random.Random, good: bytes, other: bytes) -> bytes:
    here = draw.randrange(len(good))
    return good[:here] + other[here:]


def _longer(draw: random.Random, good: bytes, _: bytes) -> bytes:
    return good + draw.randbytes(draw.randint(1, 5000))


def _other_entry(draw: random.Random, good: bytes, other: bytes) -> bytes:
    return other


def _body_of_other(draw: random.Random, good: bytes, other: bytes) -> bytes:
    head = len(good) - len(body_of(good))
    return good[:head] + body_of(other)


def _tensors_swapped(draw: random.Random, good: bytes, _: bytes) -> bytes:
    """Two tensors of one size changed places, such as K and V, or two layers; not in a file of blocks."""
    if good[8:9] != b"{":
        return good
    places = list(tensors_of(good).values())
    (start, stop), (later_start, later_stop) = sorted(draw.sample(places, 2))
    one = good[start:stop]
    later = good[later_start:later_stop]
    if len(one) != len(later):
        return good
    return good[:start] + later + good[stop:later_start] + one + good[later_stop:]


BYTES: tuple[Damage, ...] = (
    _bit, _noise, _zeros, _page_moved, _page_of_other, _cut, _empty, _zero_tail, _longer, _byte_more, _byte_less,
    _torn, _other_entry, _body_of_other, _tensors_swapped,
)  # fmt: skip


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
