# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A model that nobody measured gets its rule from bundled prompts; one of a measured family has it from the start."""

import json
from dataclasses import replace

import pytest

from hf_blend import BlendCache, BlendConfig, ChunkStore, calibrate, recipes
from hf_blend.errors import PromptError, UnsupportedModelError
from hf_blend.evaluation import calibration
from hf_blend.evaluation.tuning import Point
from hf_blend.model.fingerprint import fingerprint
from hf_blend.recipes import DEFAULT, MeasuredFamily, Recipe
from tests.asking import PIECES, memory, prefilled


def points(reuse=1.0, **left):
    """Figures of full reuse and of rules, by what each leaves and the high end of its interval."""
    named = {"full reuse": (reuse, reuse), **{name.replace("_", "-"): pair for name, pair in left.items()}}
    return {name: Point(name, 0.15, kl, kl / 2, high, kl, 0.3, 0.2, 0.4, 10) for name, (kl, high) in named.items()}


@pytest.fixture
def two_questions(monkeypatch):
    monkeypatch.setattr(calibration, "QUESTIONS", calibration.QUESTIONS[:2])
    monkeypatch.setattr(calibration, "PAGES", 2)


@pytest.mark.parametrize(
    ("left", "choice", "blind"),
    [
        ({"expected_error": (0.3, 0.5), "ramp": (0.4, 0.6), "query_attention": (0.5, 0.7)}, "expected-error", "ramp"),
        ({"expected_error": (0.6, 1.2), "ramp": (0.9, 1.1), "query_attention": (0.5, 1.3)}, "query-attention", "none"),
        ({"expected_error": (0.9, 1.1), "ramp": (0.86, 0.99), "query_attention": (1.2, 2.0)}, "ramp", "ramp"),
        ({"expected_error": (0.9, 1.1), "ramp": (0.86, 1.01), "query_attention": (1.2, 2.0)}, "none", "none"),
    ],
)
def test_rule_that_leaves_least_is_chosen_where_it_is_worth_its_charge(left, choice, blind):
    names = [calibration.choose(points(**left), 0.1, is_blind) for is_blind in (False, True)]
    assert [name.replace("full reuse", "none") for name in names] == [choice, blind]
    assert calibration.choose(points(**left), 0.0) == "full reuse"  # where nothing is lost, nothing is repaired


def test_calibrating_keeps_choice_in_store_and_leaves_model_and_chunks_as_they_were(
    models, untouched, two_questions, tmp_path
):
    model, tokenizer = models["spaces"]
    seen = []
    with ChunkStore.open(tmp_path / "kv") as store, untouched(model):
        found = calibrate(model, tokenizer, store, watch=lambda items, what: seen.append(what) or items)
        assert not list(store.entries())
    assert [point.candidate for point in found.points] == ["full reuse", *calibration.RULES]
    assert {point.n for point in found.points} == {2}
    assert all(point.charged == pytest.approx(0.15, abs=0.03) for point in found.points[1:])
    assert len(seen) == 1
    with ChunkStore.open(tmp_path / "kv") as again:
        cache = BlendCache(model, again)
        assert again.recipes.get(fingerprint(model)).source == found.recipe.source
        assert again.recipe(model, is_blind=True).settings["selector"] in ("ramp", "none")
    kept = {name: getattr(cache.config, name) for name in ("selector", "recompute_ratio")}
    assert kept.items() <= found.recipe.settings.items()
    names = {"full reuse": "none"}
    assert found.recipe.source.startswith("calibrated on 2 bundled prompts: ")
    best = min(found.points, key=lambda point: point.kl).candidate
    assert found.recipe.settings["selector"] in (names.get(best, best), "none")


def test_calibrating_refuses_by_name_what_cannot_be_blended_or_reads_too_little(tiny_model, models, two_questions):
    _, tokenizer = models["spaces"]
    store = memory()
    with pytest.raises(UnsupportedModelError, match="GPT2"):
        calibrate(tiny_model("gpt2", n_embd=32, n_head=2, n_layer=2), tokenizer, store)
    short = tiny_model(vocab_size=len(tokenizer), num_hidden_layers=2, max_position_embeddings=64)
    with pytest.raises(PromptError, match="reads 64 tokens, but 2 bundled pages"):
        calibrate(short, tokenizer, store)
    assert not store.recipes


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


def test_tune_quick_calibrates_and_other_commands_take_its_rule(run, model_folder, tmp_path, two_questions):
    document = tmp_path / "a.txt"
    document.write_text("The mill is old. Ann owns it.")
    words = ("--model", model_folder, "--store", tmp_path / "kv")
    code, _, err = run("index", document, *words)
    assert code == 0, err
    assert "hf-blend tune --quick finds one, once" in err
    code, out, err = run("tune", "--quick", *words, "--json")
    assert code == 0, err
    assert json.loads(out)["is_kept"]
    assert err.count("of full reuse's error, first token") == 1 + len(calibration.RULES)
    ask = ("ask", "Who owns it?", document, *words, "--max-new-tokens", 2)
    assert "Rule for the tokens to recompute: calibrated on 2 bundled prompts" in run(*ask)[2]
    assert "Rule for the tokens" not in run(*ask, "--selector", "ramp")[2]
