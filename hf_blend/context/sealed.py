# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Files of sessions and checkpoints: a magic line, a seal over all that follows, and that: a safetensors image.

Nothing in a file is parsed before all of it was read and compared with its seal.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor

from ..store.seal import check_seal, seal, seal_size
from ..store.tiers.base import EntryFault, as_fault
from ..store.tiers.files import open_regular, write_atomically

__all__ = ["Sealed", "read_sealed", "sealed", "write_sealed"]


class Sealed:
    """What a file holds, after its seal was compared with it.

    Attributes:
        about: the texts that were written beside the tensors.
    """

    def __init__(self, image: bytes) -> None:
        self._image = image
        with as_fault("its header"):
            header = json.loads(image[8 : 8 + int.from_bytes(image[:8], "little")])
            self.about = {name: str(value) for name, value in header["__metadata__"].items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors, by name, on the CPU.

        Raises:
            EntryFault: format, they cannot be read.
        """
        with as_fault("its content"):
            return load(self._image)


def sealed(
    magic: bytes, tensors: Mapping[str, Tensor], about: Mapping[str, str], secret: bytes | None
) -> tuple[bytes, bytes, bytes]:
    """Make the content of a file.

    Args:
        magic: the line that says what kind of file it is.
        tensors: what it holds, by name.
        about: texts beside them.
        secret: signs it; None seals it against damage only.

    Returns:
        The content, in parts.
    """
    image = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, dict(about))
    return magic, seal(secret, magic, image), image


def write_sealed(path: Path, parts: tuple[bytes, ...]) -> int:
    """Write what `sealed` made; a file of that name is replaced at once, or stays as it is if writing fails.

    Returns:
        The size of the file in bytes.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, parts, durable=True)
    return sum(map(len, parts))


def read_sealed(path: Path, magic: bytes, secret: bytes | None) -> Sealed:
    """Read a file and compare every byte with its seal.

    Args:
        path: of the file.
        magic: as in `sealed`.
        secret: that it must be sealed with.

    Raises:
        OSError: it cannot be read.
        EntryFault: foreign, it is no regular file; format, auth or secret, it is not what was written.
    """
    source = open_regular(path)
    try:
        content = bytearray(source.stat.nbytes)
        source.read_into(0, memoryview(content))
    finally:
        source.close()
    if not content.startswith(magic):
        raise EntryFault("format", f"it begins with {bytes(content[: len(magic)])!r}, expected {magic!r}")
    start = len(magic) + seal_size(secret)
    image = bytes(memoryview(content)[start:])
    check_seal(bytes(content[len(magic) : start]), secret, magic, image)
    return Sealed(image)
