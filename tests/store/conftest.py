# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small chunks of made-up KV, and ways to look at what a store left on disk."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from hf_blend.store import ChunkKey, ChunkKV
from hf_blend.store.entry import encode_entry
from hf_blend.store.tiers.base import BytesSource, Tier
from hf_blend.store.tiers.disk import DiskTier
from hf_blend.store.tiers.memory import MemoryTier

FINGERPRINT = "ab" * 32


def build_chunk(
    token_ids: Sequence[int] = (5, 6, 7),
    *,
    seed: int = 0,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    namespace: str = "",
    fingerprint: str = FINGERPRINT,
    sink_ids: Sequence[int] = (1,),
) -> ChunkKV:
    """Make a chunk of two heads, width 4, one rotary table, and a last layer that does not rotate."""
    random = torch.Generator().manual_seed(seed)
    tokens = len(token_ids)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    pairs = tuple((normal(2, tokens, 4).to(dtype), normal(2, tokens, 2).to(dtype)) for _ in range(layers))
    key = ChunkKey(fingerprint, tuple(sink_ids), tuple(token_ids), namespace)
    return ChunkKV(key, pairs, ((normal(tokens, 4), normal(tokens, 4)),), (0,) * (layers - 1) + (-1,))


def assert_same_chunk(got: ChunkKV | None, wanted: ChunkKV) -> None:
    """Compare bit for bit."""
    assert got is not None
    assert got.key == wanted.key
    assert got.layer_table == wanted.layer_table
    pairs = zip(got.named_tensors(), wanted.named_tensors(), strict=True)
    for (name, tensor), (wanted_name, wanted_tensor) in pairs:
        assert (name, tensor.dtype, tensor.shape) == (wanted_name, wanted_tensor.dtype, wanted_tensor.shape)
        assert tensor.contiguous().view(-1).view(torch.uint8).equal(wanted_tensor.reshape(-1).view(torch.uint8))


def content_of(chunk: ChunkKV) -> bytes:
    return b"".join(encode_entry(chunk))


def files_in(root: Path) -> dict[str, bytes]:
    """Path → content of every entry and every other file among them."""
    objects = root / "objects"
    return {str(path.relative_to(objects)): path.read_bytes() for path in objects.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def chunk() -> Callable[..., ChunkKV]:
    return build_chunk


@pytest.fixture(scope="session")
def same() -> Callable[[ChunkKV | None, ChunkKV], None]:
    return assert_same_chunk


@pytest.fixture(scope="session")
def source() -> type[BytesSource]:
    return BytesSource


@pytest.fixture(scope="session")
def content() -> Callable[[ChunkKV], bytes]:
    return content_of


@pytest.fixture(scope="session")
def files() -> Callable[[Path], dict[str, bytes]]:
    return files_in


TIER_FACTORIES: dict[str, Callable[[Path], Tier]] = {
    "memory": lambda folder: MemoryTier(),
    "disk": lambda folder: DiskTier(folder / "store"),
}


@pytest.fixture(params=TIER_FACTORIES)
def tier_factory(request) -> Callable[[Path], Tier]:
    """Makes a tier of each kind; gets an empty folder."""
    return TIER_FACTORIES[request.param]
