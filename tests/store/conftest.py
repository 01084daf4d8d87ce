# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small chunks of made-up KV, ways to look at what a store left on disk, and real servers to keep chunks in."""

import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_blend import plugins
from hf_blend.store import ChunkKey, ChunkKV
from hf_blend.store.entry import KIND, Header, PackedChunk
from hf_blend.store.tiers.base import BytesSource, Tier
from hf_blend.store.tiers.disk import DiskTier
from hf_blend.store.tiers.memory import MemoryTier
from tests.forging import Forge
from tests.servers import Server

FINGERPRINT = "ab" * 32


def build_chunk(
    token_ids: Sequence[int] = (5, 6, 7),
    *,
    seed: int = 0,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    namespace: str = "",
    fingerprint: str = FINGERPRINT,
    chunk_prefix_ids: Sequence[int] = (1,),
) -> ChunkKV:
    """Make a chunk of two heads, width 4, one rotary table, a last layer that does not rotate, and importance."""
    random = torch.Generator().manual_seed(seed)
    tokens = len(token_ids)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    pairs = tuple((normal(2, tokens, 4).to(dtype), normal(2, tokens, 2).to(dtype)) for _ in range(layers))
    key = ChunkKey(fingerprint, tuple(chunk_prefix_ids), tuple(token_ids), namespace)
    tables = ((normal(tokens, 4), normal(tokens, 4)),)
    importance = normal(tokens).abs().half()
    layer_table = (0,) * (layers - 1) + (-1,)
    return ChunkKV(key, pairs, tables, layer_table, importance=importance, question="asked")


def assert_same_chunk(got: ChunkKV | None, expected: ChunkKV) -> None:
    """Compare bit for bit."""
    assert got is not None
    assert got.key == expected.key
    assert got.layer_table == expected.layer_table
    assert got.question == expected.question
    if expected.importance is None:
        assert got.importance is None
    else:
        assert torch.equal(got.importance, expected.importance)
    pairs = zip(got.named_tensors(), expected.named_tensors(), strict=True)
    for (name, tensor), (expected_name, expected_tensor) in pairs:
        assert name == expected_name
        assert tensor.dtype == expected_tensor.dtype
        assert tensor.shape == expected_tensor.shape
        assert tensor.contiguous().view(-1).view(torch.uint8).equal(expected_tensor.reshape(-1).view(torch.uint8))


def content_of(chunk: ChunkKV) -> bytes:
    return b"".join(PackedChunk(chunk, "raw").parts)


def header_of(content: bytes) -> bytes:
    """Length, kind, seal and the rest of the header of an entry."""
    return content[: 8 + int.from_bytes(content[:8], "little")]


def reheaded(content: bytes, change: Callable[[Header], Header]) -> bytes:
    """An entry whose header was changed, and sealed again, by someone who knows the format."""
    header = header_of(content)
    return change(Header.decode(header, KIND)).encode() + content[len(header) :]


def with_text(header: Header, **texts: str) -> Header:
    """A header that says something else in its texts."""
    return replace(header, about={**header.about, **texts})


def with_plan(header: Header, number: int, **changes: Any) -> Header:
    """A header that says something else of one tensor."""
    plans = list(header.tensors)
    plans[number] = replace(plans[number], **changes)
    return replace(header, tensors=tuple(plans))


def files_in(root: Path) -> dict[str, bytes]:
    """Path → content of every entry and every other file among them."""
    objects = root / "objects"
    return {str(path.relative_to(objects)): path.read_bytes() for path in objects.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def forge() -> Forge:
    return Forge()


def handed(value: Any) -> Any:
    """A fixture that gives something as it is."""
    return pytest.fixture(scope="session")(lambda: value)


chunk = handed(build_chunk)
same = handed(assert_same_chunk)
source = handed(BytesSource)
content = handed(content_of)
files = handed(files_in)


def s3_command(port: int) -> list[str]:
    for name in ("moto", "flask", "flask_cors", "s3fs"):
        pytest.importorskip(name, reason=f"an S3 server to test with needs {name}")
    return [sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def s3_tier(server: Server) -> Tier:
    """A tier in a new bucket."""
    options = {"key": "any", "secret": "any", "endpoint_url": f"http://127.0.0.1:{server.port}"}
    url = f"s3://{secrets.token_hex(8)}"
    tier = plugins.load("store.tiers", "fsspec")(f"{url}/kv", **options)
    tier._files.mkdir(url)
    return tier


SERVED = {"s3": (s3_command, s3_tier)}


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory) -> Iterator[Callable[[str], Server]]:
    """Starts one server of a kind for all tests that do it no harm."""
    running: dict[str, Server] = {}

    def start(kind: str) -> Server:
        if kind not in running:
            running[kind] = Server(SERVED[kind][0], tmp_path_factory.mktemp(kind))
        return running[kind]

    yield start
    for server in running.values():
        server.kill()


@pytest.fixture
def new_server(tmp_path) -> Iterator[Callable[[str], Server]]:
    """Starts servers that a test may do anything to."""
    running = []

    def start(kind: str) -> Server:
        running.append(Server(SERVED[kind][0], tmp_path))
        return running[-1]

    yield start
    for server in running:
        server.thaw()
        server.kill()


@pytest.fixture
def served_tier(shared_server) -> Callable[..., Tier]:
    """Makes an empty tier of a kind, in a server that other tests use too, or in one that is given."""

    def make(kind: str, server: Server | None = None) -> Tier:
        return SERVED[kind][1](server or shared_server(kind))

    return make


TIER_FACTORIES: dict[str, Callable[[Path], Tier]] = {
    "memory": lambda folder: MemoryTier(),
    "disk": lambda folder: DiskTier(folder / "store"),
    "shared folder": lambda folder: plugins.load("store.tiers", "fsspec")(f"file://{folder}/shared"),
}


@pytest.fixture(params=[*TIER_FACTORIES, *SERVED])
def tier_factory(request, served_tier) -> Callable[[Path], Tier]:
    """Makes a tier of each kind; gets an empty folder."""
    return TIER_FACTORIES.get(request.param) or (lambda folder: served_tier(request.param))
