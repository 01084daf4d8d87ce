# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every mode of stock `generate` takes a blend cache, and at ratio one gives what it gives without."""

import itertools
import threading

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_blend import BlendCache, ChunkStore
from hf_blend.cache.layers import ROOM_TOKENS

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 4},
    "beams that sample": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2},
    "several returned": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "prefill by parts": {"do_sample": False, "prefill_chunk_size": 25},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.3},
}
LENGTH = {"max_new_tokens": 12, "eos_token_id": None}


def store():
    return ChunkStore.open("memory://")


def run(model, inputs, cache=None, **changes):
    torch.manual_seed(11)
    return model.generate(**inputs, past_key_values=cache, **{**LENGTH, "do_sample": False, **changes})


def prepared(model, tokenizer, request, kept=None, **settings):
    cache = BlendCache(model, kept or store(), **settings)
    return cache, cache.inputs(tokenizer, **request)


def batch_of(pieces):
    requests = [pieces((17, 23, 31)), pieces((29,), seed=1), pieces((20, 12), seed=2, question=5)]
    return {name: [one[name] for one in requests] for name in requests[0]}


def families_and_modes():
    """Every mode for a llama; without `slow`, two for the others."""
    for family, mode in itertools.product(["llama", "mistral", "qwen2", "qwen3"], MODES):
        is_slow = family != "llama" and mode not in ("greedy", "beams")
        yield pytest.param(family, mode, marks=[pytest.mark.slow] if is_slow else [])


@pytest.mark.parametrize(("family", "mode"), [*families_and_modes()])
def test_ratio_one_gives_the_text_of_a_plain_run(shared_model, pieces, tokenizer, family, mode):
    model = shared_model(family)
    cache, inputs = prepared(model, tokenizer, pieces(), recompute_ratio=1.0)
    assert torch.equal(run(model, inputs, cache, **MODES[mode]), run(model, inputs, **MODES[mode]))
    if mode != "prefill by parts":
        assert cache.report.reusable_tokens == 71 * MODES[mode].get(
            "num_beams", MODES[mode].get("num_return_sequences", 1)
        )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("mode", ["greedy", "beams", "several returned"])
def test_ratio_one_gives_the_text_of_a_plain_run_for_a_padded_batch(shared_model, pieces, tokenizer, attention, mode):
    model = shared_model("llama", attention)
    cache, inputs = prepared(model, tokenizer, batch_of(pieces), recompute_ratio=1.0)
    assert inputs["attention_mask"].min() == 0
    assert torch.equal(run(model, inputs, cache, **MODES[mode]), run(model, inputs, **MODES[mode]))


@pytest.mark.parametrize("mode", sorted(set(MODES) - {"prefill by parts"}))
def test_at_any_ratio_a_mode_continues_the_same_blended_prefill(shared_model, pieces, tokenizer, mode):
    model, kept = shared_model(), store()
    cache, inputs = prepared(model, tokenizer, pieces(), kept, recompute_ratio=0.15)
    first = run(model, inputs, cache, **MODES[mode])
    again, _ = prepared(model, tokenizer, pieces(), kept, recompute_ratio=0.15)
    assert torch.equal(first, run(model, inputs, again, **MODES[mode]))
    greedy, _ = prepared(model, tokenizer, pieces(), kept, recompute_ratio=0.15)
    run(model, inputs, greedy)
    assert cache.report.chosen_columns[0] == greedy.report.chosen_columns[0]
    if mode == "prompt lookup":
        again, _ = prepared(model, tokenizer, pieces(), kept, recompute_ratio=0.15)
        assert torch.equal(first, run(model, inputs, again))


def test_a_batch_gives_the_text_of_its_single_requests(shared_model, pieces, tokenizer):
    model, kept, requests = shared_model(), store(), batch_of(pieces)
    cache, inputs = prepared(model, tokenizer, requests, kept, recompute_ratio=0.15)
    together = run(model, inputs, cache)[:, inputs["input_ids"].shape[1] :]
    for row in range(3):
        single, alone = prepared(model, tokenizer, {name: some[row] for name, some in requests.items()}, kept)
        assert torch.equal(together[row], run(model, alone, single)[0, alone["input_ids"].shape[1] :])


