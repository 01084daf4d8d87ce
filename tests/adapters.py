# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A small model with two adapters of PEFT, and what makes another model of a model object: as `with` blocks.

`held_as_stock` is the oracle of a cache of sequences: a stock prefill of its tokens by the model as it is.
"""

from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from tests.asking import apart
from tests.conftest import build_tiny_model


def adapted(vocabulary=128):
    """A model with two trained adapters, "formal" active; their layers add as much as the model's own."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    where = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    settings = peft.LoraConfig(**where, r=4, lora_alpha=16, init_lora_weights=False)
    torch.manual_seed(7)
    model = build_tiny_model(num_hidden_layers=2, vocab_size=vocabulary, eos_token_id=None, weight_scale=2.0)
    model = peft.get_peft_model(model, settings, adapter_name="formal")
    model.add_adapter("casual", settings)
    return model.eval()


def _weight_of(model):
    return model.get_base_model().model.layers[0].self_attn.k_proj.weight


@contextmanager
def unchanged(_):
    """The same model."""
    yield


def off(model):
    """Without adapters."""
    return model.disable_adapter()


@contextmanager
def switched(model):
    """The other adapter."""
    model.set_adapter("casual")
    yield
    model.set_adapter("formal")


@contextmanager
def merged(model):
    """The adapter's weights in the model's, which have other bits behind the block."""
    model.merge_adapter()
    yield
    model.unmerge_adapter()


@contextmanager
def written(model):
    """A weight written in place."""
    before = _weight_of(model).detach().clone()
    with torch.no_grad():
        _weight_of(model).add_(0.05)
    yield
    with torch.no_grad():
        _weight_of(model).copy_(before)


@contextmanager
def trained(model):
    """Where it may drop out."""
    model.train()
    yield
    model.eval()


@contextmanager
def through_data(model):
    """A weight written behind torch's back."""
    _weight_of(model).data.mul_(-1)
    yield
    _weight_of(model).data.mul_(-1)


@contextmanager
def doubled(model):
    """Another dtype."""
    model.double()
    yield
    model.float()


@contextmanager
def eager(model):
    """Another attention implementation."""
    model.get_base_model().set_attn_implementation("eager")
    yield
    model.get_base_model().set_attn_implementation("sdpa")


@torch.no_grad()
def held_as_stock(cache, tolerance=1e-5):
    """Whether a cache of sequences holds what a stock prefill of its tokens gives."""
    plain = DynamicCache()
    cache.model(torch.tensor([cache.tokens()]), past_key_values=plain)
    layers = zip(cache.compact(), plain.layers, strict=True)
    return all(max(apart(one.keys, other.keys), apart(one.values, other.values)) <= tolerance for one, other in layers)
