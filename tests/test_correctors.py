# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every corrector promises, checked on every corrector that is found; then what each of them is for."""

import pytest
import torch

from hf_blend import BlendCache, ChunkStore, plugins
from hf_blend.correctors.base import LayerView
from hf_blend.errors import ConfigError

CORRECTORS = plugins.describe("correctors")
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
def test_what_was_computed_stays_to_the_bit(name):
    seen, _ = view()
    before = [part.clone() for part in seen.states]
    corrector(name).correct(seen)
    keep = ~seen.stale[0]
    assert all(torch.equal(was[:, :, keep], now[:, :, keep]) for was, now in zip(before, seen.states, strict=True))
    assert all(torch.isfinite(part).all() for part in seen.states)


@each
def test_an_unknown_option_and_a_word_for_a_number_are_refused(name):
    with pytest.raises(ConfigError, match="no option 'frobnicate'"):
        corrector(name, frobnicate=1)
    for option in plugins.load("correctors", name).defaults:
        with pytest.raises(ConfigError, match=f"{option}='much'"):
            corrector(name, **{option: "much"})


@each
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_with_all_recomputed_it_changes_nothing(shared_model, tokenizer, pieces, name, family):
    def logits(corrector_name):
        cache = BlendCache(shared_model(family), ChunkStore.open("memory://"), recompute_ratio=1.0,
                           corrector=corrector_name)  # fmt: skip
        with torch.no_grad():
            inputs = cache.inputs(tokenizer, **pieces())
            return shared_model(family)(**inputs, past_key_values=cache, logits_to_keep=1).logits[:, -1]

    torch.testing.assert_close(logits(name), logits("none"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CORRECTORS if name != "none"])
def test_what_works_changes_stale_layers_and_is_charged(shared_model, tokenizer, pieces, name):
    caches = {}
    for one in (name, "none"):
        caches[one] = BlendCache(shared_model(), ChunkStore.open("memory://"), recompute_ratio=0.3, corrector=one)
        with torch.no_grad():
            inputs = caches[one].inputs(tokenizer, **pieces())
            shared_model()(**inputs, past_key_values=caches[one], logits_to_keep=1)
    assert caches[name].report.charged_budget > caches["none"].report.charged_budget
    assert torch.equal(caches[name].layers[1].keys, caches["none"].layers[1].keys)  # the check layer is all fresh
    assert not torch.equal(caches[name].layers[2].keys, caches["none"].layers[2].keys)


def test_a_shift_that_all_tokens_of_a_chunk_share_is_undone_exactly():
    seen, spent = view()
    shift = torch.randn(1, 2, 1, 6)
    truth = [part + shift for part in seen.stored]
    for part, true in zip(seen.states, truth, strict=True):
        part[:, :, seen.fresh[0]] = true[:, :, seen.fresh[0]]
    corrector("mean-shift").correct(seen)
    for part, true in zip(seen.states, truth, strict=True):
        torch.testing.assert_close(part[:, :, :8], true[:, :, :8])
    assert sum(spent) > 0


def test_a_chunk_without_a_fresh_token_stays():
    seen, _ = view()
    seen.fresh[:, 6] = False
    before = [part.clone() for part in seen.states]
    corrector("mean-shift").correct(seen)
    assert all(torch.equal(was[:, :, 4:8], now[:, :, 4:8]) for was, now in zip(before, seen.states, strict=True))


def test_what_stands_at_no_chunk_may_be_anything():
    """Columns of the question and of padding have no stored states; their place in the buffer is undefined."""
    (clean, _), (dirty, _) = view(), view()
    for part in dirty.stored:
        part[:, :, 8] = float("nan")
        part[:, :, 9] = float("inf")
    for one in (clean, dirty):
        corrector("mean-shift").correct(one)
    for part, other in zip(clean.states, dirty.states, strict=True):
        assert torch.equal(part, other)


def test_keys_are_shifted_as_they_would_be_at_position_0(shared_model, tokenizer, pieces):
    """On a chunk of one repeated token at layer 1 the shift is the same for all only before the turn."""
    seen, _ = view()
    turned = lambda keys, back=False: keys * (0.5 if back else 2.0)  # noqa: E731
    moved = LayerView(2, seen.chunk, seen.fresh, seen.stored, seen.states, turned, lambda flops: None)
    plain, _ = view()
    corrector("mean-shift").correct(moved)
    corrector("mean-shift").correct(plain)
    torch.testing.assert_close(moved.states[0], plain.states[0])


def test_the_temperature_divides_stale_keys_only():
    seen, _ = view()
    corrector("temperature", temperature="0.5").correct(seen)
    stale = seen.stale[0]
    torch.testing.assert_close(seen.states[0][:, :, stale], 2 * seen.stored[0][:, :, stale])
    assert torch.equal(seen.states[1][:, :, stale], seen.stored[1][:, :, stale])


def test_an_unknown_corrector_is_refused_by_name(shared_model):
    with pytest.raises(LookupError, match=r"no plugin named 'mean-shft'.*mean-shift"):
        BlendCache(shared_model(), ChunkStore.open("memory://"), corrector="mean-shft")
