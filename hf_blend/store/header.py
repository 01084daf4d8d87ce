# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The header of a stored chunk: what the file holds, and the digests that bind it to its key.

An entry is a safetensors file, so any safetensors reader opens it. Its header begins with the format and a seal, at a
fixed place, over all other bytes of the header: the seal is compared before anything is parsed. Then the header must
be, byte for byte, what we would have written for what it says, so that renamed, reordered, repeated or padded content
cannot pass.
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..errors import StoreError
from .seal import check_seal, seal, seal_size
from .tiers.base import EntryFault, as_fault

__all__ = ["DTYPES", "HEADER_CAP_BYTES", "Header", "TensorPlan", "hash_namespace"]

FORMAT = "hf_blend.chunk/2"
PROVENANCE = "isolated"  # computed from the chunk alone; KV cut out of a live request has no way into the store
HEADER_CAP_BYTES = 1 << 20
KNOWN_HEADERS = 256  # parsed ones that are kept: the same bytes say the same
_OPENING = b'{"__metadata__":{'
_BEGIN = _OPENING + f'"format":"{FORMAT}","seal":"'.encode()
_SEAL_AT = 8 + len(_BEGIN)
_TEXTS = ("key", "fingerprint", "namespace", "codec", "canary")  # fields of `Header` that are stored as they are
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of an entry: its safetensors dtype, its shape and the xxh3-128 of its bytes in hex."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @cached_property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Header:
    """What an entry says about itself."""

    key: str
    fingerprint: str
    namespace: str
    codec: str
    layer_table: tuple[int, ...]
    tensors: tuple[TensorPlan, ...]
    canary: str = ""
    tokenizer: str = ""

    def encode(self, secret: bytes | None = None) -> bytes:
        """The only form of this header: length and JSON, padded so that the data begins at a multiple of 64 bytes."""
        rows: dict[str, object] = {"__metadata__": self._metadata()}
        start = 0
        for plan in self.tensors:
            stop = start + plan.nbytes
            rows[plan.name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": [start, stop]}
            start = stop
        rest = b'",' + _compact(rows).encode()[len(_OPENING) :]
        size = len(_BEGIN) + seal_size(secret) + len(rest)
        rest += b" " * (-(8 + size) % 64)
        size += -(8 + size) % 64
        if size > HEADER_CAP_BYTES:
            raise StoreError(
                f"the header of chunk {self.key} takes {size} bytes, at most {HEADER_CAP_BYTES} are read back: "
                f"{len(self.tensors)} tensors are too many for one entry."
            )
        begin = size.to_bytes(8, "little") + _BEGIN
        return begin + seal(secret, begin, rest) + rest

    @classmethod
    @lru_cache(maxsize=KNOWN_HEADERS)
    def decode(cls, raw: bytes, secret: bytes | None = None) -> "Header":
        """Read a header."""
        _check_sealed(raw, secret)
        with as_fault("the header"):
            header = cls._from_rows(json.loads(raw[8:]))
            canonical = header.encode(secret)
        if canonical != raw:
            raise EntryFault("format", f"the header of {len(raw)} bytes is not what its content says")
        return header

    @staticmethod
    def peek(raw: bytes, secret: bytes | None = None) -> tuple[str, str, str, int, int]:
        """Read only what says which chunk an entry holds; what it says is still to be proved by its digest."""
        _check_sealed(raw, secret)
        with as_fault("the header"):
            rows = json.loads(raw[8:])
            named = [_checked_text(rows["__metadata__"][name]) for name in ("key", "fingerprint", "namespace")]
            counts = [_checked_size(rows[name]["shape"][0]) for name in ("token_ids", "chunk_prefix_ids")]
        return named[0], named[1], named[2], counts[0], counts[1]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(plan.nbytes for plan in self.tensors)

    @classmethod
    def _from_rows(cls, rows: dict[str, dict]) -> "Header":
        metadata = rows["__metadata__"]
        digests = json.loads(metadata["digests"])
        tensors = tuple(
            TensorPlan(name, row["dtype"], tuple(map(_checked_size, row["shape"])), digest)
            for (name, row), digest in zip(list(rows.items())[1:], digests, strict=True)
        )
        layer_table = tuple(map(int, json.loads(metadata["layer_table"])))
        texts = {name: _checked_text(metadata[name]) for name in _TEXTS}
        tokenizer = _checked_text(metadata.get("tokenizer", ""))
        return cls(**texts, layer_table=layer_table, tensors=tensors, tokenizer=tokenizer)

    def _metadata(self) -> dict[str, str]:
        return {
            "provenance": PROVENANCE,
            **{name: getattr(self, name) for name in _TEXTS},
            "layer_table": _compact(self.layer_table),
            "digests": _compact([plan.digest for plan in self.tensors]),
            **({"tokenizer": self.tokenizer} if self.tokenizer else {}),
        }


def _check_sealed(raw: bytes, secret: bytes | None) -> None:
    """Compare the seal of a header, which is at a fixed place, with all other bytes of the header."""
    if raw[8:_SEAL_AT] != _BEGIN:
        raise EntryFault("format", f"the entry does not begin as one of {FORMAT}: {raw[8:48]!r}")
    stop = _SEAL_AT + seal_size(secret)
    check_seal(raw[_SEAL_AT:stop], secret, raw[:_SEAL_AT], raw[stop:])


@lru_cache(maxsize=64)
def hash_namespace(namespace: str) -> str:
    """Name a namespace without its text."""
    return hashlib.sha256(b"hf_blend.namespace/1\0" + namespace.encode("utf-8", "surrogatepass")).hexdigest()


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checked_size(size: object) -> int:
    if type(size) is not int or not 0 <= size < 1 << 40:
        raise ValueError(size)
    return size


def _checked_text(text: object) -> str:
    if not isinstance(text, str):
        raise ValueError(text)
    return text
