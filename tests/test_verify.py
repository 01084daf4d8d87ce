# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The checks hold for the families that are promised, and every one fails when what it claims is broken."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, eager_attention_forward

from hf_blend import PromptError
from hf_blend.cache import layers
from hf_blend.context import self_extend, sequence_cache
from hf_blend.model import calibrate, capture
from hf_blend.model.checks import CHECKS, CheckResult
from hf_blend.prefill import blend, plan, realign, rows
from hf_blend.verify.model_under_test import FLOAT32_LOGITS, ModelUnderTest, attending, attention_of
from hf_blend.verify.runner import DTYPES, Verdict, check_names, run_checks, verify
from tests.asking import looking_ahead, raising

check_names()  # registers the checks


@cache
def model_of(family: str, dtype: str = "float32") -> PreTrainedModel:
    """One tiny model of a family; the checks leave it as it was, which is a check."""
    return tiny_model(family).to(DTYPES[dtype])


FAMILY_OF = {"mixers_of": "lfm2", "ignores_states": "jamba"}  # that a check is shown to fail on, where not on llama


def tried(name: str, family: str = "llama") -> CheckResult:
    """One check in float32 with sdpa.

    An exception goes through: `runner.measure` takes it for a failure, and here it is more likely a stale stub.
    """
    with attending(model_of(family), "sdpa"):
        return CHECKS[name].measure(ModelUnderTest(model_of(family)))


def climbed(family: str, dtype: str, attention: str, rungs: list[str] | None) -> Verdict:
    verdict = Verdict(family)
    run_checks(verdict, model_of(family, dtype), dtype, [attention], rungs)
    return verdict


SLOW = pytest.mark.slow


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "sdpa"), pytest.param("bfloat16", "eager", marks=SLOW)])
def test_checks_hold_for_llama(dtype, attention):
    verdict = climbed("llama", dtype, attention, None)
    assert verdict.supported, verdict.reason
    assert [one.name for one in verdict.checks] == list(check_names())
    assert [one.name for one in verdict.refused] == []


@pytest.mark.slow
def test_checks_hold_for_real_model_within_its_floor(smollm2):
    verdict = Verdict("smollm2")
    run_checks(verdict, smollm2[0], "float32", ["sdpa"], None)
    assert verdict.supported, verdict.reason
    assert [one.name for one in verdict.checks] == list(check_names())
    assert verdict.refused == []


def hold(*_: Any, **__: Any) -> None:
    """Do nothing."""


def wrong_turn(style: Any, old: Any, new: Any) -> Any:
    cos, sin = COMPOSE(style, old, new)
    angle = torch.tensor(0.01)
    return cos * angle.cos() - sin * angle.sin(), sin * angle.cos() + cos * angle.sin()


def values_shifted(self: Any, layer: int, slots: Any, *states: Any, first: int = 0) -> None:
    WRITE(self, layer, slots, *states, first=first)
    for values in (states[-1][..., slot.row, :, slot.columns, :] for slot in slots):
        values.copy_(values.roll(1, dims=-2))


def stored_coarsely(*arguments: Any) -> Iterator[Any]:
    for chunk in COMPUTE_CHUNKS(*arguments):
        yield chunk.map(lambda states: states.bfloat16().to(states.dtype))


def question_from_a_stale_place(self: Any, *arguments: Any) -> None:
    BEGIN(self, *arguments)
    if self._rows is not None:
        self._rows = rows.Rows(self._rows.columns - 1, self._rows.filler, self._rows.counts)


def only_keys_written(self: Any, states: Any, fresh: Any) -> None:
    WRITE_STATES(self, states[:1], fresh[:1])


def rotated_for_other_places(self: Any, index: int, call: Any, rows: Any, *given: Any) -> None:
    CUT(self, index, call, rows, *given)
    table = call.given["position_embeddings"]
    call.arguments["position_embeddings"] = tuple(part[:, : rows.columns.shape[1]] for part in table)


def behind_something_else(model: Any, cache: Any, token_ids: Any) -> Any:
    return capture.capture(model, torch.tensor([[5] * cache.get_seq_length() + token_ids]))


