# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding over selected blocks: exact where all are selected, a mask's equal where few are, nothing left behind."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, DynamicCache

from hf_blend import BlendCache, ConfigError, UnsupportedModelError, observer, plugins, sparse_decoding
from hf_blend.cache.layers import BlendLayer
from hf_blend.sparse.blocks import BlockedLayer
from hf_blend.sparse.config import SparseConfig
from hf_blend.sparse.lock import Selection, SelectionLock, SparseMetrics
from hf_blend.sparse.masks import cut_mask
from tests.asking import check_equal, memory
from tests.conftest import ROOT, slow_but

SMALL = {"share": 0.4, "block_tokens": 8, "min_tokens": 0, "recent_blocks": 1}
METHODS = [*sorted(plugins.describe("sparse.methods")), str(ROOT / "benchmarks/rules/random_blocks.py")]


def prompt(batch=1):
    ids = torch.randint(5, 90, (batch, 150), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded():
    inputs = prompt(3)
    for row, tokens in enumerate((0, 37, 90)):
        inputs["attention_mask"][row, :tokens] = 0
        inputs["input_ids"][row, :tokens] = 0
    return inputs


def new_cache(model):
    return BlendCache(model, memory())


def generated(model, inputs, **settings):
    ways = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False, "output_logits": True, **settings}
    output = model.generate(**inputs, **ways, return_dict_in_generate=True)
    logits = None if output.logits is None else torch.stack(output.logits, 1)
    return output.sequences, logits


def sparsely(model, inputs=None, draft=None, watch=None, ways=None, **settings):
    """Ids and logits, and the session; `watch` gets the session before anything is decoded."""
    cache = new_cache(model)
    ways = dict(ways or {})
    if draft is not None:
        ways |= {"assistant_model": draft, "output_logits": False}
    with sparse_decoding(model, cache, draft=draft, **{**SMALL, **settings}) as session:
        if watch is not None:
            watch(session)
        ids, logits = generated(model, inputs or prompt(), past_key_values=cache, **ways)
    return ids, logits, session


@pytest.fixture(scope="module", params=slow_but("sdpa", among=["sdpa", "eager"]))
def model(request):
    made = tiny_model("llama")
    made.set_attn_implementation(request.param)
    return made


@pytest.mark.parametrize(
    ("settings", "make", "is_off"),
    [
        ({"share": 0.9999}, prompt, False),
        ({"share": 0.9999}, padded, False),
        ({"share": 1.0}, prompt, True),
    ],
)
def test_sparse_decoding_over_all_blocks_gives_what_dense_decoding_gives(model, settings, make, is_off):
    inputs = make()
    ids, logits = generated(model, inputs, past_key_values=new_cache(model))
    few_ids, few_logits, session = sparsely(model, inputs, **settings)
    assert bool(session.metrics.steps) is not is_off
    assert torch.equal(ids, few_ids)
    torch.testing.assert_close(logits, few_logits, rtol=0, atol=0 if is_off else 2e-6)
    assert bool(session._cache.heal(0)) is not is_off


def attention(query, key, value, mask):
    if mask is not None and mask.dtype != torch.bool:
        mask = mask == 0
    return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


class Masked:
    """The oracle: dense attention with a mask that shuts all but the selected blocks and the tail."""

    def __init__(self, session):
        self.compared = []
        self.session = session
        self.select_kv = session.select_kv
        session.select_kv = self.watched

    def watched(self, index, query, key, value, mask, name):
        found = self.select_kv(index, query, key, value, mask, name)
        if found is not None:
            seen = self.seen(self.session.layers[index].lock.selection, query.shape[2], key.shape[2])
            if mask is not None:
                seen = seen & (mask if mask.dtype == torch.bool else mask == 0)
            self.compared.append((attention(query, key, value, seen), attention(query, *found)))
        return found

    def seen(self, selection, rows, total):
        size = self.session.config.block_tokens
        seen = torch.zeros(len(selection.rows), 1, rows, total, dtype=torch.bool)
        for row, blocks in enumerate(selection.rows):
            for block in blocks:
                seen[row, :, :, block * size : (block + 1) * size] = True
        seen[..., selection.tail :] = True
        return seen & (torch.arange(total) <= torch.arange(total - rows, total)[:, None])


WAYS = [
    ("eager", prompt, {}),
    ("sdpa", prompt, {}),
    ("sdpa", padded, {}),
    ("sdpa", prompt, {"num_beams": 3, "output_logits": False}),
    ("eager", prompt, {"prompt_lookup_num_tokens": 5}),
    ("sdpa", prompt, {"prompt_lookup_num_tokens": 5}),
]
DIAGONAL = [(METHODS[at % len(METHODS)], *way) for at, way in enumerate(WAYS)]


