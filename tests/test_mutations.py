# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The checks notice what goes wrong in practice: each mistake is made on purpose, and one must fail."""

from contextlib import contextmanager
from types import SimpleNamespace

import families
import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from hf_blend.model.anatomy import text_config
from hf_blend.model.calibrate import rotary_styles
from hf_blend.model.capture import capture
from hf_blend.model.row_masks import RowMask
from hf_blend.prefill import blend, realign, row_masks
from hf_blend.verify.model_under_test import ModelUnderTest, attentions
from hf_blend.verify.runner import measure

CHECKS = [name for name in families.CHECKS if name != "untouched"]


def turned_too_far(monkeypatch, _):
    """Every key one position beyond its place."""
    compose = realign.compose
    shifted = lambda style, old, new: compose(style, old, tuple(part.roll(1, 0) for part in new))  # noqa: E731
    monkeypatch.setattr(realign, "compose", shifted)


def theta_of_the_other_layers(monkeypatch, model):
    """Every layer's keys turned by the table of another kind of layer."""
    learn, seen = realign.Realigner.set_table, {}

    def wrong(self, layer, table, *rest):
        seen.setdefault(id(self), []).append(table)
        others = [other for other in seen[id(self)] if other is not None and table is not None and other is not table]
        learn(self, layer, others[0] if others else table, *rest)

    monkeypatch.setattr(realign.Realigner, "set_table", wrong)


def changed_mask(monkeypatch, change):
    row_mask = row_masks.row_mask

    def wrong(model_mask, rows, past, keys, implementation, *rest):
        mask = row_mask(model_mask, rows, past, keys, implementation, *rest)
        plain = mask.as_subclass(torch.Tensor)
        visible = plain if plain.dtype == torch.bool else plain == 0
        visible = change(visible.clone())
        if plain.dtype == torch.bool:
            return RowMask.of(visible) if isinstance(mask, RowMask) else visible
        return torch.zeros_like(plain).masked_fill_(~visible, torch.finfo(plain.dtype).min)

    monkeypatch.setattr(row_masks, "row_mask", wrong)


def window_off_by_one(monkeypatch, _):
    """Every row misses the first key that it should see."""

    def change(visible):
        first = visible.long().argmax(-1, keepdim=True)
        several = visible.sum(-1, keepdim=True) > 1
        return visible & ~(torch.zeros_like(visible).scatter(-1, first, True) & several)

    changed_mask(monkeypatch, change)


def mask_shifted_by_one(monkeypatch, _):
    """Every row sees one key too few at its end: its own."""

    def change(visible):
        last = visible.shape[-1] - 1 - visible.flip(-1).long().argmax(-1, keepdim=True)
        several = visible.sum(-1, keepdim=True) > 1
        return visible & ~(torch.zeros_like(visible).scatter(-1, last, True) & several)

    changed_mask(monkeypatch, change)


def norm_skipped(monkeypatch, model):
    """The first norm of every layer is left out where a request is blended."""
    enter, end = blend.Prefill.enter, blend.Prefill.end

    def without(self, index, call):
        norm = next(part for name, part in call.layer.named_modules() if "norm" in name.split(".")[-1])
        if "forward" not in vars(norm):
            norm.forward = lambda states, *_, **__: states
        return enter(self, index, call)

    def back(self):
        for module in model.modules():
            vars(module).pop("forward", None)
        end(self)

    monkeypatch.setattr(blend.Prefill, "enter", without)
    monkeypatch.setattr(blend.Prefill, "end", back)


def turns(model):
    return any(style.pairs(torch.ones(1, 8)).numel() for style in rotary_styles(model))


def has_several_tables(model):
    tables = [table for table in capture(model, torch.arange(8, 28)[None]).tables if table is not None]
    return any(not torch.equal(table[0], tables[0][0]) for table in tables)


def has_norm(model):
    layer = next(module for module in model.modules() if isinstance(module, nn.ModuleList))[0]
    return any("norm" in name.split(".")[-1] for name, _ in layer.named_modules())


MUTATIONS = {
    turned_too_far: turns,
    theta_of_the_other_layers: has_several_tables,
    window_off_by_one: lambda _: True,
    mask_shifted_by_one: lambda _: True,
    norm_skipped: has_norm,
}


@contextmanager
def mutated(mutation, model):
    with pytest.MonkeyPatch.context() as monkeypatch:
        mutation(monkeypatch, model)
        try:
            yield
        finally:
            for module in model.modules():
                vars(module).pop("forward", None)


def noticed(model, mutation):
    """Whether a check fails under a mutation, by what it measures: an exception may be the mutation's own."""
    implementation = text_config(model)._attn_implementation
    subject = ModelUnderTest(model)
    assert subject.floor  # measured before anything is broken
    with mutated(mutation, model):
        found = (measure(name, subject, "float32", implementation) for name in CHECKS)
        return any(not one.passed and one.tolerance is not None for one in found)


def tried(name):
    model = tiny_model(name)
    model.set_attn_implementation("sdpa" if "sdpa" in attentions(model) else "eager")
    return model


def test_check_fails_where_something_is_wrong():
    model = tried("llama")
    applying = [mutation for mutation, applies in MUTATIONS.items() if applies(model)]
    assert len(applying) >= 4
    assert [mutation.__name__ for mutation in applying if not noticed(model, mutation)] == []
    implementation = text_config(model)._attn_implementation
    assert measure("ratio_1", ModelUnderTest(model), "float32", implementation).passed, "the mistakes are gone again"


@pytest.mark.slow
def test_every_family_that_is_exact_shows_every_mistake():
    missed, counts = [], SimpleNamespace(families=0, mutations=0)
    for row in families.verify_types():
        if row["supported"]:
            model = tried(row["model"])
            counts.families += 1
            for mutation, applies in MUTATIONS.items():
                if applies(model):
                    counts.mutations += 1
                    missed += [] if noticed(model, mutation) else [(row["model"], mutation.__name__)]
    assert not missed, f"{len(missed)} of {counts.mutations} in {counts.families} families: {missed}"
