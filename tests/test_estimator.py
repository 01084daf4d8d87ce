# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The estimators of CacheBlend give the paper's own examples, and the plan of a store is what they say."""

import json

import pytest
from tiny_models import tiny_model

from hf_blend import ChunkStore, ConfigError
from hf_blend.evaluation.planning import planned
from hf_blend.loading.estimator import (
    StorageDevice,
    Workload,
    choose,
    load_s,
    place,
    ratio_that_loading_hides,
    recompute_s,
)

TOKENS = 4096
LLAMA_7B = 2 * 32 * 128 * 2  # bytes of K and V of a token in a layer, 16 bits
LLAMA_70B = 2 * 8 * 128 * 2
NVME = 4.2e9  # at which the paper's two layers take what it says; it measured 4.8 GB/s for its disk


def test_estimators_give_the_papers_examples():
    assert LLAMA_7B * 32 * TOKENS == 2_147_483_648
    for token_bytes, stated_ms in ((LLAMA_7B, 16), (LLAMA_70B, 4)):
        assert 1e3 * load_s(token_bytes, TOKENS, NVME) == pytest.approx(stated_ms, rel=0.01)
        assert 1e3 * load_s(token_bytes, TOKENS, 4.8e9) == pytest.approx(stated_ms, rel=0.15)
    for prefill_ms, stated_ms in ((20, 3), (46.7, 7)):
        assert recompute_s(prefill_ms, 0.15) == pytest.approx(stated_ms, rel=0.01)
    assert ratio_that_loading_hides(16, 20, 0.15) == pytest.approx(0.8)
    assert ratio_that_loading_hides(4, 46.7, 0.15) == 0.15
    assert ratio_that_loading_hides(100, 20, 0.15) == 1.0


WORK = Workload(chunks=1000, chunk_tokens=512, chunks_per_request=8, requests_per_day=10_000)
DEVICES = [StorageDevice("memory", 50e9, 2.0), StorageDevice("nvme", NVME, 0.08), StorageDevice("hdd", 0.2e9, 0.02)]


def placed(token_bytes, layers, layer_ms, devices=DEVICES, **given):
    return [place(one, WORK, token_bytes * layers, layer_ms * layers / 1e3, **given) for one in devices]


def test_choose_takes_the_cheapest_device_that_hides_its_loading_else_counts_the_wait():
    small, large = placed(LLAMA_7B, 32, 20), placed(LLAMA_70B, 80, 46.7)
    assert [one.is_hidden for one in small] == [True, False, False]
    assert [one.is_hidden for one in large] == [True, True, False]
    assert choose(small).device == "memory"
    assert choose(large).device == "nvme"
    slow = DEVICES[1:]
    assert choose(placed(LLAMA_7B, 32, 20, slow)).device == "hdd"
    assert choose(placed(LLAMA_7B, 32, 20, slow, gpu_hour=3.0)).device == "nvme"
    for wrong in (lambda: StorageDevice("x", 0, 1), lambda: Workload(0, 1, 1, 1), lambda: choose([])):
        with pytest.raises(ConfigError, match="expected"):
            wrong()


def test_place_prices_bytes_by_month_and_seconds_by_hour():
    memory, nvme, _ = placed(LLAMA_7B, 32, 20, gpu_hour=3.0)
    assert memory.stored_bytes == LLAMA_7B * 32 * 512 * 1000
    assert memory.storage_month == pytest.approx(268.435456 * 2.0)
    assert memory.gpu_month == pytest.approx(300_000 * 0.096 / 3600 * 3.0)
    assert nvme.gpu_month == pytest.approx(300_000 * 0.5113 / 3600 * 3.0, rel=1e-3)
    assert nvme.total_month == nvme.storage_month + nvme.gpu_month


def test_place_hides_a_measured_prefill_behind_all_layers_but_the_first():
    device, token_bytes = StorageDevice("disk", 1e9, 0.1), 80 * LLAMA_70B
    load = load_s(token_bytes, WORK.request_tokens, 1e9)

    def at(blend, **given):
        return place(device, WORK, token_bytes, 10 * load, blend_s=blend * load, **given)

    slow, fast = at(2, num_layers=80), at(0.5, num_layers=80)
    assert (slow.is_hidden, fast.is_hidden, slow.recompute_s) == (True, False, 2 * load)
    assert slow.request_s == pytest.approx(2 * load + load / 80)
    assert fast.request_s == pytest.approx(load)
    # what the host does to read is hidden behind nothing but loading
    found = at(2, read_s=0.2 * load), at(2, read_s=0.6 * load), at(0.5, read_s=0.2 * load)
    assert [one.is_hidden for one in found] == [True, False, False]
    assert [one.request_s for one in found] == pytest.approx([2.2 * load, 2.6 * load, load])
    # a chunk that is read in one piece hides behind nothing: half a megabyte
    load = load_s(1024, WORK.request_tokens, 1e6)
    small = place(StorageDevice("disk", 1e6, 0.1), WORK, 1024, 10 * load, blend_s=2 * load, num_layers=4)
    assert small.request_s == pytest.approx(3 * load)
    assert not small.is_hidden


