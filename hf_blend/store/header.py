# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The header of a stored chunk: what the file holds, and the digests that bind it to its key.

An entry is a safetensors file, so any safetensors reader opens it. Its header has one canonical form: a header is
accepted only if it is, byte for byte, what we would have written for what it says. Renamed, reordered, repeated or
padded content cannot pass, and `manifest` (sha256) keeps a changed digit from being a different valid header.
"""

import hashlib
import hmac
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..errors import StoreError
from .tiers.base import EntryFault

__all__ = ["DTYPES", "HEADER_CAP_BYTES", "Header", "TensorPlan", "hash_namespace"]

FORMAT = "hf_blend.chunk/1"
PROVENANCE = "isolated"  # computed from the chunk alone; KV cut out of a live request has no way into the store
HEADER_CAP_BYTES = 1 << 20
KNOWN_HEADERS = 256  # parsed ones that are kept: the same bytes say the same
_SIGNED = "hmac-sha256:"
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
_MALFORMED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, StoreError)


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
    """What an entry says about itself.

    Attributes:
        key: digest of the chunk's key, which is also the name of the file.
        fingerprint: of the model.
        namespace: sha256 of the namespace, so that its text is nowhere on disk.
        codec: how the tensors are packed; "raw" is as computed.
        layer_table: see `ChunkKV`.
        tensors: in file order, without gaps.
    """

    key: str
    fingerprint: str
    namespace: str
    codec: str
    layer_table: tuple[int, ...]
    tensors: tuple[TensorPlan, ...]

    def encode(self, secret: bytes | None = None) -> bytes:
        """The only form of this header: length and JSON, padded so that the data begins at a multiple of 64 bytes.

        Args:
            secret: signs the manifest (HMAC-SHA256).

        Returns:
            The bytes.

        Raises:
            StoreError: it would be too large to be read back.
        """
        rows: dict[str, object] = {"__metadata__": self._metadata(secret)}
        start = 0
        for plan in self.tensors:
            stop = start + plan.nbytes
            rows[plan.name] = {"dtype": plan.dtype, "shape": plan.shape, "data_offsets": [start, stop]}
            start = stop
        text = _compact(rows).encode()
        text += b" " * (-(8 + len(text)) % 64)
        if len(text) > HEADER_CAP_BYTES:
            raise StoreError(
                f"the header of chunk {self.key} takes {len(text)} bytes, at most {HEADER_CAP_BYTES} are read back: "
                f"{len(self.tensors)} tensors are too many for one entry."
            )
        return len(text).to_bytes(8, "little") + text

    @classmethod
    @lru_cache(maxsize=KNOWN_HEADERS)
    def decode(cls, raw: bytes, secret: bytes | None = None) -> "Header":
        """Read a header.

        Args:
            raw: length and JSON, as in the file.
            secret: that it must be signed with; None accepts only a header that is not signed.

        Returns:
            The header.

        Raises:
            EntryFault: format, unless `raw` is exactly the canonical form of a header; auth, if it is signed and
                should not be, or the other way round, or with another secret.
        """
        try:
            rows = json.loads(raw[8:])
            header, signed = cls._from_rows(rows), rows["__metadata__"]["manifest"].startswith(_SIGNED)
            canonical = header.encode(secret)
        except _MALFORMED as error:
            raise EntryFault("format", f"unreadable header ({type(error).__name__})") from None
        if signed != (secret is not None):
            wanted = "signed" if secret else "unsigned"
            raise EntryFault("auth", f"the entry is {'' if signed else 'not '}signed, wanted {wanted}", corrupt=False)
        if not hmac.compare_digest(canonical, raw):
            raise EntryFault("auth" if secret else "format", "the header is not what its content says")
        return header

    @staticmethod
    def peek(raw: bytes) -> tuple[str, str, str, int, int]:
        """Read only what says which chunk an entry holds; what it says is still to be proved by its digest.

        Args:
            raw: length and JSON, as in the file.

        Returns:
            Digest of the key, fingerprint, hashed namespace, number of token ids and of sink ids; the ids follow the
            header in this order.

        Raises:
            EntryFault: format.
        """
        try:
            rows = json.loads(raw[8:])
            named = [str(rows["__metadata__"][name]) for name in ("key", "fingerprint", "namespace")]
            counts = [_checked_size(rows[name]["shape"][0]) for name in ("token_ids", "sink_ids")]
        except _MALFORMED as error:
            raise EntryFault("format", f"unreadable header ({type(error).__name__})") from None
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
        key, fingerprint, namespace, codec = (metadata[name] for name in ("key", "fingerprint", "namespace", "codec"))
        return cls(key, fingerprint, namespace, codec, layer_table, tensors)

    def _metadata(self, secret: bytes | None) -> dict[str, str]:
        fields = {
            "format": FORMAT,
            "provenance": PROVENANCE,
            "key": self.key,
            "fingerprint": self.fingerprint,
            "namespace": self.namespace,
            "codec": self.codec,
            "layer_table": _compact(self.layer_table),
            "digests": _compact([plan.digest for plan in self.tensors]),
        }
        listed = [fields, [(plan.name, plan.dtype, plan.shape, plan.digest) for plan in self.tensors]]
        return {**fields, "manifest": _manifest(_compact(listed).encode(), secret)}


def _manifest(listed: bytes, secret: bytes | None) -> str:
    if secret is None:
        return "sha256:" + hashlib.sha256(listed).hexdigest()
    return _SIGNED + hmac.new(secret, listed, hashlib.sha256).hexdigest()


def hash_namespace(namespace: str) -> str:
    """Name a namespace without its text.

    Args:
        namespace: any text.

    Returns:
        64 hex digits.
    """
    return hashlib.sha256(b"hf_blend.namespace/1\0" + namespace.encode("utf-8", "surrogatepass")).hexdigest()


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _checked_size(size: object) -> int:
    if type(size) is not int or not 0 <= size < 1 << 40:
        raise ValueError(size)
    return size
