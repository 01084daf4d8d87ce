# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every method on real prompts: what it counts, what it reuses, and that its ends are the ends of the scale."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds import REFERENCE, REFERENCE_TASK

from hf_blend import ChunkStore
from hf_blend.evaluation.blending import make_method, method_names, takes_ratio
from hf_blend.evaluation.folder import RunFolder
from hf_blend.evaluation.methods.prefix_caching import PrefixCaching
from hf_blend.evaluation.tasks.base import Sample, Shape
from hf_blend.evaluation.tasks.hotpotqa import Hotpotqa
from hf_blend.evaluation.trial import EvalConfig, run

NEW_TOKENS = 3
SELECTORS = [name for name in method_names() if takes_ratio(name)]
CACHES = [*SELECTORS, "full-reuse"]  # methods that read stored chunks
BASELINES = {path.stem: str(path) for path in Path(REFERENCE).parents[2].glob("baselines/*.py")}  # methods in files


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model(vocab_size=32000, max_position_embeddings=32768)


@pytest.fixture(scope="module")
def samples(published, mistral_tokenizer):
    path = published / "hotpotqa_natural.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here")
    found = Hotpotqa(mistral_tokenizer, path).samples(2)
    return [replace(one, chunks=one.chunks[:3]) for one in found]


@pytest.fixture(scope="module")
def way(model, mistral_tokenizer):
    def made(name, ratio=0.2, store=None, new_tokens=NEW_TOKENS):
        return make_method(
            name, ratio if takes_ratio(name) else None, model, mistral_tokenizer,
            store or ChunkStore.open("memory://"), new_tokens,
        )  # fmt: skip

    return made


@pytest.fixture(scope="module")
def full(way, samples):
    """Full prefills, with the logits of their own answers."""
    method = way("full-prefill")
    return [method.answer([one], [method.answer([one])[0].ids])[0] for one in samples]


@pytest.fixture(scope="module")
def reuse(way, samples, full):
    return way("full-reuse").answer(samples[:1], [full[0].ids])[0]


def length(sample):
    return 1 + len(sample.prefix) + sum(map(len, sample.chunks)) + len(sample.question)


@pytest.mark.parametrize("name", [*method_names(), *BASELINES.values()])
def test_every_method_answers_and_counts_the_tokens_of_the_whole_prompt(way, samples, full, mistral_tokenizer, name):
    (found,) = way(name).answer(samples[:1], [full[0].ids])
    assert found.prompt_tokens == length(samples[0])
    assert 1 <= len(found.ids) <= NEW_TOKENS
    assert mistral_tokenizer.decode(found.ids, skip_special_tokens=True).strip() == found.text.strip()
    assert found.ttft_ms > 0
    if found.logits is not None:
        assert found.logits.shape == (len(full[0].ids), 32000)


@pytest.mark.parametrize("name", CACHES)
def test_chunks_are_computed_once_and_loaded_ever_after(way, samples, name):
    method = way(name)
    first, again = method.answer(samples[:1])[0], method.answer(samples[:1])[0]
    pieces = len(samples[0].chunks) + 1  # what stands before the chunks is kept like one
    assert (first.computed_chunks, again.computed_chunks, again.loaded_chunks) == (pieces, 0, pieces)
    assert first.reused_tokens == again.reused_tokens == length(samples[0]) - len(samples[0].question)
    assert first.ids == again.ids
    assert first.charged_budget == again.charged_budget


def test_a_chunk_of_another_prompt_is_a_hit_at_any_place(way, samples):
    store = ChunkStore.open("memory://")
    way("full-reuse", store=store).answer(samples[:1])
    moved = Shape(chunk_order="reversed").applied(samples[0])
    (found,) = way("full-reuse", store=store).answer([moved])
    assert (found.computed_chunks, found.loaded_chunks) == (0, 4)
    (other,) = way("full-reuse", store=store).answer([Shape(chunk_tokens=100).applied(samples[0])])
    assert other.loaded_chunks == 1, "cut anew they are other chunks; what stands before them is the same"


@pytest.mark.parametrize("name", SELECTORS)
def test_a_ratio_of_1_is_a_full_prefill_and_a_ratio_of_0_is_full_reuse(way, samples, full, reuse, name):
    store, wanted = ChunkStore.open("memory://"), [full[0].ids]
    (whole,), (none,) = (way(name, ratio, store).answer(samples[:1], wanted) for ratio in (1.0, 0.0))
    assert whole.ids == full[0].ids
    assert (whole.logits - full[0].logits).abs().max() < 1e-3 * full[0].logits.abs().max()
    assert whole.charged_budget > 0.7, "the last layer computes no more than K and V of most tokens"
    assert none.ids == reuse.ids
    assert (none.logits - reuse.logits).abs().max() < 1e-3 * reuse.logits.abs().max()
    assert none.charged_budget < 1


def test_charged_budget_is_all_for_full_prefill_nothing_for_reuse_and_grows_with_the_ratio(full, reuse, way, samples):
    assert (full[0].charged_budget, full[0].reused_tokens) == (1.0, 0)
    assert reuse.charged_budget == 0
    (left,) = way(BASELINES["unaligned_reuse"]).answer(samples[:1], [full[0].ids])
    assert (left.charged_budget, left.reused_tokens) == (0, reuse.reused_tokens)
    assert not torch.allclose(reuse.logits, left.logits, atol=1e-2)
    store = ChunkStore.open("memory://")
    charged = [way("kv-deviation", ratio, store).answer(samples[:1])[0].charged_budget for ratio in (0.05, 0.2, 0.6)]
    assert charged == sorted(set(charged))
    assert charged[0] > 0.05
    assert charged[-1] < 1


