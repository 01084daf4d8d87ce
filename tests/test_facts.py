# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What was found out about a model is kept beside a store, and holds for that model in that state alone."""

import json
import logging
import os
import shutil
from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_model as build

from hf_blend import BlendCache, ChunkStore
from hf_blend.errors import UnsupportedModelError
from hf_blend.model import facts
from hf_blend.model.anatomy import found_facts
from hf_blend.model.checks import CHECKS
from hf_blend.prefill import rows
from tests.asking import PIECES, looking_ahead, prefilled

FAMILIES = ("llama", "deepseek_v2", "jamba", "gptj")


def files(folder):
    return sorted((folder / "facts").glob("*.json"))


@pytest.fixture
def tested(monkeypatch):
    """How often the last check of the self-test ran."""
    calls = []
    check = CHECKS["ratio_1"]

    def counted(subject):
        calls.append(subject.name)
        return check.measure(subject)

    monkeypatch.setitem(CHECKS, "ratio_1", replace(check, measure=counted))
    return calls


def begin(model, folder, **settings):
    """What a process does with a model that it has just loaded."""
    with ChunkStore.open(folder, durability="none") as store:
        return prefilled(model, PIECES, store=store, recompute_ratio=0.3, **settings)[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_begin_second_process_at_once_with_same_logits(family, tmp_path, tested):
    expected = begin(build(family), tmp_path)
    assert len(tested) == 1
    again = build(family)
    assert torch.equal(begin(again, tmp_path), expected)
    assert len(tested) == 1
    assert len(files(tmp_path)) == 1
    found = found_facts(again)
    fresh = build(family)
    begin(fresh, "memory://")
    assert len(tested) == 2, "a store in memory keeps them in the process"
    expected_facts = found_facts(fresh)
    for name, value in expected_facts.items():
        assert found[name] == value, name


CHANGES = {
    "weights": lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(1.5),
    "dtype": lambda model: model.to(torch.bfloat16),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "config": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A store beside which the facts of a model are."""
    folder = tmp_path_factory.mktemp("kept")
    begin(build("llama"), folder)
    return folder


@pytest.mark.parametrize("change", CHANGES)
def test_facts_of_another_state_are_not_used(change, kept):
    other = build("llama")
    assert facts.read_facts(other, kept)
    CHANGES[change](other)
    assert not facts.read_facts(other, kept)
    assert found_facts(other) == {} or change in ("weights", "attention")


@pytest.mark.parametrize("library", ["hf_blend", "code", "torch", "transformers", "check", "device"])
def test_facts_of_another_version_are_not_used(library, kept, monkeypatch):
    if library == "hf_blend":
        monkeypatch.setattr(facts, "__version__", "0.0.0")
    elif library == "code":
        monkeypatch.setattr(facts, "_last_written", lambda: 0)
    elif library == "check":
        monkeypatch.setitem(CHECKS, "another", replace(CHECKS["causal"], name="another"))
    elif library == "device":
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    else:
        monkeypatch.setattr(getattr(facts, library), "__version__", "0.0.0")
    assert not facts.read_facts(build("llama"), kept)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-9])


def flipped(path):
    content = json.loads(path.read_text())
    content["facts"]["layers_handing_on"] = []
    path.write_text(json.dumps(content))


def of_other_state(path):
    content = json.loads(path.read_text())
    content["state"]["dtype"] = "torch.float64"
    path.write_text(json.dumps(content))


def link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def sealed(change):
    """A change of the facts by someone who knows the format."""

    def forge(path):
        content = json.loads(path.read_text())
        change(content["facts"])
        content["digest"] = facts._digest(content["state"], content["facts"])
        path.write_text(json.dumps(content))

    return forge


DAMAGES = {
    "truncated": truncated,
    "flipped": flipped,
    "of another state": of_other_state,
    "a link": link,
    "a pipe": pipe,
    "deep": lambda path: path.write_text("[" * 5000 + "]" * 5000),
    "no mapping": lambda path: path.write_text("[]"),
    "unknown style": sealed(lambda found: found.update(rotary_styles=[["Nothing", ""]] * 2)),
    "unknown fact": sealed(lambda found: found.update(nothing=1)),
    "wrong type": sealed(lambda found: found.update(layer_costs=7)),
    "no dtype": sealed(lambda found: found["layout_of"].__setitem__(1, [[1, 1, "nothing"]])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_facts_that_are_damaged_are_left_out_and_named(damage, kept, tmp_path, caplog):
    shutil.copytree(kept / "facts", tmp_path / "facts")
    (path,) = files(tmp_path)
    DAMAGES[damage](path)
    model = build("llama")
    with caplog.at_level(logging.WARNING, "hf_blend"):
        assert not facts.read_facts(model, tmp_path)
    assert [path.name in record.getMessage() for record in caplog.records] == [True]
    assert found_facts(model) == {}


def test_facts_that_are_damaged_are_found_out_again(tmp_path, tested):
    expected = begin(build("llama"), tmp_path)
    (path,) = files(tmp_path)
    truncated(path)
    for _ in range(2):
        assert torch.equal(begin(build("llama"), tmp_path), expected)
        assert len(tested) == 2, "once again, and the file is whole"


def test_facts_of_model_that_fails_are_not_kept(tmp_path, monkeypatch, tested):
    with monkeypatch.context() as broken:
        broken.setattr(rows, "row_lines", looking_ahead)
        for allowed in (False, True):
            model = build("llama")
            if allowed:
                BlendCache(model, ChunkStore.open(tmp_path), allow_unverified=True)
            else:
                with pytest.raises(UnsupportedModelError):
                    BlendCache(model, ChunkStore.open(tmp_path))
    assert not files(tmp_path)
    begin(build("llama"), tmp_path)
    assert len(tested) == 3


def test_facts_in_folder_that_cannot_be_written_are_of_this_process(tmp_path, tested, monkeypatch):
    monkeypatch.setattr(facts, "write_json", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
    model = build("llama")
    for _ in range(2):
        begin(model, tmp_path)
    assert len(tested) == 1
    assert not files(tmp_path)


def test_facts_are_readable_by_their_owner_only(tmp_path):
    begin(build("llama"), tmp_path)
    (path,) = files(tmp_path)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
