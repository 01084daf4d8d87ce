# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of the engine belong to the model that computed them: after it is another, no request is served from them."""

from itertools import islice

import pytest
import torch
from transformers.integrations.peft import MIN_PEFT_VERSION

from tests.serving.processes import wait_for


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


def adapters(model):
    """Two adapters that differ; the call switches from the first to the second, or back."""
    peft = pytest.importorskip("peft", MIN_PEFT_VERSION, "this transformers needs a newer peft")
    settings = peft.LoraConfig(
        target_modules=["q_proj", "k_proj", "v_proj"], r=4, lora_alpha=32, init_lora_weights=False
    )
    torch.manual_seed(5)
    for name in "ab":
        model.add_adapter(settings, name)
    model.set_adapter("a")
    return lambda name: model.set_adapter(name)


def written_weights(model):
    """Weights that are written in place."""
    rows = [layer.self_attn.k_proj.weight for layer in model.model.layers]
    states = {"a": [one.detach().clone() for one in rows]}
    torch.manual_seed(5)
    states["b"] = [one + torch.randn_like(one) * one.std() for one in states["a"]]

    def switch(name):
        with torch.no_grad():
            for one, state in zip(rows, states[name], strict=True):
                one.copy_(state)

    return switch


def stock(model, ids, new):
    """The answer of `generate`, which shares nothing."""
    given = {"do_sample": False, "max_new_tokens": new, "eos_token_id": -1, "pad_token_id": 0}
    return model.generate(torch.tensor([ids]), **given)[0, len(ids) :].tolist()


@pytest.mark.parametrize("change", [adapters, written_weights])
def test_no_block_that_an_earlier_model_computed_is_shared_with_a_request_of_the_next(change, model, bench, store):
    switch, ids = change(model), [1, *bench.draw(60, 3)]
    long = bench.generation(max_new_tokens=8, eos_token_id=-1)
    answers, matched = {}, []
    with bench.engine(model, store, generation_config=long) as engine:
        for name in ("a", "a", "b", "b", "a"):
            switch(name)
            answer, outcome = bench.answer(engine, ids)
            assert answers.setdefault(name, answer) == answer
            matched.append(outcome.prefix_tokens)
            wait_for(lambda: not engine.batch_processor.scheduler.active_requests, "the end of the step")
    expected = {}
    for name in "ab":
        switch(name)
        expected[name] = stock(model, ids, 8)
    assert expected["a"] != expected["b"], "or this test would see nothing"
    assert answers == expected
    assert matched == [0, 48, 0, 48, 0], "shared by requests of one model alone"


@pytest.mark.parametrize("is_followed", [True, False], ids=["a request follows", "none follows"])
def test_requests_under_way_go_on_with_the_model_that_a_pause_leaves(is_followed, model, bench, store):
    switch = written_weights(model)
    chunks, new = [bench.draw(30, 1), bench.draw(40, 2)], 40
    plain, blended = [1, *bench.draw(60, 3)], [1, *chunks[0], *chunks[1], 5, 6]
    store.add(model, None, chunks)
    long = bench.generation(max_new_tokens=new, eos_token_id=-1)
    with bench.engine(model, store, generation_config=long, recompute_ratio=1.0) as engine:
        names, had = [engine.add_request(ids, streaming=True) for ids in (plain, blended)], {}
        while len(had) < 2 or min(map(len, had.values())) < 4:
            output = engine.get_result(timeout=30)
            had[output.request_id] = output.generated_tokens
        with engine.pause():
            switch("b")
            names += [engine.add_request(plain)] * is_followed
        found = bench.collect(engine, names)
    own = [found[name].generated_tokens for name in names]
    assert own[2:] == [stock(model, plain, new)] * is_followed
    for ids, name, answer in zip((plain, blended), names, own, strict=False):
        rest = (stock(model, [*ids, *answer[:count]], new - count) for count in range(len(had[name]), new))
        assert any(answer[-len(tokens) :] == tokens for tokens in islice(rest, 8)), "by the new model from there on"
        assert len(answer) == new
