# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Decoding over selected blocks: exact where all are selected, a mask's equal where few are, nothing left behind."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

from hf_blend import BlendCache, ChunkStore, ConfigError, UnsupportedModelError, observer, plugins, sparse_decoding
from hf_blend.cache.layers import BlendLayer
from hf_blend.sparse.blocks import BlockedLayer
from hf_blend.sparse.config import SparseConfig
from hf_blend.sparse.layout import Layout
from hf_blend.sparse.lock import Selection, SelectionLock, SparseMetrics
from tests.conftest import slow_but

SMALL = {"share": 0.4, "block_tokens": 8, "min_tokens": 0, "recent_blocks": 1}
METHODS = sorted(plugins.describe("sparse.methods"))


def prompt(tokens: int = 150, batch: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 90, (batch, tokens), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def new_cache(model: Any, **settings: Any) -> BlendCache:
    return BlendCache(model, ChunkStore.open("memory://"), **settings)


def generated(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int = 24, **settings: Any) -> Any:
    base = {"max_new_tokens": new_tokens, "eos_token_id": None, "do_sample": False, "output_logits": True}
    output = model.generate(**inputs, **{**base, **settings}, return_dict_in_generate=True)
    return output.sequences, torch.stack(output.logits, 1) if output.logits is not None else None


def sparsely(
    model, inputs=None, new_tokens=24, cache=None, watch=lambda sparse: None, draft=None, ways=None, **settings
):
    """Ids and logits, the session, and what watched it."""
    cache = new_cache(model) if cache is None else cache
    ways = {**(ways or {}), **({} if draft is None else {"assistant_model": draft, "output_logits": False})}
    with sparse_decoding(model, cache, draft=draft, **{**SMALL, **settings}) as sparse:
        watched = watch(sparse)
        ids, logits = generated(model, inputs or prompt(), new_tokens, past_key_values=cache, **ways)
    return ids, logits, sparse, watched


@pytest.fixture(scope="module", params=slow_but("sdpa", among=["sdpa", "eager"]))
def model(request):
    made = tiny_model("llama")
    made.set_attn_implementation(request.param)
    return made


def padded() -> dict[str, torch.Tensor]:
    inputs = prompt(150, 3)
    for row, tokens in enumerate((0, 37, 90)):
        inputs["attention_mask"][row, :tokens] = 0
        inputs["input_ids"][row, :tokens] = 0
    return inputs


@pytest.mark.parametrize(
    ("settings", "make"), [({"share": 0.9999}, prompt), ({"share": 0.9999}, padded), ({"share": 1.0}, prompt),
                           ({"share": 0.9999, "min_tokens": 10_000}, prompt)]
)  # fmt: skip
def test_sparse_decoding_over_all_blocks_gives_what_dense_decoding_gives(model, settings, make):
    """Switched off, to the bit."""
    ids, logits = generated(model, make(), past_key_values=new_cache(model))
    few_ids, few_logits, sparse, _ = sparsely(model, make(), **settings)
    is_off = settings["share"] == 1 or "min_tokens" in settings
    assert bool(sparse.metrics.steps) is not is_off
    assert torch.equal(ids, few_ids)
    torch.testing.assert_close(logits, few_logits, rtol=0, atol=0 if is_off else 2e-6)


class Masked:
    """Dense attention of one step over some columns, which a mask shuts in each layer: the plain way."""

    def __init__(self, sparse: Any) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        select_kv = sparse.select_kv

        def watched(index: int, query: Any, key: Any, value: Any, mask: Any, name: str, scaling: Any) -> Any:
            found = select_kv(index, query, key, value, mask, name, scaling)
            if found is not None:
                expected = self._expected(sparse, index, query, key, value, mask, scaling)
                self.calls.append((expected, self._attention(query, *found, scaling)))
            return found

        sparse.select_kv = watched

    def _expected(self, sparse: Any, index: int, query: Any, key: Any, value: Any, mask: Any, scaling: Any) -> Any:
        batch, _, rows, _ = query.shape
        total, size = key.shape[2], sparse.config.block_tokens
        seen = torch.zeros(batch, 1, rows, total, dtype=torch.bool)
        for row, selection in enumerate(sparse._seen[index]):
            for block in selection.blocks:
                seen[row, :, :, block * size : (block + 1) * size] = True
            seen[row, :, :, selection.tail :] = True
        seen &= torch.arange(total) <= torch.arange(total - rows, total)[:, None]
        if mask is not None:
            seen = seen & (mask if mask.dtype == torch.bool else mask == 0)
        return self._attention(query, key, value, seen, scaling)

    def _attention(self, query: Any, key: Any, value: Any, mask: Any, scaling: Any) -> Any:
        group = query.shape[1] // key.shape[1]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e30) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(-1) @ value.repeat_interleave(group, 1)


WAYS = [
    ("eager", prompt, {}),
    ("sdpa", prompt, {}),
    ("sdpa", padded, {}),
    ("sdpa", prompt, {"num_beams": 3, "output_logits": False}),
    ("eager", prompt, {"prompt_lookup_num_tokens": 5}),
]
# each way with one method, each method with one way
DIAGONAL = [(METHODS[at % len(METHODS)], *WAYS[at % len(WAYS)]) for at in range(max(len(METHODS), len(WAYS)))]


@pytest.mark.parametrize(("method", "model", "make", "settings"), DIAGONAL, indirect=["model"])
def test_sparse_decoding_attends_to_the_selected_blocks_and_the_tail_and_nothing_else(model, make, settings, method):
    _, _, sparse, watched = sparsely(model, make(), watch=Masked, ways=settings, method=method)
    assert len(watched.calls) > 20
    assert make is prompt or len({one.blocks for one in sparse.selections(1)}) > 1, "each request has its own"
    for expected, got in watched.calls:
        seen = ~expected.isnan()
        torch.testing.assert_close(got[seen], expected[seen], rtol=0, atol=2e-6)


def test_sparse_decoding_leaves_the_model_as_it_was_after_an_exception_too(model, untouched):
    cache = new_cache(model)

    def fail(*_: Any) -> None:
        if cache.get_seq_length() > 150:
            raise KeyError("on purpose")

    with untouched(model):
        handle = model.model.layers[1].register_forward_pre_hook(observer(fail))
        with pytest.raises(KeyError, match="on purpose"):
            sparsely(model, cache=cache)
        handle.remove()


def test_sparse_decoding_leaves_another_cache_and_another_thread_dense(model):
    ids, logits = generated(model, prompt(), past_key_values=DynamicCache())
    cache, found = new_cache(model), []
    with sparse_decoding(model, cache, **SMALL):
        found.append(generated(model, prompt(), past_key_values=DynamicCache()))
        dense = partial(generated, model, prompt(), past_key_values=DynamicCache())
        other = threading.Thread(target=lambda: found.append(dense()))
        other.start()
        generated(model, prompt(), past_key_values=cache)
        other.join()
    for got_ids, got_logits in found:
        assert torch.equal(got_ids, ids)
        assert torch.equal(got_logits, logits)


def test_blocked_layer_represents_blocks_again_that_were_cut_while_a_selection_held():
    layer, settings = BlendLayer(), SparseConfig(block_tokens=4, recent_blocks=0)
    blocks = BlockedLayer(layer, settings, plugins.load("sparse.methods", "gsa")({}))

    def step(tokens: int) -> None:
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


def draft_model() -> Any:
    config = tiny_model("llama").config
    config.num_hidden_layers = 2
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(config).eval()


def test_draft_and_verification_of_a_round_see_the_same_selection(model):
    draft = draft_model()
    draft.set_attn_implementation(model.config._attn_implementation)
    metrics = sparsely(model, draft=draft)[2].metrics
    assert metrics.compared_rounds > 3
    assert metrics.equal_rounds == metrics.compared_rounds
    assert metrics.full_rounds < metrics.rounds
    assert metrics.unlocks, "a round that is not accepted whole gives its lock up"


@pytest.mark.parametrize("settings", [{"share": 1.0}, {"share": 0.9999, "draft_selects": True}, {"share": 0.9999}])
def test_draft_over_all_blocks_gives_the_text_of_greedy_search(model, settings):
    expected, _ = generated(model, prompt(), past_key_values=new_cache(model))
    ids, _, sparse, _ = sparsely(model, draft=draft_model(), **settings)
    assert torch.equal(ids, expected)
    assert bool(sparse.metrics.rounds) == (settings["share"] < 1)


class Overheard:
    """What the draft's own queries of a round select, found from its queries and keys alone."""

    def __init__(self, sparse: Any) -> None:
        self.queries: dict[int, list[torch.Tensor]] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.checked = self.differing = 0
        self.sparse, self.drafted, self.verified = sparse, sparse._selecting.select_kv, sparse.select_kv
        sparse._selecting.select_kv, sparse.select_kv = self.draft, self.target

    def draft(self, index: int, query: Any, key: Any, *given: Any) -> Any:
        self.queries.setdefault(index, []).append(query)
        self.keys[index] = key
        return self.drafted(index, query, key, *given)

    def target(self, index: int, query: Any, key: Any, *given: Any) -> Any:
        found, past = self.verified(index, query, key, *given), key.shape[2] - query.shape[2]
        if query.shape[2] > 1 and self.queries:
            near = 0 if index < 2 else 1  # four layers, two of the draft
            seen = set(self.sparse._seen[index][0].blocks)
            assert seen == self.selected(torch.cat(self.queries[near], 2), self.keys[near], past, len(seen))
            self.checked += 1
            self.differing += seen != self.selected(query, key, past, len(seen))
        if index == 3:
            self.queries = {}
        return found

    @staticmethod
    def selected(query: Any, key: Any, past: int, count: int) -> set[int]:
        blocks, group = past // 8, query.shape[1] // key.shape[1]
        means = torch.stack([key[0, :, 8 * one : 8 * one + 8].mean(1) for one in range(blocks)], 1)
        means = means.repeat_interleave(group, 0)
        scores = torch.einsum("hrd,hbd->rb", query[0], means) / query.shape[1]
        free = torch.arange(1, blocks - 1)
        shares = scores[:, free].softmax(-1).amax(0)
        best = free[shares.argsort(descending=True)[: count - 2]]
        return {0, blocks - 1, *best.tolist()}


def test_draft_selects_is_what_the_verification_looks_at(model):
    """GSA, each round by itself; what the model's own queries would select is often something else."""
    _, _, sparse, (heard, watched) = sparsely(
        model, draft=draft_model(), watch=lambda sparse: (Overheard(sparse), Masked(sparse)),
        draft_selects=True, lock=False,
    )  # fmt: skip
    assert heard.checked > 20
    assert heard.differing > heard.checked / 2
    assert sparse.metrics.dense_steps == 0, "the draft has selected before the first round"
    for expected, got in watched.calls:
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_draft_that_selects_looks_at_all_itself(model):
    proposed = []
    for share in (1.0, 0.3):
        draft, seen = draft_model(), []
        draft.register_forward_hook(observer(lambda *given, seen=seen: seen.append(given[-1].logits[:, -1])))
        sparsely(model, new_tokens=3, draft=draft, draft_selects=True, share=share)
        proposed.append(torch.cat(seen[:3]))
    torch.testing.assert_close(*proposed, rtol=0, atol=0)


def constant(draft: Any, tokens: int) -> Any:
    """A draft that proposes as many tokens each round."""
    draft.generation_config.num_assistant_tokens = tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return draft


def test_held_selection_of_the_draft_ages_by_what_is_accepted(model):
    copy = constant(tiny_model("llama"), 3)  # everything is accepted
    copy.set_attn_implementation(model.config._attn_implementation)
    settings = {"draft_selects": True, "share": 0.9999, "checkpoint_interval": 8}
    sparse = sparsely(model, new_tokens=40, draft=copy, **settings)[2]
    metrics = sparse.metrics
    assert metrics.full_rounds == metrics.rounds > 6
    assert metrics.kept, "compared after eight tokens, which is two rounds"
    assert metrics.locks == (1 + metrics.unlocks / len(sparse.layers)) * len(sparse.layers)


def test_scores_of_a_draft_are_forgotten_in_a_round_that_sees_everything(model, monkeypatch):
    monkeypatch.setattr("hf_blend.sparse.session.MOST_STEP_TOKENS", 3)

    def listening(sparse):
        begin, heard = sparse.begin_step, []

        def begun(tokens):
            said = len(sparse._selecting.scores)
            is_sparse = begin(tokens)
            heard.append((said, is_sparse, len(sparse._selecting.scores)))
            return is_sparse

        monkeypatch.setattr(sparse, "begin_step", begun)
        return heard

    draft = constant(draft_model(), 5)
    *_, heard = sparsely(model, new_tokens=12, draft=draft, watch=listening, draft_selects=True)
    seen_whole = [(said, left) for said, is_sparse, left in heard if not is_sparse and said]
    assert seen_whole
    assert not any(left for _, left in seen_whole)


def test_draft_that_is_missing_or_has_another_vocabulary_is_refused_by_name(model):
    size = model.config.vocab_size
    padded, other = (tiny_model("llama", vocab_size=size + more) for more in (1024, 1025))
    with sparse_decoding(model, new_cache(model), draft=padded):
        pass
    with pytest.raises(ConfigError, match="draft_selects is True, but draft is None"):
        sparsely(model, draft_selects=True)
    for selects in (False, True):
        with pytest.raises(ConfigError, match=f"the draft knows {size + 1025} tokens, expected the {size} of the"):
            sparsely(model, draft=other, draft_selects=selects)


@pytest.mark.parametrize("kind", ["falcon", "jetmoe"])  # in its own code; of keys that it repeats itself
def test_sparse_decoding_refuses_attention_that_no_function_can_take(kind):
    with pytest.raises(UnsupportedModelError, match=rf"(?i)layer 0 of {kind}.*code of its own.*that it repeats"):
        sparsely(tiny_model(kind))


def test_random_method_is_the_same_luck_for_the_same_query_and_uniform():
    method = plugins.load("sparse.methods", "random")({})
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 50, 8, 16, generator=generator)
    queries = torch.randn(2, 2, 3, 40, 16, generator=generator)
    blocks = method.represent(keys, None)
    scores = method.score(queries, blocks, None)
    assert scores.shape == (2, 40, 50)
    assert torch.equal(scores[:, 7:8], method.score(queries[:, :, :, 7:8], blocks, None))
    assert torch.equal(scores[:, :, 9:], method.score(queries, blocks[:, :, 9:], None))
    chosen = scores.topk(10).indices.flatten().bincount(minlength=50) / 80
    assert (chosen - 0.2).abs().max() < 0.2, "no block is preferred"
    assert abs(float(scores.mean()) - 0.5) < 0.03