@pytest.mark.parametrize(("method", "model", "make", "ways"), DIAGONAL, indirect=["model"])
def test_sparse_decoding_attends_to_selected_blocks_and_tail_and_nothing_else(model, make, ways, method):
    watchers = []
    *_, session = sparsely(model, make(), watch=lambda one: watchers.append(Masked(one)), ways=ways, method=method)
    compared = watchers[0].compared
    assert len(compared) > 20
    if make is padded:
        assert len(set(session.layers[1].lock.selection.rows)) > 1, "each request has its own"
    for expected, got in compared:
        seen = ~expected.isnan()
        torch.testing.assert_close(got[seen], expected[seen], rtol=0, atol=2e-6)


def test_sparse_decoding_leaves_model_as_it_was_after_exception_too(model, untouched):
    counts = []

    def fail(*_):
        counts.append(1)
        if len(counts) > 4:
            raise KeyError("on purpose")

    with untouched(model):
        handle = model.model.layers[1].register_forward_pre_hook(observer(fail))
        with pytest.raises(KeyError, match="on purpose"):
            sparsely(model)
        handle.remove()


def test_sparse_decoding_leaves_another_cache_dense(model):
    """And another thread: see `test_attention_door`."""
    expected = generated(model, prompt(), past_key_values=DynamicCache())
    with sparse_decoding(model, new_cache(model), **SMALL):
        check_equal(generated(model, prompt(), past_key_values=DynamicCache()), expected)


def test_blocked_layer_represents_again_blocks_that_were_cut_while_selection_held():
    layer = BlendLayer()
    blocks = BlockedLayer(
        layer, SparseConfig(block_tokens=4, recent_blocks=0), plugins.load("sparse.methods", "gsa")({})
    )

    def step(tokens):
        blocks.begin()
        layer.update(torch.randn(1, 2, tokens, 8), torch.randn(1, 2, tokens, 8))
        blocks.settle()

    query = torch.randn(1, 2, 1, 8)
    step(24)
    blocks.scores(query, 24)
    layer.crop(-10)
    for _ in range(10):  # none of these looks for a new selection
        step(1)
    for _ in range(2):
        expected = (query * layer.keys.unflatten(2, (6, 4)).mean(3)).sum(-1).mean(1)
        torch.testing.assert_close(blocks.scores(query, 24)[0, 0, 1:], expected[0, 1:])
        layer.crop(-9)
        layer.update(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8))  # by a forward that sees everything
        blocks.begin()


def test_blocked_layer_always_selects_first_and_recent_blocks():
    layer = BlendLayer()
    config = SparseConfig(share=0.01, block_tokens=4, first_blocks=2, recent_blocks=3)
    blocks = BlockedLayer(layer, config, plugins.load("sparse.methods", "gsa")({}))
    layer.update(torch.randn(2, 2, 43, 8), torch.randn(2, 2, 43, 8))
    blocks.begin()
    selection = blocks.select(blocks.scores(torch.randn(2, 4, 1, 8), 43)[:, 0], 43)
    assert selection == Selection(((0, 1, 7, 8, 9),) * 2, 40)


def test_cut_mask_of_no_mask_hides_what_is_behind_each_row():
    columns = torch.tensor([[0, 1, 5, 6, 7]])  # the last three are the rows' own
    query = torch.zeros(1, 2, 3, 4)
    expected = torch.ones(3, 5).tril(2).bool()[None, None]
    shown = cut_mask(None, columns, query, 8, "sdpa")
    assert torch.equal(shown, expected)
    added = cut_mask(None, columns, query, 8, "eager")
    assert torch.equal(added == 0, expected)
    assert cut_mask(None, columns, query[:, :, :1], 8, "sdpa") is None


@torch.no_grad()
def test_session_selects_by_last_accepted_row_of_round():
    model = tiny_model("llama")
    cache = new_cache(model)
    ids = prompt()["input_ids"]
    with sparse_decoding(model, cache, **SMALL) as session:
        model(ids[:, :140], past_key_values=cache)
        cache.activate_past_recording()  # as assisted decoding does
        model(ids[:, 140:145], past_key_values=cache)  # a round of five
        layer = session.layers[2]
        scores = layer.scores
        cache.crop(-2)
        session.settle_speculation()
        assert layer.lock.selection == layer.blocks.select(scores[:, 2], 140)
        assert layer.lock.selection != layer.blocks.select(scores[:, 4], 140), "or this test would be empty"
    assert session.metrics.accepted == 2
    assert session.metrics.proposed == 4


def draft_model():
    config = tiny_model("llama").config
    config.num_hidden_layers = 2
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config).eval()


def test_draft_and_verification_of_round_see_same_selection(model, monkeypatch):
    draft = draft_model()
    draft.set_attn_implementation(model.config._attn_implementation)
    drafted = []
    verified = []

    def watch(session):
        select_kv = session.select_kv

        def watched(index, query, *rest):
            if index == 0 and query.shape[2] > 1:
                verified.append(session.layers[0].lock.selection)
            return select_kv(index, query, *rest)

        session.select_kv = watched
        layer = draft.model.layers[0]
        handles.append(
            layer.register_forward_pre_hook(observer(lambda *_: drafted.append(session.layers[0].lock.selection)))
        )

    handles = []
    metrics = sparsely(model, draft=draft, watch=watch)[2].metrics
    handles[0].remove()
    assert len(verified) > 3
    assert {one for one in verified if one is not None} <= set(drafted)
    assert metrics.full_rounds < metrics.rounds
    assert metrics.accepted < metrics.proposed
    assert metrics.unlocks, "a round that is not accepted whole gives its locks up"


