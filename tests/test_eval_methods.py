# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every method on real prompts: what it counts, what it reuses, and that its ends are the ends of the scale."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds import REFERENCE

from hf_blend.evaluation.blending import make_method, method_names, takes_ratio
from hf_blend.evaluation.folder import RunFolder
from hf_blend.evaluation.tasks.hotpotqa import Hotpotqa
from hf_blend.evaluation.trial import EvalConfig, run
from tests.asking import memory

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
        if not takes_ratio(name):
            ratio = None
        return make_method(name, ratio, model, mistral_tokenizer, store or memory(), new_tokens)

    return made


@pytest.fixture(scope="module")
def full(way, samples):
    """Full prefills, with the logits of their own answers."""
    method = way("full-prefill")
    answers = []
    for sample in samples:
        (first,) = method.answer([sample])
        answers += method.answer([sample], [first.ids])
    return answers


@pytest.fixture(scope="module")
def reuse(way, samples, full):
    (answer,) = way("full-reuse").answer(samples[:1], [full[0].ids])
    return answer


def length(sample):
    return 1 + len(sample.prefix) + sum(map(len, sample.chunks)) + len(sample.question)


@pytest.mark.parametrize("name", [*method_names(), *BASELINES.values()])
def test_every_method_answers_and_counts_tokens_of_whole_prompt(way, samples, full, mistral_tokenizer, name):
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
    (first,) = method.answer(samples[:1])
    (again,) = method.answer(samples[:1])
    pieces = len(samples[0].chunks) + 1  # what stands before the chunks is kept like one
    assert first.computed_chunks == pieces
    assert again.computed_chunks == 0
    assert again.loaded_chunks == pieces
    assert first.reused_tokens == again.reused_tokens == length(samples[0]) - len(samples[0].question)
    assert first.ids == again.ids
    assert first.charged_budget == again.charged_budget


def test_charged_budget_is_all_for_full_prefill_nothing_for_reuse_and_grows_with_ratio(full, reuse, way, samples):
    assert full[0].charged_budget == 1.0
    assert full[0].reused_tokens == 0
    assert reuse.charged_budget == 0
    (left,) = way(BASELINES["unaligned_reuse"]).answer(samples[:1], [full[0].ids])
    assert left.charged_budget == 0
    assert left.reused_tokens == reuse.reused_tokens
    assert not torch.allclose(reuse.logits, left.logits, atol=1e-2)
    store = memory()
    charged = 0.05
    for ratio in (0.05, 0.2, 0.6):
        (answer,) = way("kv-deviation", ratio, store).answer(samples[:1])
        assert charged < answer.charged_budget < 1
        charged = answer.charged_budget


def test_run_says_which_chunks_were_new_and_complete_one_loads_no_model(model_folder, tmp_path):
    trial = EvalConfig(("needle",), (model_folder,), ("full-reuse",), limit=2, most_chunks=2)
    with RunFolder(tmp_path, trial.settings) as folder:
        run(trial, folder)
    assert len(folder.lines) == 4
    for line in folder.lines.values():
        expected = {"needle-0": 3, "needle-1": 2}[
            line["id"]
        ]  # the text before the chunks once, the two chunks of each
        assert line["computed_chunks"] == expected
        is_full = line["method"] == "full-prefill"
        assert (line["kl"] == 0) == is_full, "each is paired with full prefill"
    with RunFolder(tmp_path, trial.settings) as folder:
        run(trial, folder, load=None)
        assert len(folder.lines) == 4
