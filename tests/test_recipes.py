# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What `hf-blend tune` kept for a model is taken where nothing is said, and only for that model."""

import json
import logging
from dataclasses import replace

import pytest

from hf_blend import BlendCache, BlendConfig, ChunkStore, recipes
from hf_blend.config import BLIND_SELECTOR
from hf_blend.model.fingerprint import fingerprint
from hf_blend.recipes import DEFAULT, MeasuredFamily, Recipe
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"settings": {"selector": "rule.py"}, "source": ""}',
        '{"settings": {"recompute_ratio": 2}, "source": ""}',
        '{"settings": {"seed": 1}, "source": ""}',
    ],
)
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


def test_store_in_memory_keeps_recipe_and_one_in_part_asks_no_question(shared_model):
    model = shared_model()
    store = ChunkStore.open("memory://")
    assert not store.recipes
    store.recipes.put(fingerprint(model), TUNED)
    assert BlendCache(model, store).config.selector == "boundary"
    assert not ChunkStore.open("memory://").recipes
    assert BlendCache(model, ChunkStore.open("memory://", partial=0.5)).config.selector == BLIND_SELECTOR


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


def test_model_of_measured_family_and_width_is_blended_as_measured(shared_model, monkeypatch, tmp_path):
    model = shared_model()
    other = shared_model("qwen3")
    width = model.config.hidden_size
    ramp = MeasuredFamily("toy", "llama", range(width, width + 1), {"selector": "ramp", "recompute_ratio": 0.2})
    monkeypatch.setattr(recipes, "MEASURED", (ramp,))
    store = memory()
    cache = prefilled(model, PIECES, store=store)[0]
    assert cache.config == BlendConfig(0.2, "ramp")
    assert cache.report.recipe == "the rule that measured best on toy"
    assert BlendCache(model, store, recompute_ratio=0.4).config == BlendConfig(0.4, "ramp")
    assert BlendCache(model, store, selector="boundary").config == BlendConfig(selector="boundary")
    assert BlendCache(other, store).config == BlendConfig()
    store.recipes.put(fingerprint(model), Recipe({"selector": "boundary"}, "tuned"))
    assert BlendCache(model, store).config == BlendConfig(selector="boundary")
    monkeypatch.setattr(recipes, "MEASURED", (replace(ramp, hidden_sizes=range(width + 1, 2 * width)),))
    assert memory().recipe(model) is DEFAULT
    monkeypatch.setattr(recipes, "MEASURED", (replace(ramp, settings={}),))
    assert BlendCache(model, memory()).config == BlendConfig()
    assert memory().recipe(model).source == "the default, as no measured rule was better on toy"


def test_measured_families_are_those_of_table_and_differ_from_default_where_it_is_beaten():
    import robust

    table = json.loads((robust.RESULTS / "robust.json").read_text("utf-8"))["rows"]
    table = [row for row in table if row["chunks"] == robust.PASSAGES]
    best = robust.recommended(table)
    assert {family.model for family in recipes.MEASURED} == {*best}
    for family in recipes.MEASURED:
        found = best[family.model]
        expected = {"selector": found.rule, "recompute_ratio": found.ratio} if found.is_told else {}
        assert family.settings == expected
        rules = [row for row in table if row["model"] == family.model and row["method"].endswith("@text")]
        least = min(
            (sum(row["kl"] for row in rules if (row["method"], row["target"]) == way), way)
            for way in {(row["method"], row["target"]) for row in rules if row["target"] == 0.15}
        )
        assert least[1] == (f"{found.rule}@text", found.target)


def test_recipe_whose_rule_needs_question_is_left_out_where_choice_may_not_depend_on_it(shared_model):
    model = shared_model()
    store = ChunkStore.open("memory://")
    store.recipes.put(fingerprint(model), Recipe({"selector": "query-attention"}, "tuned"))
    assert store.recipe(model).source == "tuned"
    assert store.recipe(model, is_blind=True) is DEFAULT
    store.recipes.put(fingerprint(model), Recipe({"selector": "ramp"}, "tuned"))
    assert store.recipe(model, is_blind=True).source == "tuned"


def test_index_says_how_rule_is_found_where_none_was_measured(run, model_folder, tmp_path):
    document = tmp_path / "a.txt"
    document.write_text("The mill is old. Ann owns it.")
    code, _, err = run("index", document, "--model", model_folder, "--store", tmp_path / "kv")
    assert code == 0, err
    assert "hf-blend tune --store finds one, once" in err
