# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What `hf-blend tune` kept for a model is taken where nothing is said, and only for that model."""

import json
import logging

import pytest

from hf_blend import BlendCache, BlendConfig, ChunkStore
from hf_blend.model.identity import fingerprint
from hf_blend.recipes import DEFAULT, Recipe
from tests.asking import PIECES, memory, prefilled

TUNED = Recipe({"selector": "boundary", "recompute_ratio": 0.3}, "tuned on 4 prompts")


@pytest.fixture
def store(tmp_path):
    with ChunkStore.open(tmp_path / "kv") as opened:
        yield opened


def test_recipe_of_model_is_taken_said_and_survives_process(shared_model, store, tmp_path):
    model = shared_model()
    assert prefilled(model, PIECES, store=store)[0].report.recipe == "the default"
    store.recipes.put(fingerprint(model), TUNED)
    with ChunkStore.open(tmp_path / "kv") as again:
        cache = prefilled(model, PIECES, store=again)[0]
    assert cache.config.selector == "boundary"
    assert cache.config.recompute_ratio == 0.3
    assert cache.report.recipe == "tuned on 4 prompts"
    assert cache.report.nominal_ratio == 0.3
    other = shared_model("qwen3")
    assert BlendCache(other, store).config == BlendConfig()


def test_arguments_override_recipe(shared_model, store):
    model = shared_model()
    store.recipes.put(fingerprint(model), TUNED)
    assert BlendCache(model, store, recompute_ratio=0.1).config == BlendConfig(0.1, "boundary")
    assert BlendCache(model, store, selector="ramp").config == BlendConfig(selector="ramp")
    assert BlendCache(model, store, BlendConfig(0.2)).config == BlendConfig(0.2)
    assert prefilled(model, PIECES, store=store, selector="ramp")[0].report.recipe == "given by the caller"


BAD = """
{
[]
{"settings": {"selector": "rule.py"}, "source": ""}
{"settings": {"recompute_ratio": 2}, "source": ""}
{"settings": {"seed": 1}, "source": ""}
{"settings": {"selector": "none such"}, "source": ""}
{"settings": {"selector": "ramp", "selector_options": {"none such": 1}}, "source": ""}
{"settings": {"check_layer": 999}, "source": ""}
{"settings": {"selector": ["ramp"]}, "source": ""}
{"settings": {"recompute_ratio": NaN}, "source": ""}
{"settings": {"selector_options": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}, "source": ""}
{"settings": {}}""".split("\n")


@pytest.mark.parametrize("text", [*BAD, "[" * 50_000, " " * 70_000 + "{}"])
def test_recipe_that_cannot_be_read_is_left_out_and_named(shared_model, store, tmp_path, caplog, text):
    model = shared_model()
    store.recipes.put(fingerprint(model), TUNED)
    [path] = (tmp_path / "kv" / "recipes").glob("*.json")
    assert json.loads(path.read_text())["source"] == TUNED.source
    path.write_text(text)
    with ChunkStore.open(tmp_path / "kv") as again, caplog.at_level(logging.WARNING, "hf_blend"):
        assert BlendCache(model, again).config == BlendConfig()
        assert BlendCache(model, again).config == BlendConfig()
    assert [record.getMessage().count(path.name) for record in caplog.records] == [1]


def test_store_in_memory_keeps_recipe(shared_model):
    model = shared_model()
    store = memory()
    assert not store.recipes
    store.recipes.put(fingerprint(model), TUNED)
    assert BlendCache(model, store).config.selector == "boundary"
    assert not memory().recipes


def test_file_that_folder_names_is_never_run(shared_model, tmp_path, caplog):
    model = shared_model()
    ran = tmp_path / "ran"
    plugin = tmp_path / "mine.py"
    plugin.write_text(f"open({str(ran)!r}, 'w').close()\nfrom hf_blend.selectors.random import Random as Mine\n")
    settings = {"selector": str(plugin)}
    folder = tmp_path / "kv" / "recipes"
    folder.mkdir(parents=True)
    path = folder / f"{fingerprint(model)}.json"
    path.write_text(json.dumps({"settings": settings, "source": "a stranger"}), "utf-8")
    with ChunkStore.open(tmp_path / "kv") as store, caplog.at_level(logging.WARNING):
        assert BlendCache(model, store).config == BlendConfig()
        assert "names a file of Python" in caplog.text
        assert not ran.exists()
        path.unlink()
        store.recipes.put(fingerprint(model), Recipe(settings, "mine"))
        assert "kept in this process alone" in caplog.text
    assert not path.exists()


def test_recipe_whose_rule_needs_question_is_left_out_where_choice_may_not_depend_on_it(shared_model, monkeypatch):
    model = shared_model()
    store = memory()
    store.recipes.put(fingerprint(model), Recipe({"selector": "query-attention"}, "tuned"))
    assert store.recipe(model).source == "tuned"
    monkeypatch.setattr(store, "part_loader", lambda cache: None)
    assert store.recipe(model) is DEFAULT
    store.recipes.put(fingerprint(model), Recipe({"selector": "ramp"}, "tuned"))
    assert store.recipe(model).source == "tuned"


def test_index_says_how_rule_is_found_where_none_was_measured(run, model_folder, tmp_path):
    document = tmp_path / "a.txt"
    document.write_text("The mill is old. Ann owns it.")
    code, _, err = run("index", document, "--model", model_folder, "--store", tmp_path / "kv")
    assert code == 0, err
    assert "`hf-blend tune --store` looks once for one that suits" in err