@pytest.mark.parametrize("ratio", [0.15, 1.0])
def test_an_assistant_speeds_up_and_changes_nothing(shared_model, pieces, tokenizer, ratio):
    model, draft, kept = shared_model(), shared_model(num_hidden_layers=1), store()
    cache, inputs = prepared(model, tokenizer, pieces(), kept, recompute_ratio=ratio)
    plain, _ = prepared(model, tokenizer, pieces(), kept, recompute_ratio=ratio)
    assert torch.equal(run(model, inputs, cache, assistant_model=draft), run(model, inputs, plain))
    assert cache.report.reusable_tokens == 71


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_tokens_are_streamed_as_they_come_from_another_thread_too(shared_model, pieces, tokenizer):
    model, streamer = shared_model(), Collector()
    cache, inputs = prepared(model, tokenizer, pieces(), recompute_ratio=1.0)
    thread = threading.Thread(target=run, args=(model, inputs, cache), kwargs={"streamer": streamer})
    thread.start()
    thread.join()
    assert streamer.ended
    assert streamer.tokens == run(model, inputs)[0].tolist()


class StopAfter(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_a_stopping_criterion_stops(shared_model, pieces, tokenizer):
    model = shared_model()
    cache, inputs = prepared(model, tokenizer, pieces())
    stop = StoppingCriteriaList([StopAfter(inputs["input_ids"].shape[1] + 3)])
    assert run(model, inputs, cache, stopping_criteria=stop).shape[1] == inputs["input_ids"].shape[1] + 3


def test_scores_and_states_are_returned_when_asked_for(shared_model, pieces, tokenizer):
    model = shared_model("llama", "eager")
    cache, inputs = prepared(model, tokenizer, pieces(), recompute_ratio=1.0)
    wish = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    got, wanted = run(model, inputs, cache, **wish), run(model, inputs, **wish)
    assert got.past_key_values is cache
    for one, other in zip(got.logits, wanted.logits, strict=True):
        assert (one - other).abs().max() <= 1e-5
    for one, other in zip(got.hidden_states[1:], wanted.hidden_states[1:], strict=True):
        assert (one[-1] - other[-1]).abs().max() <= 1e-4


@pytest.mark.parametrize("mode", ["greedy", "prompt lookup"])
def test_a_conversation_goes_on_in_the_same_cache(shared_model, pieces, tokenizer, mode):
    model = shared_model()
    cache, inputs = prepared(model, tokenizer, pieces(), recompute_ratio=1.0)
    ids = run(model, inputs, cache)
    for turn in range(2):
        words = torch.tensor([pieces(question=7, seed=20 + turn)["question"]])
        ids = torch.cat((ids, words), 1)
        asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        wanted = run(model, asked, **MODES["greedy"])
        if mode == "prompt lookup":
            cache.crop(
                -cache.get_seq_length()
            )  # stock generate passes the whole prompt in this mode, whatever is cached
            cache.reset()
        ids = run(model, asked, cache, **MODES[mode])
        assert torch.equal(ids, wanted)
    assert cache.get_seq_length() == ids.shape[1] - 1


def test_decoding_never_copies_the_cache_within_its_room(shared_model, pieces, tokenizer):
    model, places = shared_model(), set()
    cache, inputs = prepared(model, tokenizer, pieces())

    class Watch(StopAfter):
        def __call__(self, input_ids, scores, **kwargs):
            places.update(layer.keys.data_ptr() for layer in cache.layers)
            return super().__call__(input_ids, scores, **kwargs)

    run(model, inputs, cache, stopping_criteria=StoppingCriteriaList([Watch(10_000)]), max_new_tokens=40)
    assert len(places) == len(cache.layers)
    assert cache.get_seq_length() == inputs["input_ids"].shape[1] + 39


def test_an_answer_that_outgrows_the_room_is_right(shared_model, pieces, tokenizer):
    model = shared_model(num_hidden_layers=2)
    cache, inputs = prepared(model, tokenizer, pieces((20,)), recompute_ratio=1.0)
    length = {"max_new_tokens": ROOM_TOKENS + 10}
    assert torch.equal(run(model, inputs, cache, **length), run(model, inputs, **length))


@torch.no_grad()
def test_batch_operations_on_a_filled_cache_are_those_of_a_plain_one(shared_model, pieces, tokenizer):
    from transformers import DynamicCache

    model = shared_model()
    cache, inputs = prepared(model, tokenizer, batch_of(pieces), recompute_ratio=1.0)
    plain = DynamicCache()
    model(**inputs, past_key_values=cache, logits_to_keep=1)
    assert cache.report.reusable_tokens > 0
    model(**inputs, past_key_values=plain)
    for act, argument in [
        ("reorder_cache", torch.tensor([2, 0, 0])),
        ("batch_repeat_interleave", 2),
        ("batch_select_indices", torch.tensor([5, 1])),
        ("crop", -3),
    ]:
        for one in (cache, plain):
            getattr(one, act)(argument)
        assert cache.get_seq_length() == plain.get_seq_length()
        for mine, theirs in zip(cache.layers, plain.layers, strict=True):
            start = 60  # before it one of the entries is padding
            torch.testing.assert_close(mine.keys[:, :, start:], theirs.keys[:, :, start:], atol=1e-5, rtol=0)
