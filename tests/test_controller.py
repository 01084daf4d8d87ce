# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The controller recomputes what loading hides, loads what is worth it, and measures a machine once."""

from itertools import islice

import pytest
import torch
from tiny_models import tiny_model

from hf_blend import ChunkStore, ConfigError
from hf_blend.loading.controller import LoadingController, advise
from hf_blend.loading.profile import Point, Profile
from tests.asking import generated, logits, memory, prepared


def cost(tokens: int, ratio: float) -> float:
    """A machine on which everything is exactly as the profile supposes."""
    scaled = tokens / 1000
    return (0.02 + 0.3 * ratio) * scaled + (0.01 + 0.1 * ratio) * scaled**2


@pytest.fixture
def profile():
    points = []
    for tokens in (512, 1536):
        for ratio in (0.05, 0.5):
            points.append(Point(tokens, ratio, cost(tokens, ratio)))
    return Profile({}, tuple(points), bytes_per_token=50_000)


def test_profile_fits_what_was_measured_and_beyond_once_for_all_ratios(profile, monkeypatch):
    fits = []
    fit = torch.linalg.lstsq
    monkeypatch.setattr(torch.linalg, "lstsq", lambda *given: fits.append(1) or fit(*given))
    for tokens, ratio in ((512, 0.05), (1000, 0.3), (4096, 1.0)):
        assert profile.prefill_s(tokens, ratio) == pytest.approx(cost(tokens, ratio), rel=1e-6)
    advise(profile, [256] * 8, [1e6] * 8, num_layers=30)
    assert len(fits) == 1


def test_advise_recomputes_what_loading_hides_and_computes_what_loads_too_slowly(profile):
    given = {"least_ratio": 0.15, "num_layers": 30}
    fast = advise(profile, [256] * 8, [1e12] * 8, **given)
    assert fast.ratio == 0.15
    assert fast.loaded_chunks == 8
    assert fast.predicted_ms == pytest.approx(1e3 * cost(2048, 0.15), rel=1e-3)
    assert "recompute 15.0%, load 8 chunks" in str(fast)
    rate = 2048 * profile.bytes_per_token / cost(2048, 0.5)
    one = advise(profile, [2048], [rate], **given)
    some = advise(profile, [256] * 8, [rate] * 8, **given)
    assert 0.4 <= one.ratio <= 0.5
    assert one.compute_ms <= one.load_ms
    assert some.loaded_chunks < 8, "some are rather computed than waited for"
    assert some.predicted_ms < one.predicted_ms
    slow_rate = 2048 * profile.bytes_per_token / (3 * cost(2048, 1.0))
    slow = advise(profile, [256] * 8, [slow_rate] * 8, **given)
    assert 0 < slow.loaded_chunks < 8
    assert advise(profile, [256] * 8, [1.0] * 8, num_layers=30).loaded_chunks == 0


def request(chunks=(40, 50)):
    ids = iter(range(5, 95))
    return {"prefix": [1], "chunks": [[*islice(ids, size)] for size in chunks], "question": [7, 9, 11]}


def stored(model, path, profile, rate=1.0, chunks=(40, 50), of=None):
    """A store on a disk that a controller, of another model if that is given, takes for so fast."""
    with ChunkStore.open(path) as store:
        store.add(model, None, request(chunks)["chunks"], chunk_prefix_ids=(1,))
    store = ChunkStore.open(path, memory_bytes=0)
    store.controller = LoadingController(of or model, store, profile=profile, rates={"disk": rate})
    return store


def answered(model, store, chunks=(40, 50), **settings):
    got, cache = logits(model, request(chunks), store=store, **settings)
    return got, cache.report


def test_controller_has_chunks_computed_where_loading_takes_longer(tmp_path, profile):
    model = tiny_model("llama")
    store = stored(model, tmp_path, profile)
    got, report = answered(model, store)
    assert report.loaded_chunks + report.computed_chunks <= 1, "the prefix alone"
    assert report.reusable_tokens == 0
    assert store.controller.last.loaded_chunks == 0
    _, inputs = prepared(model, request())
    plain = generated(model, inputs, max_new_tokens=3, output_logits=True, return_dict_in_generate=True)
    torch.testing.assert_close(got, torch.stack(plain.logits, 1), rtol=1e-4, atol=1e-4)


def test_controller_recomputes_what_loading_hides_and_never_less_than_ratio(tmp_path, profile):
    model = tiny_model("llama")
    rate = 90 * profile.bytes_per_token / profile.prefill_s(90, 0.6)
    for least, expected in ((0.2, 0.55), (0.9, 0.9)):
        store = stored(model, tmp_path, profile, rate, (90,))
        _, report = answered(model, store, (90,), recompute_ratio=least)
        assert report.nominal_ratio >= expected
        assert report.nominal_ratio <= max(0.65, least)
    fast = stored(model, tmp_path, profile, 1e15)
    _, report = answered(model, fast, recompute_ratio=0.2)
    assert report.nominal_ratio == 0.2


def test_controller_leaves_alone_what_is_in_memory_and_other_models(tmp_path, profile):
    model = tiny_model("llama")
    other = tiny_model("qwen2")
    store = memory()
    store.controller = LoadingController(model, store, profile=profile, rates={"disk": 1.0})
    store.add(model, None, request()["chunks"], chunk_prefix_ids=(1,))
    _, report = answered(model, store)
    assert report.reusable_tokens > 0
    assert store.controller.last is None
    disk = stored(other, tmp_path, profile, of=model)
    _, report = answered(other, disk)
    assert report.reusable_tokens > 0


def test_controller_refuses_store_that_loads_in_part(tmp_path, profile):
    with pytest.raises(ConfigError, match="loads chunks in part"):
        LoadingController(tiny_model("llama"), ChunkStore.open(tmp_path, partial=0.25), profile=profile)
