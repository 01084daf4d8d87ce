# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""An engine on a second device: what its threads compute with is there, and its answers are those of the CPU."""

import pytest
import torch

from hf_blend import ChunkStore
from hf_blend.prefill import copies
from hf_blend.serving.run import ServerPlan, make_service
from hf_blend.serving.sampling import add_sampling, make_sampling
from hf_blend.serving.wire import CompletionRequest
from tests.conftest import build_tiny_model, slow_but
from tests.second_device import DEVICE, There, move, second_device
from tests.test_second_device import Recorder

ON_HOST = {  # the functions that bring tensors of more than one number to the host, or make them there
    "attention._spans", "engine._generation_loop_body", "sampling.check",  # a step: its requests, and their tokens
    "positions.copy_to_host", "report.chosen_columns",  # a blend: its prompt, and its figures
    "sampling.draw", "sampling.prepare_tensor_args",  # an answer that is drawn: its log probabilities
    "capture.capture_chunks", "chunk.of", "chunk._dense_copy", "chunk.has_usable_values",  # a chunk to be stored
}  # fmt: skip


@pytest.fixture(scope="module")
def models():
    """A model on the CPU, and the same on the second device."""
    with second_device(), torch.no_grad():
        there = move(build_tiny_model())
    return build_tiny_model(), there


def served(model, bench, begin, **tiers):
    """Answers, what became of each prefill, and the tensors that the engine holds; `begin` is called when it runs."""
    stored, new = bench.draw(21, 1), bench.draw(19, 2)
    blended, plain = bench.Ask([1, *stored, *new, *bench.draw(20, 3)], [stored, new]), bench.Ask(bench.draw(70, 4))
    asked = CompletionRequest(prompt="", seed=1, top_p=0.9, presence_penalty=1, logprobs=3)
    sampling = make_sampling(asked, {"repetition_penalty": 1.1, "top_k": 20}, len(plain.ids), 0, None)
    with ChunkStore.open("memory://", **tiers) as store:
        store.add(model, None, [stored])
        engine = bench.engine(model, store, recompute_ratio=0.3)
        add_sampling(engine.logit_processor)
        with engine:
            begin()
            answers = [bench.answers(engine, [ask])[0] for ask in (blended, blended, plain)]
            answers += bench.answers(engine, [plain], sampling=sampling)
            answers += [[token for token, _ in one.top] for one in sampling.logprobs.values()]
            held = {**vars(engine.paged), **vars(engine.batch_processor.inputs_and_outputs)}
        assert engine.prefills.failures == 0
        how = [one.how for one in engine.prefills.outcomes.values()]
        return answers, how, {name: one for name, one in held.items() if isinstance(one, torch.Tensor)}


@pytest.mark.parametrize("tier", slow_but("host", among=["host", "device"]))
def test_all_that_the_threads_of_an_engine_compute_with_is_on_the_device(tier, models, bench, monkeypatch):
    monkeypatch.setattr(copies, "open_stream", lambda device: Recorder([]) if device.type == "cuda" else None)
    expected, how, _ = served(models[0], bench, list)
    assert how == ["blended", "shared", "plain", "plain"]
    tiers = {"device": str(DEVICE), "device_bytes": 1 << 24} if tier == "device" else {}
    with second_device() as mode, torch.no_grad():
        answers, found, held = served(models[1], bench, mode.hosted.clear, **tiers)
    assert (answers, found) == (expected, how)
    assert len(held) > 8
    assert [name for name, one in held.items() if not isinstance(one, There)] == []
    assert {*mode.hosted} - {"copies._bring"} == ON_HOST
    assert ("copies._bring" in mode.hosted) == (tier == "host"), "chunks in pinned memory"
    steps = mode.hosted["sampling.check"] - how.count("blended")  # a blend draws its first token, too
    assert mode.hosted["attention._spans"] == 3 * steps, "once for a step, not in each layer"


def test_a_server_plans_its_cache_by_what_is_free_on_the_device(models, monkeypatch, tmp_path):
    per_token = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, width, bytes
    monkeypatch.setattr(copies, "open_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 640 * per_token, 1 << 40))
    with second_device(), torch.no_grad():
        service = make_service(models[1], None, ServerPlan(location=str(tmp_path)))
        held = service.engine.paged.cache_tensor
        service.close()
    assert f"float32 on {DEVICE}; " in service.memory
    assert " for 640 tokens of requests" in service.memory, "half of it"
    assert isinstance(held, There)
    assert 640 * per_token <= held.nbytes < 720 * per_token
