# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every corrector promises, checked on every corrector that is found; then what each of them is for."""

import pytest
import torch

from hf_blend import plugins
from hf_blend.correctors.base import LayerView
from hf_blend.errors import ConfigError
from tests.asking import prefilled
from tests.conftest import random_pieces

CORRECTORS = plugins.describe("correctors")
WORKING = [name for name in CORRECTORS if name != "none"]
each = pytest.mark.parametrize("name", CORRECTORS)


def view(seed=0, tokens=10, batch=1):
    """Two chunks of four, of each of which one token is fresh, and two tokens of question."""
    generator = torch.Generator().manual_seed(seed)
    stored = tuple(torch.randn(batch, 2, tokens, 6, generator=generator) for _ in "kv")
    states = tuple(part.clone() for part in stored)
    fresh = torch.zeros(batch, tokens, dtype=torch.bool)
    fresh[:, [1, 6, 8, 9]] = True
    for part in states:
        part[:, :, fresh[0]] += torch.randn(batch, 2, 4, 6, generator=generator)
    chunk = torch.tensor([0] * 4 + [1] * 4 + [-1] * 2).expand(batch, -1)
    spent = []
    return LayerView(2, chunk, fresh, stored, states, lambda keys, back=False: keys.clone(), spent.append), spent


def corrector(name, **options):
    return plugins.load("correctors", name)(options)


@each
def test_correct_keeps_what_was_computed_to_the_bit(name):
    seen, _ = view()
    before = [part.clone() for part in seen.states]
    corrector(name).correct(seen)
    keep = ~seen.stale[0]
    assert all(torch.equal(was[:, :, keep], now[:, :, keep]) for was, now in zip(before, seen.states, strict=True))
    assert all(torch.isfinite(part).all() for part in seen.states)


@each
def test_unknown_option_and_a_word_for_a_number_are_refused(name):
    with pytest.raises(ConfigError, match="no option 'frobnicate'"):
        corrector(name, frobnicate=1)
    for option in plugins.load("correctors", name).defaults:
        with pytest.raises(ConfigError, match=f"{option}='much'"):
            corrector(name, **{option: "much"})


@pytest.mark.parametrize(("name", "family"), [*zip(WORKING, ("llama", "gpt_neox") * 9, strict=False)])
def test_corrector_changes_stale_layers_for_a_charge_and_nothing_at_ratio_1(shared_model, name, family):
    model, found, given = shared_model(family), {}, {"selector": "kv-deviation"}
    for ratio in (0.3, 1.0):
        for one in (name, "none"):
            found[ratio, one] = prefilled(model, random_pieces(), recompute_ratio=ratio, corrector=one, **given)
    torch.testing.assert_close(found[1.0, name][1], found[1.0, "none"][1], rtol=1e-5, atol=1e-5)
    cache, plain = found[0.3, name][0], found[0.3, "none"][0]
    assert cache.report.charged_budget > plain.report.charged_budget
    assert torch.equal(cache.layers[1].keys, plain.layers[1].keys)  # the check layer is all fresh
    assert not torch.equal(cache.layers[2].keys, plain.layers[2].keys)


def test_mean_shift_undoes_exactly_a_shift_that_all_tokens_of_a_chunk_share():
    seen, spent = view()
    shift = torch.randn(1, 2, 1, 6)
    truth = [part + shift for part in seen.stored]
    for part, true in zip(seen.states, truth, strict=True):
        part[:, :, seen.fresh[0]] = true[:, :, seen.fresh[0]]
    corrector("mean-shift").correct(seen)
    for part, true in zip(seen.states, truth, strict=True):
        torch.testing.assert_close(part[:, :, :8], true[:, :, :8])
    assert sum(spent) > 0


def test_mean_shift_leaves_a_chunk_without_a_fresh_token_and_reads_no_column_outside_chunks():
    (clean, _), (dirty, _) = view(), view()
    for part in dirty.stored:  # columns of the question and of padding have no stored states
        part[:, :, 8] = float("nan")
        part[:, :, 9] = float("inf")
    before = [part.clone() for part in clean.states]
    for one in (clean, dirty):
        one.fresh[:, 6] = False
        corrector("mean-shift").correct(one)
    for was, part, other in zip(before, clean.states, dirty.states, strict=True):
        assert torch.equal(part, other)
        assert torch.equal(was[:, :, 4:8], part[:, :, 4:8])


def test_mean_shift_moves_keys_as_they_would_be_at_position_0():
    (plain, _), (seen, _) = view(), view()
    turned = lambda keys, back=False: keys * (0.5 if back else 2.0)  # noqa: E731
    moved = LayerView(2, seen.chunk, seen.fresh, seen.stored, seen.states, turned, lambda flops: None)
    for one in (moved, plain):
        corrector("mean-shift").correct(one)
    torch.testing.assert_close(moved.states[0], plain.states[0])


def test_temperature_divides_stale_keys_only():
    seen, _ = view()
    corrector("temperature", temperature="0.5").correct(seen)
    stale = seen.stale[0]
    torch.testing.assert_close(seen.states[0][:, :, stale], 2 * seen.stored[0][:, :, stale])
    assert torch.equal(seen.states[1][:, :, stale], seen.stored[1][:, :, stale])


def test_a_selector_that_asks_the_question_does_not_correct_twice(shared_model):
    given = {"recompute_ratio": 0.2, "corrector": "temperature"}
    cache, logits, _ = prefilled(shared_model(), random_pieces(), selector="query-attention", **given)
    [columns] = cache.report.chosen_columns
    given |= {"selector": "explicit", "selector_options": {"columns": columns}}
    again, got, _ = prefilled(shared_model(), random_pieces(), **given)
    assert again.report.chosen_columns == [columns]
    torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)
