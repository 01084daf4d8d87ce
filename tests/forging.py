# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Writes entries of any kind by the description of the format alone, sealed and digested as they should be.

It shares no code with what it is used to check.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash

Row = tuple[str, str, list[int], bytes]  # name, dtype, shape and bytes of a tensor
CHUNK = "hf_blend.chunk/2"
NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64", torch.int32: "I32",
    torch.int8: "I8", torch.float64: "F64", torch.uint8: "U8",
}  # fmt: skip


class Forge:
    """Writes entries, and those of chunks from a chunk and what is to be changed."""

    def seal(self, *content: bytes) -> bytes:
        """A seal over some content."""
        joined = b"hf_blend.seal\0" + b"".join(content)
        return b"sha256:" + hashlib.sha256(joined).hexdigest().encode()

    def header(self, rest: str, kind: str = CHUNK) -> bytes:
        """Length, kind, seal and the JSON behind the seal."""
        begin = f'{{"__metadata__":{{"format":"{kind}","seal":"'.encode()
        text = rest.encode("utf-8", "surrogatepass")
        size = len(begin) + len(self.seal()) + len(text)
        spaces = -(8 + size) % 64
        text += b" " * spaces
        size += spaces
        start = size.to_bytes(8, "little") + begin
        return start + self.seal(start, text) + text

    def digests(self, rows: Sequence[Row]) -> str:
        """The text of all digests."""
        return compact([xxhash.xxh3_128_hexdigest(data) for *_, data in rows])

    def entry(self, kind: str, about: Mapping[str, Any], rows: Sequence[Row]) -> bytes:
        """An entry of any kind; `about` names the digests."""
        plans = ""
        start = 0
        for name, dtype, shape, data in rows:
            plan = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
            plans += f",{compact(name)}:{compact(plan)}"
            start += len(data)
        header = self.header(f'",{compact(about)[1:]}{plans}}}', kind)
        return header + b"".join(row[3] for row in rows)

    def tensors(self, chunk: Any) -> list[Row]:
        """What an entry of a chunk holds, as it was computed."""
        key = chunk.key
        ids = self.row("token_ids", torch.tensor(key.token_ids))
        prefix = self.row("chunk_prefix_ids", torch.tensor(key.chunk_prefix_ids).long())
        leading = [ids, prefix]
        if chunk.importance is not None:  # up to a multiple of eight bytes
            zeros = torch.zeros(-chunk.tokens % 4, dtype=torch.float16)
            leading.append(self.row("importance", torch.cat((chunk.importance, zeros))))
        return [*leading, *(self.row(*named) for named in chunk.named_tensors())]

    def row(self, name: str, tensor: torch.Tensor) -> Row:
        """One tensor."""
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return name, NAMES[tensor.dtype], list(tensor.shape), data

    def __call__(self, chunk: Any, tensors: Any = None, **changes: Any) -> bytes:
        """An entry under the key of a chunk, whose tensors and texts may be others, of any type."""
        rows = self.tensors(chunk) if tensors is None else list(tensors)
        key = chunk.key
        space = b"hf_blend.namespace/1\0" + key.namespace.encode()
        about = {"provenance": "isolated", "key": key.digest, "fingerprint": key.fingerprint}
        about["namespace"] = hashlib.sha256(space).hexdigest()
        about["codec"] = "raw"
        about["canary"] = chunk.canary
        about["layer_table"] = compact(chunk.layer_table)
        about["digests"] = self.digests(rows)
        if chunk.importance is not None:
            about["question"] = chunk.question
        return self.entry(CHUNK, about | changes, rows)


def forged(kind: str, about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """An entry of any kind."""
    forge = Forge()
    rows = [forge.row(name, tensor) for name, tensor in tensors.items()]
    return forge.entry(kind, {**about, "digests": forge.digests(rows)}, rows)


def keys_of_nan(state: dict[str, torch.Tensor]) -> None:
    """NaN among the keys of a session."""
    state["layer.0.k"].fill_(math.nan)


def values_without_head(state: dict[str, torch.Tensor]) -> None:
    """A head less among the values of a session."""
    state["layer.0.v"] = state["layer.0.v"][:1]


def layer_less(state: dict[str, torch.Tensor]) -> None:
    """A session without its last layer."""
    del state["layer.3.k"]
    del state["layer.3.v"]


def no_ids(state: dict[str, torch.Tensor]) -> None:
    """A session whose tokens are not named."""
    del state["ids"]


SESSIONS = (keys_of_nan, values_without_head, layer_less, no_ids)


def sealed_header(kind: str, rest: bytes) -> bytes:
    """Length, kind and seal in front of the rest of a header, whatever it is."""
    begin = b'{"__metadata__":{"format":"' + kind.encode() + b'","seal":"'
    start = (len(begin) + 71 + len(rest)).to_bytes(8, "little") + begin
    return start + Forge().seal(start, rest) + rest


def taken_apart(content: bytes) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The texts and the tensors of an entry, as any reader of safetensors sees them."""
    from safetensors.torch import load

    size = int.from_bytes(content[:8], "little")
    rows = json.loads(content[8 : 8 + size])
    found = load(content)
    about = rows.pop("__metadata__")
    del about["format"], about["seal"]
    return about, {name: found[name].clone() for name in rows}


def first_block(content: bytes) -> int:
    """Where the blocks of an entry of blocks begin, in bytes."""
    size = int.from_bytes(content[:8], "little")
    return 8 + size + json.loads(content[8 : 8 + size])["layer.0.k"]["data_offsets"][0]


def compact(value: Any) -> str:
    """JSON without white space."""
    return json.dumps(value, separators=(",", ":"))
