# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""accelerate's offload loader reads the very tensors that a store holds, and is told of no damaged entry."""

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader

from hf_blend import ChunkStore
from hf_blend.store.offload import offload_index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accelerate_reads_what_the_store_holds(tmp_path, chunk, dtype):
    chunks = [chunk((5, 6, 7), seed=1, dtype=dtype), chunk((8, 9), seed=2, dtype=dtype)]
    with ChunkStore.open(tmp_path, memory_bytes=0) as store:
        for one in chunks:
            store.put(one)
        loader = OffloadedWeightsLoader(index=offload_index(store))
    for one in chunks:
        for name, tensor in one.named_tensors():
            read = loader[f"{one.key.digest}.{name}"]
            assert read.dtype == tensor.dtype
            assert read.equal(tensor)
        assert tuple(loader[f"{one.key.digest}.token_ids"].tolist()) == one.key.token_ids


def test_damaged_and_foreign_entries_are_not_listed(tmp_path, chunk):
    good, bad = chunk((5, 6, 7), seed=1), chunk((8, 9), seed=2)
    with ChunkStore.open(tmp_path, memory_bytes=0, namespace="other") as store:
        store.put(chunk((1, 2), seed=3, namespace="other"))
    with ChunkStore.open(tmp_path, memory_bytes=0) as store:
        store.put(good)
        store.put(bad)
        path = next(tmp_path.rglob(f"{bad.key.digest}.safetensors"))
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.chmod(0o600)
        path.write_bytes(raw)
        assert {name.split(".")[0] for name in offload_index(store)} == {good.key.digest}
    assert not offload_index(ChunkStore.open("memory://"))
