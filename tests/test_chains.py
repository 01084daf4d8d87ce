# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chains: what was healed is exact behind the tokens before it, for every prompt that begins with these.

The oracle is stock transformers: a plain forward of the prompt.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_blend import BlendCache, ChunkStore
from hf_blend.model.identity import fingerprint
from hf_blend.prompt.pieces import Prompt, Span
from hf_blend.store.chunk import CHAIN, ChunkKey
from hf_blend.store.order import longest_chain
from tests.asking import generated, memory
from tests.conftest import random_ids, shared_tiny_model
from tests.test_edits import LOGITS, check_close, check_states, off, stock

PREFIX = [1, *random_ids(5, 1)]
A, B, C = (random_ids(40, number) for number in (2, 3, 4))
QUESTION = random_ids(6, 5)
BLENDED = {"chains": True, "recompute_ratio": 0.1}
COMPUTED = {"chains": True, "recompute_ratio": 1.0}
ONLY_STORED = {"chains": True, "recompute_ratio": 0.0, "selector": "none"}


def asked(model, store, *documents, prefix=PREFIX, question=QUESTION, **settings):
    """A cache behind a prompt, the prompt's ids, and the logits of the token behind it."""
    cache = BlendCache(model, store, **(settings or BLENDED))
    inputs = cache.inputs(None, prefix=prefix, chunks=documents, question=question)
    (logits,) = generated(model, inputs, cache, **LOGITS).logits
    return cache, inputs["input_ids"][0].tolist(), logits


def entries_of_chains(store):
    return [one for one in store.entries() if one.fingerprint.endswith(CHAIN)]


def links(store):
    return sorted(one.tokens for one in entries_of_chains(store))


@pytest.fixture
def chained():
    """A model, and a store with the chain of two documents behind the prefix."""
    model = shared_tiny_model()
    store = memory()
    cache, *_ = asked(model, store, A, B)
    assert links(store) == []
    cache.heal()
    assert links(store) == [40, 40]
    return model, store


@pytest.mark.parametrize(
    ("documents", "exact"),
    [("AB", 86), ("ABC", 86), ("AC", 46), ("A", 46), ("BA", 6), ("AAB", 46), ("CAB", 6)],
)
def test_longest_chain_is_loaded_as_exact(chained, documents, exact):
    model, store = chained
    named = [{"A": A, "B": B, "C": C}[letter] for letter in documents]
    cache, ids, logits = asked(model, store, *named, question=random_ids(9, 6), **ONLY_STORED)
    assert cache.report.exact_tokens == exact
    full, expected = stock(model, ids)
    assert (off(logits, expected) < 1e-5) == (exact == len(ids) - 9)
    check_states(cache, full, exact)


def test_chain_grows_by_what_is_healed_behind_it(chained):
    model, store = chained
    cache, ids, _ = asked(model, store, A, B, C)
    left = cache.heal(0)
    assert left == cache.get_seq_length() - 86
    cache.heal(39)
    assert links(store) == [40, 40], "the third is not whole"
    cache.heal(1)
    assert links(store) == [40, 40, 40]
    cache, ids, logits = asked(model, store, A, B, C, **ONLY_STORED)
    assert cache.report.exact_tokens == 126
    check_close(logits, stock(model, ids)[1])


@pytest.mark.parametrize("change", [{"prefix": [1, *random_ids(5, 9)]}, {"recompute_ratio": 0.0, "selector": "none"}])
def test_chain_is_of_its_beginning_and_only_where_asked_for(chained, change):
    model, store = chained
    cache, *_ = asked(model, store, A, B, **change)
    assert cache.report.exact_tokens == 6
    cache.heal()
    assert (links(store) == [40, 40]) == ("selector" in change)


def test_link_is_of_one_model_and_namespace(chained, tiny_model):
    model, store = chained
    other = tiny_model(seed=1)
    cache, ids, logits = asked(other, store, A, B, **COMPUTED)
    assert cache.report.exact_tokens == 6
    check_close(logits, stock(other, ids)[1])
    tenant = ChunkStore.open("memory://", namespace="tenant")
    assert asked(model, tenant, A, B)[0].report.exact_tokens == 6


