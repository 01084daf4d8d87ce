# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The model cards are whole, and say what the committed results say."""

import re

import pytest
from huggingface_hub import ModelCard

from hf_blend import BlendCache, ChunkStore
from hf_blend.evaluation import cards
from hf_blend.evaluation.answering import blend_config
from hf_blend.evaluation.bundled import load_model

FILES = sorted(cards.FOLDER.glob("*.md"))
WANTED = {"license", "library_name", "pipeline_tag", "language", "tags", "metrics", "model-index"}
KNOWN = WANTED | {"base_model", "base_model_relation", "datasets", "model_name"}


def head(path):
    """The keys of the front matter, as they are written."""
    return set(re.findall(r"^([\w-]+):", path.read_text("utf-8").split("---")[1], re.MULTILINE))


def test_every_card_is_as_the_results_make_it():
    assert {path.name for path in FILES} == set(cards.cards())
    for name, text in cards.cards().items():
        assert (cards.FOLDER / name).read_text("utf-8") == text, "run python -m hf_blend.evaluation.cards"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_head_is_whole_and_has_no_misspelt_key(path):
    assert WANTED <= head(path) <= KNOWN
    data = ModelCard(path.read_text("utf-8")).data
    assert data.license == "apache-2.0"
    assert data.eval_results
    for result in data.eval_results:
        assert 0 < result.metric_value <= 1
        assert f"{result.metric_value:.3f}" in path.read_text("utf-8")
        assert result.metric_args["questions"] >= 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_link_of_the_card_leads_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text("utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("recipe", cards.RECIPES, ids=lambda recipe: recipe.name)
def test_the_code_of_the_card_runs(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (cards.FOLDER / f"{recipe.name}.md").read_text("utf-8"), re.DOTALL)
    names = {"model": load_model()[0]}
    exec(code, names)
    assert isinstance(names["cache"], BlendCache)
    assert isinstance(names["store"], ChunkStore)
    assert names["cache"].config == blend_config(recipe.selector, recompute_ratio=recipe.shown_ratio)


def test_a_hand_written_text_stays_behind_its_new_head():
    for name in cards.MODELS:
        text = (cards.FOLDER / f"{name}.md").read_text("utf-8")
        assert cards.model_card(name, text.replace("license: apache-2.0", "licence: mit")) == text
        assert text.count("## Limits") == 1