def where_they_were(self: Any, old: Any, new: Any) -> list[None]:
    return [None] * len(self.styles)


def as_the_model_has_put_them(source: Any, layer: int, states: Any, old: Any, new: Any) -> Any:
    return states


def attending_unnoticed(*given: Any, **kwargs: Any) -> Any:
    return eager_attention_forward(*given, **kwargs)


def seeing_ahead(self: Any, hidden_states: Any, *given: Any, **kwargs: Any) -> Any:
    return FORWARD(self, hidden_states + hidden_states.flip(1), *given, **kwargs)


FORWARD = LlamaAttention.forward
COMPOSE = realign.compose
WRITE = realign.Realigner.write
COMPUTE_CHUNKS = plan.compute_chunks
BEGIN = blend.Prefill._begin
CUT = rows.RowArguments.cut
WRITE_STATES = rows.Rows.write_states


OVERWRITE = layers.BlendLayer.overwrite


def scale_of_a_call(model: Any) -> str:
    return "a projection quantises a whole call by one scale."


def all_but_the_first(layer, start, keys, values):
    OVERWRITE(layer, start + 1, keys[:, :, 1:], values[:, :, 1:])


BREAKS: list[tuple[str, str, Any]] = [  # check, what of the library is broken, and what is put in its place
    ("moved_chunk", "prefill.realign.compose", wrong_turn),
    ("moved_chunk", "prefill.realign.Realigner.write", values_shifted),
    ("prefix_cache", "prefill.plan.compute_chunks", stored_coarsely),
    ("ratio_1", "prefill.rows.row_lines", looking_ahead),
    ("ratio_1", "prefill.rows.Rows.write_states", only_keys_written),
    ("fused_ratio", "prefill.rows.RowArguments.cut", rotated_for_other_places),
    ("fused_ratio", "prefill.blend.Prefill._begin", question_from_a_stale_place),
    ("untouched", "model.hooks.ForwardHooks.leave", hold),
    ("heal", "cache.layers.BlendLayer.overwrite", all_but_the_first),
    ("whole_shift", "context.tables.TableSource.rotations", where_they_were),
    ("closed_hole", "context.tables.TableSource.rotations", where_they_were),
    ("self_extend", "context.self_extend._moved", as_the_model_has_put_them),
    ("asks_for_attention", "context.self_extend.attend", attending_unnoticed),
    ("own_scales", "model.calibrate.shared_scale", scale_of_a_call),
    ("causal", "", seeing_ahead),
    ("rotary_styles", "model.calibrate.compose", wrong_turn),
    ("cached_prefix", "model.capture._capture_behind", behind_something_else),
    ("mixers_of", "hybrids.mixer.MixerPass.enter", hold),
    ("ignores_states", "model.calibrate.HELD_TOKENS", calibrate.HELD_TOKENS),  # jamba's own code is the break
]


def trusted(family: str) -> PreTrainedModel:
    """The model after its self-tests: what is broken later is for the rung to see."""
    model = model_of(family)
    with attending(model, "sdpa"), self_extend.self_extend(model):
        sequence_cache.SequenceCache(model)
    with attending(model, "sdpa"):
        sequence_cache.SequenceCache(model)
    return model


def breaks() -> Iterator[Any]:
    """Every break; without `slow` one of what each is made in."""
    owners = set()
    for one in BREAKS:
        owner, _, _ = one[1].rpartition(".")
        yield pytest.param(*one, marks=[pytest.mark.slow] if owner in owners else [])
        owners.add(owner)


@pytest.mark.parametrize(("rung", "broken", "instead"), [*breaks()], ids=lambda one: getattr(one, "__name__", one))
def test_check_fails_when_what_it_claims_is_broken(rung, broken, instead, monkeypatch):
    family = FAMILY_OF.get(rung, "llama")
    model = trusted(family) if family == "llama" else model_of(family)
    before = {module: (dict(module._forward_hooks), dict(module._forward_pre_hooks)) for module in model.modules()}
    try:
        with monkeypatch.context() as patch:
            ModelUnderTest(model)
            if rung == "causal":
                patch.setattr(LlamaAttention, "forward", instead)
            else:
                patch.setattr(f"hf_blend.{broken}", instead)
            outcome = tried(rung, family)
    except PromptError:  # of a cache that takes the forward of another for its own
        return
    finally:
        for module, (after_hooks, before_hooks) in before.items():
            module._forward_hooks.clear(), module._forward_pre_hooks.clear()
            module._forward_hooks.update(after_hooks), module._forward_pre_hooks.update(before_hooks)
    assert not outcome.passed, outcome


