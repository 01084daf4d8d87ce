# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What every selector promises, checked on every selector that is found; then what each of them is for."""

import math
import os
from dataclasses import replace

import pytest
import torch

from hf_blend import plugins
from hf_blend.errors import ConfigError
from hf_blend.prefill.rows import highest
from hf_blend.selectors.attention import Attention
from hf_blend.selectors.base import Selector, TokenView

SELECTORS = [name for name in plugins.describe("selectors") if name != "learned"]  # which needs a probe, see below
CHUNKS, QUESTION, LAYERS, CHECK = (7, 12, 5), 4, 4, 1
each = pytest.mark.parametrize("name", SELECTORS)


def selector(name, seed=0, **options):
    return plugins.load("selectors", name)(options, seed)


def view(seeds=(0,), pad=0):
    """What a selector sees at the check layer: three chunks and a question, `pad` columns from the left."""
    spans = [(number, place, length) for number, length in enumerate(CHUNKS) for place in range(length)]
    spans += [(-1, -1, -1)] * QUESTION
    number, offset, length = (torch.tensor(part).expand(len(seeds), -1) for part in zip(*spans, strict=True))
    states = [_states(seed, len(spans)) for seed in seeds]
    fresh, stored, truth = (
        [tuple(torch.stack([one[kind][layer][part] for one in states]) for part in (0, 1)) for layer in range(LAYERS)]
        for kind in ("fresh", "stored", "truth")
    )
    columns = torch.arange(pad, pad + len(spans)).expand(len(seeds), -1)
    attention = _attention(seeds, columns, pad)
    return TokenView(
        CHECK, columns, number >= 0, number, offset, length,
        fresh[CHECK], stored[CHECK], lambda: truth, lambda layer: stored[layer], lambda layer: stored[layer],
        lambda: attention, lambda *wanted: _probe(attention, *wanted), LAYERS,
    )  # fmt: skip


def _attention(seeds, columns, pad):
    """Random queries, keys and values of every column, those of the padding among the keys hidden."""
    drawn = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(1000 + seed)
        drawn.append([torch.randn(heads, columns.shape[1], 6, generator=generator) for heads in (4, 2, 2)])
    queries, keys, values = (torch.stack(part) for part in zip(*drawn, strict=True))
    keys, values = (torch.nn.functional.pad(part, (0, 0, pad, 0)) for part in (keys, values))
    places = torch.arange(keys.shape[2])
    mask = (places <= columns[..., None]) & (places >= pad)
    return Attention(queries, keys, values, columns, 0, mask[:, None], 6**-0.5)


def _probe(attention, hear, layers, anchors):
    """Tell of the same attention, of the last rows only, as if it were that of every layer."""
    rows = slice(-QUESTION, None)
    part = replace(
        attention, queries=attention.queries[:, :, rows], columns=attention.columns[:, rows],
        mask=attention.mask[:, :, rows],
    )  # fmt: skip
    for layer in range(LAYERS) if layers is None else layers:
        hear(layer, part, part.weights(slice(None)))


def _states(seed, tokens):
    generator = torch.Generator().manual_seed(seed)
    kinds = ("fresh", "stored", "truth")
    return {
        kind: [tuple(torch.randn(2, tokens, 6, generator=generator) for _ in "kv") for _ in range(LAYERS)]
        for kind in kinds
    }


def chosen(one, seen, ratio):
    counts = torch.tensor([one.count(ratio, int(tokens)) for tokens in seen.reusable.sum(1)])
    return highest(one.score(seen), seen.reusable, counts)


@each
def test_scores_are_finite_float32_one_for_each_token(name):
    scores = selector(name).score(view((0, 1)))
    assert scores.shape == (2, sum(CHUNKS) + QUESTION)
    assert scores.dtype == torch.float32
    assert torch.isfinite(scores[view((0, 1)).reusable]).all()


@each
def test_scores_are_a_function_of_what_is_seen(name):
    assert torch.equal(selector(name).score(view()), selector(name).score(view()))


@each
def test_what_is_seen_is_not_written(name):
    seen = view()
    before = [part.clone() for part in (seen.columns, seen.reusable, seen.chunk, *seen.fresh, *seen.stored)]
    selector(name).score(seen)
    after = (seen.columns, seen.reusable, seen.chunk, *seen.fresh, *seen.stored)
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))