def test_tokens_of_the_callers_forward_are_healed_before_they_are_stored():
    """Between the exact beginning and the first chunk are tokens that only the caller's forward has computed."""
    model = shared_tiny_model()
    store = memory()
    store.add(model, None, [A, B])
    ids = torch.tensor([[*PREFIX, *A, *B, *QUESTION]])
    cache = asked_by_ids(model, store, ids)
    assert cache.state.inexact_from == cache.report.exact_tokens == 0
    for layer in cache.layers:
        layer.keys[:, :, :6] += 1.0
    cache.heal()
    cache = asked_by_ids(model, store, ids)
    assert cache.report.exact_tokens == 86
    full, _ = stock(model, ids[0].tolist())
    check_states(cache, full)


@torch.no_grad()
def asked_by_ids(model, store, ids):
    cache = BlendCache(model, store, **BLENDED)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def test_chain_ends_before_what_is_moved_into_its_text():
    model = shared_tiny_model()
    between = random_ids(50, 8)
    spans = (Span.whole(0, A), Span.whole(90, B))
    chain = Prompt((*A, *between, *B, 9), spans)
    cache = BlendCache(model, memory(), edits="blend", **ONLY_STORED)
    for prompt in (chain, Prompt((9, *between, 9)), chain):
        cache.heal()
        generated(model, cache.expect(None, [prompt]), cache)
    full, _ = stock(model, chain.ids)
    check_states(cache, full, cache.state.inexact_from)
    assert cache.report.moved_tokens == 50


def test_links_are_no_chunks_for_those_who_list_groups(chained):
    model, store = chained
    identity = fingerprint(model)
    assert store.longest_prefix(identity) == (1,)
    assert store.known(identity) == (3, 3)
    assert store.stored_prefix(model, identity) == (1,)


def test_link_that_is_gone_or_damaged_is_computed(tmp_path):
    model = shared_tiny_model()
    with ChunkStore.open(tmp_path, memory_bytes=0) as store:
        asked(model, store, A, B)[0].heal()
    with ChunkStore.open(tmp_path, memory_bytes=0) as store:  # another process
        cache, ids, logits = asked(model, store, A, B, **ONLY_STORED)
        assert cache.report.exact_tokens == 86
        expected = stock(model, ids)[1]
        check_close(logits, expected)
        stored = [one.digest for one in entries_of_chains(store)]
        (path,) = tmp_path.glob(f"objects/*/{stored[0]}*")
        damaged = bytearray(path.read_bytes())
        damaged[-5000] ^= 1
        path.write_bytes(damaged)
        cache, _, logits = asked(model, store, A, B, **COMPUTED)
        check_close(logits, expected)
        store.remove(stored)
        cache, _, logits = asked(model, store, A, B, **COMPUTED)
        assert cache.report.exact_tokens == 6
        check_close(logits, expected)


DOCUMENTS = [[100 * number + place for place in range(30 + number)] for number in range(4)]


def length(order):
    return sum(len(DOCUMENTS[number]) for number in order)


@given(st.lists(st.permutations(range(4)).map(lambda order: order[:3]), max_size=4), st.booleans())
def test_longest_chain_is_that_of_all_orders(stored, has_prefix):
    """Every prefix of a stored order is a chain; seams between documents are tokens of the links."""
    keys = set()
    for order in stored:
        ids = (7, 7) if has_prefix else ()
        for number in order:
            link = (9, *DOCUMENTS[number][1:])
            keys.add(ChunkKey("model", ids, link))
            ids += link
    chains = [[]]
    for order in stored:
        chains += [order[:1], order[:2], order]
    found = longest_chain(sorted(keys, key=repr), DOCUMENTS)
    assert list(found) in chains
    assert length(found) == max(map(length, chains))


def test_order_puts_longest_chain_first(chained):
    model, store = chained
    assert store.order(model, None, [C, B, A]) == [A, B, C]
    assert store.order(model, None, [C, B]) == [C, B]
    cache, *_ = asked(model, store, *store.order(model, None, [B, C, A]), **ONLY_STORED)
    assert cache.report.exact_tokens == 86
    asked(model, store, B, C, A)[0].heal()
    assert store.order(model, None, [A, B, C]) == [B, C, A]
    assert memory().order(model, None, [C, B]) == [C, B]
