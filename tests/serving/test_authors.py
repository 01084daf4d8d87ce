# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Blocks of the engine belong to the model that computed them: after it is another, no request is served from them."""

import threading

import pytest
import torch

from hf_blend import observer
from tests.serving.processes import wait_for


@pytest.fixture
def model(tiny_model):
    return tiny_model("llama")


def adapters(model):
    """Two adapters that differ; the call switches from the first to the second, or back."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
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


def test_a_request_under_way_is_computed_again_by_the_model_that_the_next_request_meets(model, bench, store):
    switch, ids = written_weights(model), [1, *bench.draw(60, 3)]
    long = bench.generation(max_new_tokens=40, eos_token_id=-1)
    switched, goes_on = threading.Event(), threading.Event()
    with bench.engine(model, store, generation_config=long) as engine:
        first = engine.add_request(ids, streaming=True)
        while len((output := engine.get_result(timeout=30)).generated_tokens) < 4:
            pass

        def stand(layer, args):
            switched.set()
            goes_on.wait(30)

        handle = model.model.layers[0].register_forward_pre_hook(observer(stand))
        assert switched.wait(30)
        second = engine.add_request(ids)
        switch("b")
        handle.remove()
        goes_on.set()
        found = bench.collect(engine, [first, second])
        count = len(output.generated_tokens)
    assert found[second].generated_tokens == stock(model, ids, 40)
    # in its last step of the earlier model half of its layers may be those of the next: the tokens from then on
    own = found[first].generated_tokens
    behind = next(n for n in range(count, count + 4) if own[n:] == stock(model, [*ids, *own[:n]], 40 - n))
    assert behind < 40
