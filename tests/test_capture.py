# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A chunk is computed alone behind its sink, in full, and the model does not notice."""

import pytest
import torch
from transformers import DynamicCache

from hf_blend.errors import PromptError, UnsupportedModelError
from hf_blend.model import capture as module
from hf_blend.model.anatomy import decoder_layers
from hf_blend.model.capture import _recorded_tables, capture, capture_chunk

CHUNK = tuple(range(10, 40))


@torch.no_grad()
@pytest.mark.parametrize("sink", [(), (1,), (1, 5, 6)])
def test_a_chunk_has_the_states_of_a_plain_forward_without_the_sink(shared_model, sink):
    model, plain = shared_model(), DynamicCache()
    chunk = capture_chunk(model, CHUNK, sink, "f")
    model(torch.tensor([[*sink, *CHUNK]]), past_key_values=plain)
    for (keys, values), layer in zip(chunk.layers, plain.layers, strict=True):
        assert torch.equal(keys, layer.keys[0, :, len(sink) :])
        assert torch.equal(values, layer.values[0, :, len(sink) :])
    assert (chunk.key.chunk_prefix_ids, chunk.key.token_ids, chunk.tokens) == (sink, CHUNK, len(CHUNK))
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(sink), len(sink) + len(CHUNK))[None])
    assert torch.equal(chunk.tables[0][0], cos[0])
    assert torch.equal(chunk.tables[0][1], sin[0])
    chunk.check()


def test_a_window_drops_nothing_from_a_chunk(shared_model):
    chunk = capture_chunk(shared_model("mistral", sliding_window=8), CHUNK, (1,), "f")
    assert all(keys.shape[1] == len(CHUNK) for keys, _ in chunk.layers)


def test_layers_with_tables_of_their_own_are_told_apart(tiny_model):
    model = tiny_model(
        "gemma3_text", head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2
    )
    chunk = capture_chunk(model, CHUNK, (1,), "f")
    assert (len(chunk.tables), chunk.layer_table) == (2, (0, 1, 0, 1))


def test_capturing_leaves_the_model_untouched_and_tracks_no_gradient(tiny_model, untouched):
    model = tiny_model()
    with untouched(model):
        chunk = capture_chunk(model, CHUNK, (1,), "f")
    assert not any(tensor.requires_grad for _, tensor in chunk.named_tensors())


def test_an_exception_leaves_the_model_untouched(tiny_model, untouched, monkeypatch):
    model = tiny_model()

    def fail(*_, **__):
        raise RuntimeError("boom")

    with untouched(model), monkeypatch.context() as patch:
        patch.setattr(decoder_layers(model)[2].mlp, "forward", fail)
        with pytest.raises(RuntimeError, match="boom"):
            capture_chunk(model, CHUNK, (1,), "f")


@pytest.mark.parametrize(
    ("chunk", "sink", "text"),
    [((), (1,), "0 tokens"), ((5,) * 512, (1,), r"512 tokens behind a sink of 1.*512 positions.*Split")],
)
def test_a_chunk_that_cannot_be_computed_is_refused(shared_model, chunk, sink, text):
    with pytest.raises(PromptError, match=text):
        capture_chunk(shared_model(), chunk, sink, "f")


def test_a_chunk_may_fill_the_positions_to_the_last(shared_model):
    assert capture_chunk(shared_model(), (5,) * 511, (1,), "f").tokens == 511


def test_a_layer_that_caches_nothing_is_named(tiny_model, monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(decoder_layers(model)[3], "forward", lambda hidden_states, **_: hidden_states)
    with pytest.raises(UnsupportedModelError, match="layer 3 of LlamaForCausalLM left NoneType in the cache"):
        capture(model, torch.tensor([CHUNK]))


def test_a_layer_that_caches_something_else_is_named_with_what_it_left(tiny_model, monkeypatch):
    model, update = tiny_model(), DynamicCache.update
    cut = lambda self, k, v, i, *a, **n: update(self, k[:, :, : 5 if i == 1 else None], v, i, *a, **n)  # noqa: E731
    monkeypatch.setattr(DynamicCache, "update", lambda *args, **kwargs: (cut(*args, **kwargs), args[1:3])[1])
    with pytest.raises(UnsupportedModelError, match=r"layer 1 of .* left \(1, 2, 5, 16\) in the cache"):
        capture(model, torch.tensor([CHUNK]))


@torch.no_grad()
def test_a_capture_that_ends_in_the_middle_of_another_call_does_no_harm(tiny_model):
    model = tiny_model()
    layer, recording = decoder_layers(model)[1], _recorded_tables(decoder_layers(model), DynamicCache())
    ended = []
    handle = layer.register_forward_pre_hook(lambda *_: ended.append(recording.__exit__(None, None, None)))
    tables = recording.__enter__()
    model(torch.tensor([CHUNK]), past_key_values=DynamicCache())
    handle.remove()
    assert ended
    assert tables == {}
    assert not layer._forward_pre_hooks


def test_the_layers_of_transformers_are_made_once_for_a_chunk_not_once_for_each_layer(tiny_model, monkeypatch):
    model, made = tiny_model(num_hidden_layers=6), []
    stock = module.stock_layers
    monkeypatch.setattr(module, "stock_layers", lambda config: made.append(config) or stock(config))
    capture_chunk(model, CHUNK, (1,), "f")
    assert len(made) == 1