STATED = (
    "store plan --model tiny:llama --chunks 100 --chunk-tokens 256 --per-request 4 --prefill-s 0.5 --gpu-hour 3 "
    "--rate memory=20 --price memory=2 --rate disk=1 --price disk=0.05 --rate remote=0.0001 --price remote=0.01"
).split()


def test_store_plan_writes_what_a_store_is_opened_with(tmp_path, run):
    path = tmp_path / "store.json"
    code, out, err = run(*STATED, "--at", f"disk={tmp_path / 'kv'}", "--output", path, "--json")
    assert not code, err
    found = json.loads(out)
    assert found["chosen"] == "disk"
    assert [row["device"] for row in found["rows"]] == ["memory", "disk", "remote"]
    assert [row["is_hidden"] for row in found["rows"]] == [True, True, False]
    settings = json.loads(path.read_text("utf-8"))
    assert (
        settings
        == found["store"]
        == {"location": str(tmp_path / "kv"), "disk_bytes": found["rows"][1]["stored_bytes"]}
    )
    with ChunkStore.open(**settings) as store:
        assert len(store) == 0


def test_store_move_follows_a_plan_of_two_devices(tmp_path, run):
    near, far, path = tmp_path / "kv", tmp_path / "far", tmp_path / "store.json"
    with ChunkStore.open(near, remote=far.as_uri(), memory_bytes=0) as store:
        store.add(tiny_model("llama"), None, [[5, 6, 7], [8, 9, 10]])
    assert len(list(near.rglob("*.safetensors"))) == len(list(far.rglob("*.safetensors"))) == 2
    assert run(*STATED, "--at", f"disk={near}", "--at", f"remote={far}", "--output", path, "--json")[0] == 0
    settings = json.loads(path.read_text("utf-8"))
    assert (settings["location"], settings["remote"], settings["placement"]) == (str(near), far.as_uri(), "disk")
    for expected in ({"moved": 2, "stay": 0, "placed": 0}, {"moved": 0, "stay": 0, "placed": 2}):
        code, out, err = run("store", "move", "--plan", path, "--json")
        assert not code, err
        assert json.loads(out) == {"placement": "disk", **expected}
    assert (len(list(near.rglob("*.safetensors"))), len(list(far.rglob("*.safetensors")))) == (2, 0)
    url = ["--at", f"disk={near}", "--at", "remote=s3://bucket/kv"]
    assert planned("tiny:llama", (100, 256, 4, 10.0), {"rate": ["disk=1e-9", "remote=1"], "at": url[1::2],
                   "price": ["disk=5", "remote=1"]}, prefill_s=0.5, ratio=0.15, gpu_hour=0.0)["store"] == {
        "location": str(near), "remote": "s3://bucket/kv", "placement": "remote"}  # fmt: skip


def test_store_move_refuses_what_is_no_plan_of_two_tiers(tmp_path, run):
    path = tmp_path / "store.json"
    for content in (None, "{", "[1]", '{"location": "kv"}', '{"placement": "disk", "disc_bytes": 1}'):
        if content is not None:
            path.write_text(content)
        code, _, err = run("store", "move", "--plan", path)
        assert code
        assert "expected the arguments of a store with two tiers" in err, content


@pytest.mark.parametrize(
    ("settings", "words", "message"),
    [
        ({"location": 3}, (), "location is 3, expected a directory"),
        ({"disk_bytes": "much"}, (), "disk_bytes is 'much', expected 0 or more"),
        ({"remote": 3}, (), "no remote tier of the kind"),
        ({}, ("--store", "elsewhere"), "--plan came with --store or --remote"),
        (None, ("--to", "disk", "--store", "typo"), "no such folder"),
    ],
)
def test_store_move_neither_makes_nor_moves_a_store_that_no_plan_means(
    tmp_path, run, monkeypatch, settings, words, message
):
    monkeypatch.chdir(tmp_path)
    plan = {} if settings is None else {"location": "kv", "placement": "disk", **settings}
    (tmp_path / "plan").write_text(json.dumps(plan))
    code, _, err = run("store", "move", *(() if settings is None else ("--plan", "plan")), *words)
    assert code == 2
    assert message in err
    assert [path.name for path in tmp_path.iterdir()] == ["plan"]


def test_store_plan_refuses_what_it_cannot_read(run):
    for words, message in (
        (["--rate", "tape=1"], "no price"),
        (["--rate", "disk"], "NAME=NUMBER"),
        (["--price", "disk=cheap"], "NAME=NUMBER"),
        (["--at", "attic=/x"], "attic"),
    ):
        code, _, err = run(*STATED, *words)
        assert code
        assert message in err


def test_store_plan_measures_what_is_not_stated(model_folder, tmp_path, run):
    words = f"store plan --model {model_folder} --chunks 10 --chunk-tokens 32 --per-request 2 --prefill-s 0.1".split()
    words += ["--price", "memory=2", "--price", "disk=0.05", "--at", f"disk={tmp_path}", "--json"]
    code, out, _ = run(*words)
    found = json.loads(out)
    assert not code
    assert found["chosen"] == "disk"
    assert all(0 < row["load_s"] < 1 for row in found["rows"])
    with ChunkStore.open(tmp_path) as store:
        assert len(store) == 0, "what was measured with is removed"
