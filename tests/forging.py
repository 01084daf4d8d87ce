# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Writes entries of any kind by the description of the format alone, sealed and digested as they should be.

It shares no code with what it is used to check.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
    torch.int8: "I8", torch.float64: "F64", torch.uint8: "U8",
}  # fmt: skip


def forged(kind: str, about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """An unsigned entry: a header with the digest of each tensor, and their bytes."""
    parts = [one.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors.values()]
    texts = {**about, "digests": compact([xxhash.xxh3_128_hexdigest(part) for part in parts])}
    rows, start = {}, 0
    for (name, tensor), part in zip(tensors.items(), parts, strict=True):
        offsets = [start, start + len(part)]
        rows[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        start += len(part)
    rest = '",' + compact(texts)[1:] + "".join(f",{compact(name)}:{compact(row)}" for name, row in rows.items()) + "}"
    return sealed_header(kind, rest.encode()) + b"".join(parts)


def sealed_header(kind: str, rest: bytes) -> bytes:
    """Length, kind and seal in front of the rest of a header, whatever it is."""
    begin = b'{"__metadata__":{"format":"' + kind.encode() + b'","seal":"'
    rest += b" " * (-(8 + len(begin) + 71 + len(rest)) % 64)
    start = (len(begin) + 71 + len(rest)).to_bytes(8, "little") + begin
    return start + b"sha256:" + hashlib.sha256(b"hf_blend.seal\0" + start + rest).hexdigest().encode() + rest


def taken_apart(content: bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The texts and the tensors of an entry, as any reader of safetensors sees them."""
    from safetensors.torch import load

    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size])["__metadata__"]
    del about["format"], about["seal"]
    order = list(json.loads(content[8 : 8 + size]))[1:]
    found = load(content)
    return about, {name: found[name].clone() for name in order}


def first_block(content: bytes) -> int:
    """Where the blocks of an entry of blocks begin, in bytes."""
    size = int.from_bytes(content[:8], "little")
    return 8 + size + json.loads(content[8 : 8 + size])["layer.0.k"]["data_offsets"][0]


def compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