def test_sparse_decoding_selects_from_full_layers_alone():
    gemma = tiny_model("gemma3_text")
    sparse = sparsely(gemma)[2]
    kinds = gemma.config.layer_types
    assert set(sparse.layers) == {n for n, kind in enumerate(kinds) if kind == "full_attention"}
    with pytest.raises(UnsupportedModelError, match="windows"):
        sparsely(tiny_model("mistral"))


def test_sparse_config_refuses_what_makes_no_sense():
    for settings in ({"share": 0.0}, {"share": 1.5}, {"block_tokens": 0}, {"lock_duration": 0}):
        ((name, value),) = settings.items()
        with pytest.raises(ConfigError, match=f"{name} is {value}"):
            SparseConfig(**settings)


def test_kept_mass_of_all_blocks_is_one(model):
    for share, least in ((0.9999, 0.9999), (0.3, 0.2)):
        assert least < sparsely(model, watch_mass=True, share=share)[2].kept_mass < 1.0001


# The lock's state machine against a plain model of its description, over random programs.

SIZE = 4
BLOCKS = st.sets(st.integers(0, 9), min_size=3, max_size=3).map(lambda some: tuple(sorted(some)))
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

    def __init__(self, config: SparseConfig) -> None:
        self.config, self.blocks, self.age, self.unchecked = config, None, 0, 0
        self.counts = dict.fromkeys(("locks", "unlocks", "kept", "changed"), 0)

    def unlock(self) -> None:
        self.counts["unlocks"] += self.blocks is not None
        self.blocks = None

    def get(self, new: tuple[int, ...], steps: int) -> tuple[int, ...]:
        if self.blocks is not None and (not self.config.lock or self.age >= self.config.lock_duration):
            self.unlock()
        if self.blocks is None:
            self.counts["locks"] += 1
            self.blocks, self.age, self.unchecked = new, 0, 0
        elif self.unchecked >= self.config.checkpoint_interval:
            added, removed = set(new) - set(self.blocks), set(self.blocks) - set(new)
            self.unchecked = 0
            if len(added) + len(removed) <= self.config.update_threshold:
                self.counts["kept"] += 1
            else:
                self.counts["changed"] += 1
                self.blocks, self.age = new, 0
        self.age, self.unchecked = self.age + steps, self.unchecked + steps
        return self.blocks