def test_prefix_caching_is_a_full_prefill_that_goes_on_from_a_beginning_it_has_seen(way, samples, full):
    method, (first, second) = way("prefix-caching"), samples
    cold, warm, other = (method.answer([one])[0] for one in (first, first, second))
    assert cold.ids == warm.ids == full[0].ids
    assert other.ids == full[1].ids
    kept, chunks = 1 + len(first.prefix), sum(map(len, first.chunks))
    assert (cold.reused_tokens, cold.charged_budget) == (0, 1.0)
    assert warm.reused_tokens == kept + len(first.chunks[0])
    assert warm.charged_budget == pytest.approx(1 - len(first.chunks[0]) / chunks)
    assert (other.reused_tokens, other.charged_budget) == (kept, 1.0), "the instruction alone is the same"


@pytest.mark.parametrize("name", ["map_reduce", "map_rerank"])
def test_asking_chunk_by_chunk_is_charged_for_every_prompt_that_is_asked(way, samples, name):
    sample = samples[0]
    (found,) = way(BASELINES[name]).answer([sample])
    alone = length(sample) - sum(map(len, sample.chunks))
    parts = len(sample.chunks) * alone + sum(map(len, sample.chunks))
    work = found.charged_budget * length(sample)
    if name == "map_rerank":
        assert work == pytest.approx(parts)
    else:
        assert parts + alone < work <= parts + alone + len(sample.chunks) * 4 * NEW_TOKENS


@pytest.mark.parametrize("name", ["full-prefill", "full-reuse", "boundary", "kv-deviation"])
def test_samples_side_by_side_get_what_they_get_alone(way, samples, full, name):
    method, wanted = way(name), [one.ids for one in full]
    together = method.answer(samples, wanted)
    for sample, ids, found in zip(samples, wanted, together, strict=True):
        (alone,) = method.answer([sample], [ids])
        assert (found.ids, found.prompt_tokens) == (alone.ids, alone.prompt_tokens)
        assert (found.logits - alone.logits).abs().max() < 1e-3 * alone.logits.abs().max()
        assert found.ttft_ms is None


def test_the_answer_of_a_full_prefill_is_what_its_own_logits_say(full):
    for found in full:
        assert tuple(found.logits.argmax(-1).tolist()) == found.ids


def test_a_space_in_front_of_an_answer_is_kept_and_blank_lines_are_not(way, mistral_tokenizer):
    method = way("full-prefill")
    assert method._text(28793, mistral_tokenizer.encode("x] Yes", add_special_tokens=False)[2:]) == " Yes"
    lines = mistral_tokenizer.encode("x]\n \nParis\nLyon", add_special_tokens=False)[2:]
    assert method._text(28793, lines) == "Paris\nLyon"


def test_prefix_caching_is_timed_before_it_has_seen_the_prompt_in_a_run_side_by_side_too(tmp_path, monkeypatch):
    answered, answer = [], PrefixCaching.answer
    monkeypatch.setattr(
        PrefixCaching, "answer", lambda self, *given: answered.append(given[0][0].id) or answer(self, *given)
    )
    trial = EvalConfig((REFERENCE_TASK,), (REFERENCE,), ("prefix-caching",), limit=3, batch=3)
    with RunFolder(tmp_path / "run", trial.settings) as folder:
        run(trial, folder)
        times = {line["method"]: line["ttft_ms"] for line in folder.lines.values()}
    assert len(answered) == len(set(answered)) == 3
    assert min(times.values()) > 0


@pytest.mark.parametrize("name", ["full-prefill", "prefix-caching", "full-reuse", "kv-deviation"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_model_with_windows_gives_its_logits_too(shared_model, tokenizer, pieces, family, name):
    model, drawn, wanted = shared_model(family, sliding_window=16), pieces(), [(5, 90, 17, 40)]
    sample = Sample("s", (*drawn["prefix"][1:],), (*map(tuple, drawn["chunks"]),), (*drawn["question"],), ("a",))
    ratio = 0.2 if takes_ratio(name) else None
    ways = [make_method(name, ratio, model, tokenizer, ChunkStore.open("memory://"), count) for count in (1, 5)]
    short, long = (one.answer([sample], wanted)[0].logits for one in ways)
    assert (short - long).abs().max() < 1e-3 * long.abs().max()
    if name in ("full-prefill", "prefix-caching"):
        ids = torch.tensor([[*drawn["prefix"], *sum(drawn["chunks"], []), *drawn["question"], *wanted[0]]])
        with torch.no_grad():
            stock = model(ids, use_cache=False).logits[0, -5:-1]
        assert (long - stock).abs().max() < 1e-3 * stock.abs().max()


def test_run_says_which_chunks_were_new_and_a_complete_one_loads_no_model(model_folder, tmp_path):
    trial = EvalConfig(("needle",), (model_folder,), ("full-reuse",), limit=2, most_chunks=2)
    with RunFolder(tmp_path, trial.settings) as folder:
        run(trial, folder)
        computed = {(line["id"], line["method"]): line["computed_chunks"] for line in folder.lines.values()}
    assert computed == {
        (f"needle-{number}", method): 3 - number for number in (0, 1) for method in ("full-prefill", "full-reuse")
    }, "the text before the chunks once, the two chunks of each"
    with RunFolder(tmp_path, trial.settings) as folder:
        run(trial, folder, load=None)
        assert len(folder.lines) == 4