@pytest.mark.parametrize("share", [1.0, 0.9999])
def test_draft_over_all_blocks_gives_text_of_greedy_search(model, share):
    expected, _ = generated(model, prompt(), past_key_values=new_cache(model))
    ids, _, session = sparsely(model, draft=draft_model(), share=share)
    assert torch.equal(ids, expected)
    assert bool(session.metrics.rounds) == (share < 1)


def test_draft_of_another_vocabulary_is_refused_by_name(model):
    size = model.config.vocab_size
    with sparse_decoding(model, new_cache(model), draft=tiny_model("llama", vocab_size=size + 1024)):
        pass
    with pytest.raises(ConfigError, match=f"the draft knows {size + 1025} tokens, expected the {size} of the"):
        sparsely(model, draft=tiny_model("llama", vocab_size=size + 1025))


def test_sparse_decoding_refuses_kv_beyond_device(model):
    cache = BlendCache(model, memory(), kv_device_map="cpu")
    with pytest.raises(ConfigError, match="kv_device_map"), sparse_decoding(model, cache):
        pass


@pytest.mark.parametrize("kind", ["falcon", "jetmoe"])  # in its own code; of keys that it repeats itself
def test_sparse_decoding_refuses_attention_that_no_function_can_take(kind):
    with pytest.raises(UnsupportedModelError, match=rf"(?i)layer 0 of {kind}.*code of its own.*that it repeats"):
        sparsely(tiny_model(kind))


# The lock's state machine against a plain model of its description, over random programs.

SIZE = 4
BLOCKS = st.sets(st.integers(0, 9), min_size=3, max_size=3).map(sorted).map(tuple)
STEPS = st.tuples(BLOCKS, st.integers(1, 5))
PROGRAMS = st.lists(st.one_of(STEPS, STEPS, STEPS, st.just("unlock")), min_size=10, max_size=60)
CONFIGS = st.builds(
    SparseConfig,
    block_tokens=st.just(SIZE),
    lock=st.sampled_from((True, True, True, False)),
    checkpoint_interval=st.integers(1, 9),
    update_threshold=st.integers(0, 4),
    lock_duration=st.integers(1, 12),
)


class Described:
    """What the description says, written down step by step."""

    def __init__(self, config):
        self.config = config
        self.blocks = None
        self.age = 0
        self.unchecked = 0
        self.counts = dict.fromkeys(("locks", "unlocks", "kept", "changed"), 0)

    def unlock(self):
        self.counts["unlocks"] += self.blocks is not None
        self.blocks = None

    def get(self, new, steps):
        if self.blocks is not None and (not self.config.lock or self.age >= self.config.lock_duration):
            self.unlock()
        if self.blocks is None:
            self.counts["locks"] += 1
            self.blocks = new
            self.age = 0
            self.unchecked = 0
        elif self.unchecked >= self.config.checkpoint_interval:
            self.unchecked = 0
            if len(set(new) ^ set(self.blocks)) <= self.config.update_threshold:
                self.counts["kept"] += 1
            else:
                self.counts["changed"] += 1
                self.blocks = new
                self.age = 0
        self.age += steps
        self.unchecked += steps
        return self.blocks


@example(
    SparseConfig(block_tokens=SIZE, checkpoint_interval=9, update_threshold=0, lock_duration=3),
    [((0, 1, 2), 2), ((3, 4, 5), 2), ((6, 7, 8), 1)],
)
@given(CONFIGS, PROGRAMS)
def test_selection_lock_does_what_is_described(config, program):
    metrics = SparseMetrics()
    lock = SelectionLock(config, metrics)
    plain = Described(config)
    for one in program:
        if one == "unlock":
            lock.unlock()
            plain.unlock()
            assert lock.selection is None
            continue
        blocks, steps = one
        made = []

        def select(blocks=blocks, made=made):
            made.append(Selection((blocks,), 40))
            return made[0]

        is_due = lock.is_due
        got = lock.get(select, steps)
        assert got.rows == (plain.get(blocks, steps),)
        assert bool(made) == is_due, "a selection is made only when it is needed"
    assert {name: getattr(metrics, name) for name in plain.counts} == plain.counts


def test_differences_counts_only_blocks_that_both_selections_could_choose():
    older = Selection(((0, 3, 8, 9),), 40)
    newer = Selection(((0, 4, 10, 11),), 48)
    assert older.differences(newer, SIZE) == 4  # 3, 8, 9 and 4: blocks 10 and 11 were in the older one's tail
    two = Selection(((0, 3, 8, 9), (0, 4, 5, 6)), 40)
    assert two.differences(Selection(((0, 3, 8, 9), (0, 4, 5, 7)), 40), SIZE) == 2, "of the request with most"