@example(
    SparseConfig(block_tokens=SIZE, checkpoint_interval=9, update_threshold=0, lock_duration=3),
    [((0, 1, 2), 2), ((3, 4, 5), 2), ((6, 7, 8), 1)],
)
@given(CONFIGS, PROGRAMS)
def test_selection_lock_does_what_is_described(config, program):
    metrics = SparseMetrics()
    lock, plain = SelectionLock(config, metrics), Described(config)
    for one in program:
        if one == "unlock":
            lock.unlock()
            plain.unlock()
            assert lock.selection is None
            continue
        asked: list[int] = []
        due = lock.is_due
        got = lock.get(lambda one=one, asked=asked: asked.append(1) or Selection(one[0], 40), one[1])
        assert got.blocks == plain.get(*one)
        assert bool(asked) == due, "a selection is made only when it is needed"
    assert {name: getattr(metrics, name) for name in plain.counts} == plain.counts


def test_differences_counts_only_blocks_that_both_selections_could_choose():
    older, newer = Selection((0, 3, 8, 9), 40), Selection((0, 4, 10, 11), 48)
    assert older.differences(newer, SIZE) == 4  # 3, 8, 9 and 4: blocks 10 and 11 were in the older one's tail
    assert newer.differences(older, SIZE) == 4


REQUESTS = st.lists(st.tuples(st.sets(st.integers(0, 9)), st.integers(10, 13)), min_size=1, max_size=4)


@given(REQUESTS, st.integers(52, 70))
def test_layout_shows_each_request_its_blocks_and_its_tail_once(requests, total):
    selections = []
    for some, tail in requests:
        selections.append(Selection(tuple(sorted(some | set(range(10, tail)) - {11})), tail * SIZE))
    layout = Layout(selections, SIZE)
    columns, seen = layout.columns(total), layout.seen(total)
    for row, one in enumerate(selections):
        inside = [block * SIZE + place for block in one.blocks for place in range(SIZE)]
        shown = columns[row] if seen is None else columns[row][seen[row]]
        assert sorted(shown.tolist()) == sorted([*inside, *range(one.tail, total)])
