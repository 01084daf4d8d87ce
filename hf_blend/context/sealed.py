# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files of sessions and checkpoints: a magic line, a seal over all that follows, and that: a safetensors image.

Nothing in a file is parsed before all of it was read and compared with its seal. How much is read is found before: a
file is as long as its header says that its tensors are, and no longer than its reader expects.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from ..store.seal import check_seal, seal, seal_size
from ..store.tiers.base import EntryFault, as_fault
from ..store.tiers.files import FileSource, open_regular, write_atomically

__all__ = ["Sealed", "read_sealed", "sealed", "write_sealed"]

MOST_HEADER_BYTES = 1 << 24
_END = re.compile(rb'"data_offsets":\[[0-9]{1,19},([0-9]{1,19})\]')  # of a tensor, as safetensors writes it


class Sealed:
    """What a file holds, after its seal was compared with it."""

    def __init__(self, image: bytes) -> None:
        self._image = image
        with as_fault("its header"):
            header = json.loads(image[8 : 8 + int.from_bytes(image[:8], "little")])
            self.about = {name: str(value) for name, value in header["__metadata__"].items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name, on the CPU."""
        with as_fault("its content"):
            return load(self._image)


def sealed(
    magic: bytes, tensors: Mapping[str, Tensor], about: Mapping[str, str], secret: bytes | None
) -> tuple[bytes, bytes, bytes]:
    """Make the content of a file."""
    image = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, dict(about))
    return magic, seal(secret, magic, image), image


def write_sealed(path: Path, parts: tuple[bytes, ...]) -> int:
    """Write what `sealed` made; a file of that name is replaced at once, or stays as it is if writing fails."""
    write_atomically(path, parts, durable=True)
    return sum(map(len, parts))


def read_sealed(path: Path, magic: bytes, secret: bytes | None, most_bytes: int | None = None) -> Sealed:
    """Read a file and compare every byte with its seal."""
    source = open_regular(path)
    try:
        begins = _read(source, 0, len(magic))
        if begins != magic:
            raise EntryFault("format", f"it begins with {begins!r}, expected {magic!r}")
        found = _read(source, len(magic), seal_size(secret))
        image = _image(source, len(magic) + len(found), most_bytes)
    except MemoryError as error:
        raise EntryFault("format", f"its {source.stat.nbytes} bytes are larger than the memory") from error
    finally:
        source.close()
    check_seal(found, secret, magic, image)
    return Sealed(image)


def _image(source: FileSource, start: int, most_bytes: int | None) -> bytes:
    """The safetensors image from `start` on, if it is as long as its own header says."""
    held = source.stat.nbytes - start
    size = int.from_bytes(_read(source, start, 8), "little")
    if size > min(held - 8, MOST_HEADER_BYTES):
        raise EntryFault("format", f"its header is to have {size} bytes of {held}")
    ends = _END.findall(_read(source, start + 8, size))
    needed = 8 + size + max(map(int, ends), default=0)
    if held != needed:
        raise EntryFault("truncated" if held < needed else "format", f"it has {held} bytes of tensors, not {needed}")
    if most_bytes is not None and held > 8 + size + most_bytes:
        raise EntryFault("layout", f"its tensors take {held} bytes, expected at most {most_bytes}")
    return _read(source, start, held)


def _read(source: FileSource, start: int, nbytes: int) -> bytes:
    content = bytearray(nbytes)
    source.read_into(start, memoryview(content))
    return bytes(content)