@each
def test_an_entry_is_scored_alike_beside_any_neighbours_and_behind_any_padding(name):
    together, alone = selector(name).score(view((3, 0, 5))), selector(name).score(view((0,)))
    torch.testing.assert_close(together[1], alone[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(selector(name).score(view((0,), pad=9)), alone, rtol=1e-6, atol=0)


@each
def test_what_stands_where_nothing_is_reusable_does_not_matter(name):
    seen, other = view(), view((8,))
    mixed = tuple(
        torch.where(seen.reusable[:, None, :, None], *pair) for pair in zip(seen.fresh, other.fresh, strict=True)
    )
    assert torch.equal(
        chosen(selector(name), replace(seen, fresh=mixed), 0.3)[seen.reusable],
        chosen(selector(name), seen, 0.3)[seen.reusable],
    )


@each
def test_sets_have_exactly_the_counted_size_and_are_nested(name):
    one, seen, before = selector(name), view(), torch.zeros(1, sum(CHUNKS) + QUESTION, dtype=torch.bool)
    for ratio in (0.0, 0.01, 0.15, 0.3, 0.5, 0.9, 1.0):
        marked = chosen(one, seen, ratio)
        assert int(marked.sum()) == one.count(ratio, sum(CHUNKS))
        assert not (before & ~marked).any()
        assert not (marked & ~seen.reusable).any()
        before = marked


@each
def test_the_count_is_a_share_or_a_fixed_end_of_the_scale(name):
    one = selector(name)
    counts = [one.count(ratio, 100) for ratio in (0.0, 0.15, 0.5, 1.0)]
    assert counts in ([0, 15, 50, 100], [0] * 4, [100] * 4)


@each
def test_an_unknown_option_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="has no option 'frobnicate'"):
        selector(name, frobnicate=1)


@each
def test_without_states_only_those_score_that_declare_it(name):
    one = selector(name)
    if one.needs_kv or one.needs_full_prefill:
        pytest.skip("it has to see K and V")
    bare = replace(view(), fresh=None, stored=None, full_prefill=None, stored_at=None)
    if not one.needs_attention:
        bare = replace(bare, attention=None)
    assert torch.equal(one.score(bare), one.score(view()))


@pytest.mark.parametrize("tokens", [1, 3, 20, 100, 1007])
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.07, 0.15, 0.29, 0.3, 0.57, 1.0])
def test_the_budget_is_the_ceiling_of_the_share_without_the_noise_of_floating_point(ratio, tokens):
    hundredths = round(ratio * 100)
    assert selector("kv-deviation").count(ratio, tokens) == -(-hundredths * tokens // 100)


@pytest.mark.parametrize(("on", "parts"), [("v", (1,)), ("k", (0,)), ("kv", (0, 1))])
def test_kv_deviation_is_the_squared_distance_over_heads_and_width(on, parts):
    seen, got = view(), selector("kv-deviation", on=on).score(view())
    for token in range(sum(CHUNKS)):
        wanted = sum(float(((seen.fresh[part] - seen.stored[part])[0, :, token] ** 2).sum()) for part in parts)
        assert math.isclose(float(got[0, token]), wanted, rel_tol=1e-5)


def test_kv_deviation_of_keys_does_not_depend_on_where_they_were_turned_to():
    seen = view()
    angle = torch.rand(seen.columns.shape[1], 1)
    turned = [torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
              for a, b in (part[0].chunk(2, -1) for part in (seen.fresh, seen.stored))]  # fmt: skip
    moved = replace(seen, fresh=(turned[0], seen.fresh[1]), stored=(turned[1], seen.stored[1]))
    one = selector("kv-deviation", on="k")
    torch.testing.assert_close(one.score(moved), one.score(seen))


def test_kv_deviation_sums_in_float32():
    seen = view()
    coarse = replace(
        seen, fresh=tuple(map(torch.Tensor.half, seen.fresh)), stored=tuple(map(torch.Tensor.half, seen.stored))
    )
    huge = replace(coarse, fresh=tuple(part * 1000 for part in coarse.fresh))
    assert torch.isfinite(selector("kv-deviation").score(huge)).all()


@pytest.mark.parametrize(("name", "option", "value"), [("kv-deviation", "on", "q"), ("boundary", "edge", "middle")])
def test_an_unknown_choice_is_refused_with_those_that_exist(name, option, value):
    with pytest.raises(ConfigError, match=rf"(?s){value}.*give {option}="):
        selector(name, **{option: value}).score(view())


@pytest.mark.parametrize(
    ("edge", "wanted"),
    [("head", [0, 1, 7, 8, 19, 20]), ("tail", [5, 6, 17, 18, 22, 23]), ("both", [0, 6, 7, 18, 19, 23])],
)
def test_boundary_takes_each_chunk_from_its_edge(edge, wanted):
    marked = chosen(selector("boundary", edge=edge), view(), 6 / sum(CHUNKS))
    assert marked[0].nonzero().flatten().tolist() == wanted


def test_random_differs_by_seed_and_looks_like_a_draw():
    draws = [selector("random", seed=seed).score(view())[0] for seed in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    assert 0 <= torch.stack(draws).min() < 0.2 < 0.8 < torch.stack(draws).max() < 1


def test_the_oracle_looks_at_the_layers_from_the_check_layer_on():
    seen, calls = view(), []
    stored_at = lambda layer: calls.append(layer) or seen.stored_at(layer)  # noqa: E731
    selector("oracle").score(replace(seen, stored_at=stored_at))
    assert calls == list(range(CHECK, LAYERS))


def test_the_oracle_lets_no_layer_drown_the_others():
    seen, truth = view(), view().full_prefill()
    loud = [tuple(part * (1000 if layer == 2 else 1) for part in pair) for layer, pair in enumerate(truth)]
    stored_at = lambda layer: tuple(part * (1000 if layer == 2 else 1) for part in seen.stored_at(layer))  # noqa: E731
    one = selector("oracle")
    torch.testing.assert_close(
        one.score(replace(seen, full_prefill=lambda: loud, stored_at=stored_at)), one.score(seen), rtol=1e-4, atol=1e-6
    )


def test_a_selector_without_a_score_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Selector({})


def test_the_learned_selector_follows_its_probe_and_refuses_one_of_another_model(tmp_path):
    from safetensors.torch import save_file

    seen = view()
    weight = torch.randn(2, 6, generator=torch.Generator().manual_seed(3))
    save_file({"values.1": weight}, tmp_path / "probe.safetensors")
    got = selector("learned", path=str(tmp_path / "probe.safetensors")).score(seen)
    values = seen.stored_alone(1)[1]
    assert torch.allclose(got, (values * weight[:, None]).sum(dim=(1, 3)), atol=1e-5)
    for name, tensors, said in (
        ("layer", {"values.9": weight}, "reads layer 9, expected at most 3"),
        ("shape", {"values.0": weight[:1]}, "expected \\(2, 6\\)"),
        ("empty", {"other": weight}, "expected weights named"),
        ("no number", {"values.x": weight}, "expected weights named"),
        ("before the first", {"values.-1": weight}, "expected weights named"),
        ("NaN", {"values.0": weight * float("nan")}, "holds NaN or infinity"),
    ):
        save_file(tensors, tmp_path / name)
        with pytest.raises(ConfigError, match=said):
            selector("learned", path=str(tmp_path / name)).score(seen)
    with pytest.raises(ConfigError, match="cannot be read"):
        selector("learned", path=str(tmp_path / "nothing")).score(seen)


def test_the_learned_selector_needs_its_probe_and_names_the_rule_that_needs_none():
    for options in ({}, {"path": ""}):
        with pytest.raises(ConfigError, match=r"path='', expected the file of a probe.*fitting.*selector value-norm"):
            selector("learned", **options)
    seen = view()
    values = seen.stored_alone(LAYERS - 1)[1]
    assert torch.allclose(selector("value-norm").score(seen), torch.linalg.vector_norm(values, dim=(1, 3)))


def test_a_probe_that_was_fitted_again_takes_the_place_of_the_one_that_was_read(tmp_path):
    from safetensors.torch import save_file

    seen, scores = view(), []
    for sign in (1.0, -1.0):
        save_file({"values.1": torch.full((2, 6), sign)}, tmp_path / "probe")
        os.utime(tmp_path / "probe", (2, 2 + sign))  # clocks of file systems are coarse
        scores.append(selector("learned", path=str(tmp_path / "probe")).score(seen))
    assert torch.equal(scores[0], -scores[1])


def test_random_with_free_layers_waits_for_the_check_layer():
    assert not selector("random").needs_kv
    assert selector("random", free_layers=True).needs_kv
    assert torch.equal(selector("random", free_layers="true").score(view()), selector("random").score(view()))
