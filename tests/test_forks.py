# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A forked child continues with what its parent opened, while threads of the parent are in the middle of something."""

import ast
import os
import pickle
import signal
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import hf_blend
from hf_blend import BlendCache, ChunkStore, HfBlendError
from hf_blend.model import checks
from hf_blend.model import fingerprint as identity
from hf_blend.offload.states import States
from hf_blend.prefill.pipeline import Pipeline
from hf_blend.store.reader import MOST_LATE, LateLoads
from hf_blend.store.stream import StreamedLayers
from hf_blend.store.tiers.disk import DiskTier
from hf_blend.threads import ForkedError, Workers, cached_property, new_lock
from tests.asking import GREEDY, LONG, memory
from tests.source import nodes_of

BOUND_S = 60  # after which a child is killed
MADE = {"ThreadPoolExecutor", "Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier"}
FOR_A_CALL = {"integrations/answering.py"}  # threads that end with the call they are made in


def in_child(act):
    """What a function gives in a forked child, which the kernel ends if it waits for ever."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(BOUND_S)
            os.close(reader)
            try:
                answer = act()
            except BaseException as error:
                answer = error
            with open(writer, "wb") as pipe:
                pickle.dump(answer, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0, "the child waited for ever"
    answer = pickle.loads(said)
    if isinstance(answer, BaseException):
        raise answer
    return answer


@contextmanager
def held_up(monkeypatch, owner, name, is_held=lambda: threading.current_thread().name.startswith("hf_blend")):
    """Stop threads of this process in a method, until the block ends; gives what is set once they are there."""
    act, there, go, parent = getattr(owner, name), threading.Event(), threading.Event(), os.getpid()

    def wait(*args, **kwargs):
        if os.getpid() == parent and is_held():
            there.set()
            assert go.wait(BOUND_S)
        return act(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wait)
        try:
            yield there
        finally:
            go.set()


@contextmanager
def holding(lock):
    """Have another thread hold a lock."""
    there, go = threading.Event(), threading.Event()

    def hold():
        with lock:
            there.set()
            go.wait(BOUND_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert there.wait(BOUND_S)
    try:
        yield
    finally:
        go.set()
        thread.join()


@pytest.fixture
def model(shared_model):
    return shared_model()


@pytest.mark.parametrize("settings", [{}, {"kv_bits": 4}], ids=["whole", "4 bits"])
def test_a_cache_on_disk_goes_on_in_a_child_and_its_parent_keeps_its_own(model, tmp_path, monkeypatch, settings):
    def cache_behind_an_answer(folder):
        cache = BlendCache(model, memory(), kv_device_map="disk", offload_folder=folder, **settings)
        return cache, model.generate(**cache.inputs(None, **LONG), past_key_values=cache, **GREEDY)

    def go_on(cache, ids):
        return model.generate(ids, past_key_values=cache, **{**GREEDY, "max_new_tokens": 40})  # some go away

    expected = go_on(*cache_behind_an_answer(tmp_path / "expected"))
    cache, ids = cache_behind_an_answer(tmp_path / "cache")
    files = {path: path.read_bytes() for path in (tmp_path / "cache").rglob("*.dat")}
    cache.kv_memory.release()
    with held_up(monkeypatch, States, "read" if settings.get("kv_bits") else "fill") as there:
        assert cache.layers[0].keys.shape[2]  # brought, and the next one is read ahead
        assert there.wait(BOUND_S)
        assert torch.equal(in_child(lambda: go_on(cache, ids)), expected)
        assert in_child(lambda: cache.reset()) is None
    assert {path: path.read_bytes() for path in files} == files
    assert torch.equal(go_on(cache, ids), expected)


def test_chunks_that_a_parent_prefetches_are_read_again_in_a_child(model, tmp_path, monkeypatch):
    chunks = LONG["chunks"]
    with ChunkStore.open(tmp_path) as store:
        keys = store.add(model, None, chunks)
        stored = [[layer[0] for layer in store.get(key).layers] for key in keys]
    store = ChunkStore.open(tmp_path)
    with held_up(monkeypatch, DiskTier, "open") as there:
        under_way = store.prefetch(model, None, chunks)
        waiting = store.prefetch(model, None, chunks)
        assert there.wait(BOUND_S)

        def look():
            errors = [future.exception() for future in (under_way, waiting)]
            brought = store.prefetch(model, None, chunks).result()
            store.put(store.get(keys[0]))
            store.close()
            return (
                [type(error) for error in errors],
                brought,
                [[layer[0] for layer in store.get(key).layers] for key in keys],
            )

        errors, brought, found = in_child(look)
    assert errors == [ForkedError] * 2
    assert issubclass(ForkedError, HfBlendError)
    assert brought == len(keys)
    assert all(torch.equal(*pair) for rows in zip(found, stored, strict=True) for pair in zip(*rows, strict=True))
    assert (under_way.result(), waiting.result()) == (len(keys), 0)


def test_layers_that_a_parent_reads_ahead_are_read_in_a_child(monkeypatch):
    layers = [(torch.full((1, 2, 3), float(number)),) * 2 for number in range(4)]
    streamed = StreamedLayers(4, lambda index: [layers[index]], pytest.fail, lambda _: None, BOUND_S)
    with held_up(monkeypatch, StreamedLayers, "_take") as there:
        pipeline = Pipeline([streamed], depth=1)
        assert there.wait(BOUND_S)
        assert [float(layer[0][0, 0, 0]) for layer in in_child(lambda: list(streamed))] == [0, 1, 2, 3]
        assert in_child(lambda: pipeline.close()) is None
    assert torch.equal(streamed[3][0], layers[3][0])
    pipeline.close()


def test_loads_that_a_parent_gave_up_are_none_of_a_child(monkeypatch):
    go, late = threading.Event(), LateLoads()
    for _ in range(MOST_LATE):
        assert late.run(go.wait, 0.01) is None
    assert late.run(lambda: "asked", BOUND_S) is None
    assert in_child(lambda: late.run(lambda: "asked", BOUND_S)) == "asked"
    go.set()


def test_a_child_finds_out_who_a_model_is_while_its_parent_does(tiny_model, monkeypatch):
    model = tiny_model()
    expected = identity.fingerprint(tiny_model())
    with holding(identity._lock), holding(checks.PROBING):
        assert in_child(lambda: identity.fingerprint(model)) == expected
    tested = []
    with held_up(monkeypatch, checks, "_complaint", lambda: True) as there:
        thread = threading.Thread(target=BlendCache, args=(model, memory()))
        thread.start()
        assert there.wait(BOUND_S)
        complaint = checks._complaint

        def count(*args):
            tested.append(args)
            return complaint(*args)

        def look():
            monkeypatch.setattr(checks, "_complaint", count)
            BlendCache(model, memory())
            return len(tested)

        assert in_child(look) > 0, "what nobody tests here is not taken for tested"
    thread.join()


def test_workers_locks_and_properties_are_a_childs_own():
    class Slow:
        @cached_property
        def answer(self):
            there.set()
            assert go.wait(BOUND_S)
            return 7

    workers, lock, there, go, parent = Workers("test"), new_lock(), threading.Event(), threading.Event(), os.getpid()
    with holding(lock):
        futures = [workers.submit(lambda: Slow().answer), workers.submit(os.getpid)]
        assert there.wait(BOUND_S)

        def look():
            go.set()
            with lock:
                errors = [type(future.exception()) for future in futures]
            pid = workers.submit(os.getpid).result()
            workers.close()
            return errors, pid == os.getpid(), workers.submit(lambda: Slow().answer).result()

        assert in_child(look) == ([ForkedError] * 2, True, 7)
        go.set()
        assert [future.result() for future in futures] == [7, parent]
    assert in_child(lambda: [future.result() for future in futures]) == [7, parent], "what had come is there"
    workers.close()


def test_what_a_lock_that_forks_hold_guards_is_whole_in_a_child():
    lock, there, guarded = new_lock(held_by_forks=True), threading.Event(), []

    def write():
        with lock:
            guarded.append("begun")
            there.set()
            time.sleep(0.2)
            guarded.append("ended")

    thread = threading.Thread(target=write)
    thread.start()
    assert there.wait(BOUND_S)
    assert in_child(lambda: [*guarded]) == ["begun", "ended"]
    thread.join()


def test_what_forks_have_to_know_of_is_made_in_one_module():
    root, made = Path(hf_blend.__file__).parent, Counter()
    for path in root.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in MADE:
                name = ast.unparse(node.func).removeprefix("threading.")
                is_over_a_lock = name == "Condition" and [ast.unparse(one) for one in node.args] == ["new_lock()"]
                made[str(path.relative_to(root))] += name in MADE and not is_over_a_lock
            elif isinstance(node, ast.ImportFrom) and node.module == "functools":
                made[str(path.relative_to(root))] += any(one.name == "cached_property" for one in node.names)
    assert {name for name, count in made.items() if count} == {"threads.py"} | FOR_A_CALL
