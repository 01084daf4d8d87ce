# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Processes killed at random instants: nothing torn is ever visible, nothing acknowledged is ever lost."""

import os
import random
import signal
import time

import pytest
import torch

from hf_blend.store import ChunkStore


def write_until_killed(root, chunk, first, acknowledge):
    """Store chunk after chunk, saying the number of each on a pipe once `put` has returned."""
    try:
        torch.set_num_threads(1)
        store = ChunkStore.open(root, memory_bytes=0)
        for number in range(first, first + 10_000):
            store.put(chunk((5, number), seed=number))
            os.write(acknowledge, number.to_bytes(4, "little"))
            if number % 7 == 0:
                store.close()
    finally:
        os._exit(0)


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_no_torn_entry_and_loses_none(kills, tmp_path, chunk, same):
    waits, acknowledged = random.Random(0), []
    for kill in range(kills):
        receive, send = os.pipe()
        writer = os.fork()
        if writer == 0:
            write_until_killed(tmp_path, chunk, kill * 10_000, send)
        os.close(send)
        numbers = b"".join(os.read(receive, 4) for _ in range(waits.randint(1, 5)))
        time.sleep(waits.uniform(0, 0.005))
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        while part := os.read(receive, 4096):
            numbers += part
        os.close(receive)
        acknowledged += [int.from_bytes(numbers[at : at + 4], "little") for at in range(0, len(numbers), 4)]
    assert len(acknowledged) > kills

    with ChunkStore.open(tmp_path) as store:
        assert not list(tmp_path.rglob("*.tmp"))
        for number in acknowledged:
            same(store.get(chunk((5, number)).key), chunk((5, number), seed=number))
        present = {entry.digest for entry in store.entries()}
        assert len(present) in range(len(acknowledged), len(acknowledged) + kills + 1)
        assert store.stats()["misses"] == {}
