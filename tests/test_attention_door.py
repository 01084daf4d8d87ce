# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The one door to a model's attention: no config is written, other calls pass, and it opens in every family."""

import sys
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from tiny_models import tiny_types
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_blend import BlendCache, ChunkStore, self_extend, sparse_decoding
from hf_blend.errors import UnsupportedModelError
from hf_blend.model import attention
from hf_blend.model.anatomy import LayerInfo, decoder_layers
from tests.asking import GREEDY, generated, memory, prefill, prepared
from tests.conftest import shared_zoo_model, skip_in_the_oldest, slow_but

SPARSE = {"share": 0.4, "block_tokens": 8, "min_tokens": 1}
PARTIAL = {"share": 0.4, "block_tokens": 8, "alpha": 100.0}
EXTEND = {"trained_tokens": 16, "window_tokens": 8, "group_tokens": 4}
KINDS = [("llama", "sdpa"), ("gpt_neox", "eager"), ("gemma3_text", "sdpa"), ("deepseek_v3", "eager")]


@contextmanager
def frozen(model):
    """Raise where an attribute of one of the model's configs is written."""
    owners = [model, *(module for module in model.modules() if hasattr(module, "config"))]
    configs = [owner.config for owner in owners]
    configs += [getattr(config, name) for config in configs for name in config.sub_configs]

    def refuse(config, name, value):
        if any(config is one for one in configs):
            raise AssertionError(f"{name} of a config is written: {value!r}")
        object.__setattr__(config, name, value)

    with pytest.MonkeyPatch.context() as patch:
        for kind in {type(one) for one in configs}:
            patch.setattr(kind, "__setattr__", refuse)
        yield


def blended(model, pieces, store=None, sparse=False, **settings):
    cache = BlendCache(model, store or memory(), recompute_ratio=0.3, **settings)
    with sparse_decoding(model, cache, **SPARSE) if sparse else nullcontext():
        inputs = cache.inputs(None, **pieces)
        return generated(model, inputs, cache), cache


def in_part(model, pieces):
    store = ChunkStore.open("memory://", partial=PARTIAL)
    blended(model, pieces, store)
    return blended(model, pieces, store)[1]


@pytest.mark.parametrize(("family", "name"), KINDS)
def test_no_config_is_written_in_forward(pieces, family, name):
    if family == "deepseek_v3":
        skip_in_the_oldest("no tiny model of this type can be built")
    model = shared_zoo_model(family, name)
    blended(model, pieces())  # the model is tested at its first use
    with frozen(model):
        blended(model, pieces(), selector="query-attention")
        blended(model, pieces(), sparse=True)
        if family in ("llama", "gpt_neox"):
            assert any(layer.visible is not None for layer in in_part(model, pieces()).layers)
        if family != "gemma3_text":
            with self_extend(model, **EXTEND, allow_unverified=True):
                model.generate(torch.tensor([[*range(3, 40)]]), **GREEDY)


@pytest.mark.parametrize("what", ["select", "sparse", "part", "extend"])
def test_plain_call_in_another_thread_is_unaffected(pieces, what):
    model = shared_zoo_model("llama", "eager")
    ids = torch.tensor([[*range(3, 40)]])
    found = []
    stop = threading.Event()
    in_part(model, pieces())
    with torch.no_grad():
        expected = model(ids).logits

    def call():
        with torch.no_grad():
            while not stop.is_set():
                found.append(torch.equal(model(ids).logits, expected))

    other = threading.Thread(target=call)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other.start()
    try:
        if what == "part":
            in_part(model, pieces())
        elif what == "extend":
            with self_extend(model, **EXTEND):
                model.generate(ids, **GREEDY)
        else:
            blended(model, pieces(), sparse=what == "sparse", selector="query-attention")
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(before)
    assert len(found) > 1
    assert all(found)


def taken_layers(model):
    """The layers whose attention call is taken in a plain forward."""
    found = []

    def take(stock, module, *args, **given):
        found.append(module.layer_idx)
        return stock(module, *args, **given)

    modules = [module for layer in decoder_layers(model) for module in LayerInfo.of(layer).attention]
    handles = attention.hook_attention(modules, lambda _: take)
    with torch.no_grad():
        model(torch.tensor([[3, 4, 5, 6]]))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("family", slow_but("stablelm", "gemma3n_text", among=tiny_types()))
def test_every_attention_that_transformers_looks_up_is_taken(family, name):
    try:
        model = shared_zoo_model(family, name)
        expected = []
        decoder_layers(model)
        with pytest.MonkeyPatch.context() as patch:
            stock = AttentionInterface.get_interface

            def counted(*given):
                function = stock(*given)
                return lambda *args, **more: expected.append(1) or function(*args, **more)

            patch.setattr(AttentionInterface, "get_interface", counted)
            with torch.no_grad():
                model(torch.tensor([[3, 4, 5, 6]]))
    except (ValueError, TypeError, AttributeError, UnsupportedModelError, RuntimeError) as error:
        pytest.skip(f"{family} with {name}: {error}")
    assert len(taken_layers(model)) == len(expected)


def test_registered_function_calls_one_of_users():
    def own(*args, **given):
        return sdpa_attention_forward(*args, **given)

    model = shared_zoo_model("llama", "sdpa")
    taken_layers(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "sdpa", own)
        taken_layers(model)
        assert ALL_ATTENTION_FUNCTIONS["sdpa"].stock is own


def test_call_is_taken_once_and_never_with_another_cache(pieces):
    model = shared_zoo_model("diffllama", "sdpa")  # its layers ask for their attention twice
    seen = []

    def take(stock, *args, **given):
        seen.append(1)
        return stock(*args, **given)

    capture = attention.AttentionCapture(decoder_layers(model)[0], take)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        for cache, count in ((None, 0), (BlendCache(model, memory(), allow_unverified=True), 1)):
            capture.open("another" if cache is None else cache)
            model(ids, past_key_values=cache, use_cache=True)
            assert len(seen) == count
            capture.close()


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {0, 1, 2, 3}),
        ("stablelm", set()),  # drops keywords
        ("falcon", set()),  # attends in its own code
        ("deepseek_v32", set()),  # looks into the mask
    ],
)
def test_layers_handing_on_are_those_whose_attention_gets_keyword_and_mask(family, expected):
    assert attention.layers_handing_on(shared_zoo_model(family, "sdpa")) == expected


@torch.no_grad()
@pytest.mark.parametrize("family", ["stablelm", "llama"])
def test_blend_with_sdpa_is_that_with_eager(family, pieces):
    logits = []
    for name in ("sdpa", "eager"):
        model = shared_zoo_model(family, name)
        cache, inputs = prepared(model, pieces(), recompute_ratio=0.3, selector="ramp")
        logits.append(prefill(model, inputs, cache))
        assert cache.report.reusable_tokens > 0
    assert (logits[0] - logits[1]).abs().max() <= 1e-5