def test_checks_are_all_shown_to_fail():
    assert set(check_names()) == {rung for rung, *_ in BREAKS}


def test_floor_of_bfloat16_is_measured_and_same_each_time():
    floors = [ModelUnderTest(model_of("llama", "bfloat16")).floor for _ in range(2)]
    assert floors[0] == floors[1]
    assert 1e-3 < floors[0].logits < 0.1
    assert attention_of(model_of("llama", "bfloat16")) == "sdpa", "the model has its own attention back"
    assert tried("whole_shift").tolerance == 4 * FLOAT32_LOGITS, "plain logits at other positions are further apart"


def test_verify_refuses_model_that_cannot_be_blended_by_its_layer():
    for family, why in (("gpt2", "layer 0 of GPT2LMHeadModel cannot be"), ("mamba", "layer 0 of MambaForCausal")):
        verdict = verify(f"tiny:{family}", dtypes=["float32"])
        assert not verdict.supported
        assert verdict.reason.startswith(why)
        assert verdict.checks == []


def test_verify_command_prints_one_json_document_of_type_or_folder(tmp_path, run):
    model_of("llama").save_pretrained(tmp_path)
    for name, given, count, attention in (
        ("tiny:qwen3", ("--dtype", "float32"), 4, "sdpa"),
        (str(tmp_path), ("--quick",), 2, "sdpa"),
        ("tiny:mpt", ("--quick",), 2, "eager"),  # the only one that it has
    ):
        code, out, err = run("verify", name, "--rung", "ratio_1", "--rung", "moved_chunk", "--json", *given)
        document = json.loads(out)
        assert code == 0
        assert f"{count} of {count}: moved_chunk in float32 with {attention} attention\n" in err
        assert f"{name} is blended exactly: {count} of {count} checks hold" in err
        assert {"model", "supported", "reason", "rungs"} <= set(document)
        assert document["model"] == name
        assert document["supported"]
        assert all({"name", "passed", "max_abs_error", "tolerance"} < set(rung) for rung in document["rungs"])
        assert len({(rung["name"], rung["dtype"], rung["attention"]) for rung in document["rungs"]}) == count


def test_verify_command_ends_with_1_and_names_what_fails_or_is_refused(monkeypatch, run):
    code, out, err = run("verify", "tiny:gpt2", "--json")
    assert code == 1
    assert json.loads(out)["rungs"] == []
    assert "layer 0 of GPT2LMHeadModel" in err
    monkeypatch.setattr(rows, "row_lines", looking_ahead)
    code, out, err = run(*"verify tiny:llama --dtype float32 --attention sdpa --rung fused_ratio --json".split())
    document = json.loads(out)
    assert code == 1
    assert not (document["supported"])
    assert not document["rungs"][0]["passed"]
    assert "fused_ratio" in document["reason"]
    assert "fused_ratio" in err


def test_verify_command_that_is_stopped_says_what_was_checked_until_then(monkeypatch, run):
    monkeypatch.setitem(CHECKS, "fused_ratio", replace(CHECKS["fused_ratio"], measure=raising(KeyboardInterrupt())))
    words = "verify tiny:llama --dtype float32 --attention sdpa --rung ratio_1 --rung fused_ratio".split()
    code, out, err = run(*words)
    assert code == 130
    assert out == ""
    assert "Stopped. Checks run until then: 1, none of them wrong. The rest was not checked" in err


@pytest.mark.parametrize("words", [["tiny:lama"], ["tiny:qwen3", "--rung", "ratio_2"], ["x", "--dtype", "int8"]])
def test_verify_command_ends_with_2_after_wrong_usage(words, run):
    code, _, err = run("verify", *words)
    assert code == 2
    assert "Did you mean" in err or "int8" in words
