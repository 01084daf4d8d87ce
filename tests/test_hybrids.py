# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models with mixers: linear attention, state spaces and convolutions between or beside layers of attention."""

import copy
import re
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_blend import BlendCache, ChunkStore, ConfigError, UnsupportedModelError, observer, plugins
from hf_blend.cache.blend_cache import IGNORES_STATES
from hf_blend.cache.mixer_layer import MixerLayer
from hf_blend.context.continuing import continuing
from hf_blend.context.sequence_cache import SequenceCache
from hf_blend.model import mixer
from hf_blend.model.fingerprint import fingerprint
from hf_blend.model.mixer import ActiveRows, MixerPass
from hf_blend.model.mixer_probe import mixers_of
from hf_blend.prefill import mixers
from hf_blend.prefill.realign import Realigner
from hf_blend.store import stack
from hf_blend.store.chunk import ChunkKey
from hf_blend.verify.everything import RUNGS
from hf_blend.verify.ladder import measure
from hf_blend.verify.subject import ModelUnderTest
from hf_blend.verify.zoo import tiny_model
from tests.chat_templates import CHATML, DOCUMENTS, small_tokenizer
from tests.conftest import slow_but
from tests.faults.damage import tensors_of

# one for each way in which a mixer stands in a layer: before its MLP, beside attention, behind it, alone
FAST = ("qwen3_next", "lfm2", "minimax")  # the last takes no cache but one of its own class
SLOW = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe", "lfm3",
    "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2",
)  # fmt: skip
WORDS = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
CONVOLUTION, DELTA = ["conv", "conv", "full_attention"], ["linear_attention", "linear_attention", "full_attention"]
DEEP = {"lfm2-deep": ("lfm2", 2 * CONVOLUTION), "qwen3_next-deep": ("qwen3_next", 2 * DELTA)}  # layers 3, 4 run once
TELLING = ("ratio_1_batch", "fused_ratio", "causality")


@cache
def subject_of(name):
    kind, layers = DEEP.get(name, (name, None))
    return ModelUnderTest(
        tiny_model(kind, **({"num_hidden_layers": len(layers), "layer_types": layers} if layers else {}))
    )


def failing(name, rungs):
    found = [measure(rung, subject_of(name), "float32", "sdpa") for rung in rungs]
    return [(rung.name, rung.max_abs_error, rung.tolerance, rung.detail) for rung in found if not rung.passed]


def pieces(seed=0, lengths=(12, 9, 14), question=6):
    draw = torch.Generator().manual_seed(seed)
    ids = lambda count: torch.randint(8, 128, (count,), generator=draw).tolist()  # noqa: E731
    return {"prefix": [1, *ids(3)], "chunks": [ids(count) for count in lengths], "question": ids(question)}


@pytest.mark.parametrize(
    ("name", "rungs"),
    slow_but(
        ("lfm2-deep", TELLING),
        ("minimax", TELLING),
        among=[("lfm2-deep", TELLING), ("qwen3_next-deep", ("fused_ratio",)), ("minimax", TELLING)],
    ),
)
def test_a_hybrid_is_exact_in_a_padded_batch_and_equals_the_dense_forward_with_stale_tokens(name, rungs):
    with poisoned_memory():
        assert failing(name, rungs) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *SLOW, *DEEP])
def test_a_hybrid_climbs_the_ladder(name):
    assert failing(name, RUNGS) == []


@pytest.mark.parametrize("name", ["lfm2", "minimax"])
def test_a_hybrid_verified_by_all_rungs_is_not_called_wrong_where_a_scan_cannot_be_cut(name):
    found = [measure(rung, subject_of(name), "float32", "sdpa") for rung in ("prefix_cache", "question_is_fresh")]
    assert [rung.passed for rung in found] == [True, None]
    assert "mixers" in found[1].detail


def state_kept_after_a_look(monkeypatch):
    monkeypatch.setattr(mixers.MixerRows, "restore", lambda self, states: None)


def convolution_tail_missing(monkeypatch):
    lay = Realigner.lay_projections

    def without_tails(self, layer, slots, states, *spans):
        lay(self, layer, slots, states, *spans)
        for slot in slots:
            states[slot.row, :, slot.columns.stop - 2 : slot.columns.stop] = 0

    monkeypatch.setattr(Realigner, "lay_projections", without_tails)


def column_left_out(monkeypatch):
    lay = Realigner.lay_projections

    def without_column(self, layer, slots, states, *spans):
        lay(self, layer, slots, states, *spans)
        states[..., 1] = 0

    monkeypatch.setattr(Realigner, "lay_projections", without_column)


def stored_not_laid_where_it_is_read(monkeypatch):
    lay = Realigner.lay_projections

    def laid_where_it_is_kept(self, layer, slots, states, *spans):
        if states.shape[-1] == 2 * 64:  # the felt columns side by side
            lay(self, layer, slots, states, *spans)

    monkeypatch.setattr(Realigner, "lay_projections", laid_where_it_is_kept)


def fresh_rows_not_written(monkeypatch):
    write = mixer.ActiveRows.write

    def but_the_first(self, whole, rows):
        kept = (
            whole[:, :1].clone()
            if self.columns.shape[1] < 2
            else whole.gather(1, self.columns[:, :1, None].expand(-1, 1, whole.shape[-1])).clone()
        )
        write(self, whole, rows)
        whole.scatter_(1, self.columns[:, :1, None].expand_as(kept), kept)

    monkeypatch.setattr(mixer.ActiveRows, "write", but_the_first)


def padding_forgotten(monkeypatch):
    init = mixers.MixerRows.__init__
    monkeypatch.setattr(mixers.MixerRows, "__init__", lambda self, *args: init(self, *args[:3], None))


def rows_of_the_output_shifted(monkeypatch):
    outputs = mixer.MixerPass._row_outputs
    monkeypatch.setattr(mixer.MixerPass, "_row_outputs", lambda self, output: outputs(self, output.roll(1, 1)))


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("lfm2", convolution_tail_missing),
        ("lfm2", column_left_out),
        ("lfm2-deep", stored_not_laid_where_it_is_read),
        ("lfm2", fresh_rows_not_written),
        ("lfm2", rows_of_the_output_shifted),
        ("minimax", column_left_out),
        pytest.param("olmo_hybrid", state_kept_after_a_look, marks=pytest.mark.slow),
        pytest.param("qwen3_next", convolution_tail_missing, marks=pytest.mark.slow),
        pytest.param("qwen3_next", column_left_out, marks=pytest.mark.slow),
        pytest.param("qwen3_next-deep", padding_forgotten, marks=pytest.mark.slow),
    ],
)
def test_the_ladder_fails_where_a_mixer_is_fed_wrongly(name, mistake):
    subject = subject_of(name)
    assert subject.floor  # measured before anything is broken
    subject.blend(subject.prompts[:1], 0.3)  # and the model is tested, at first use
    with pytest.MonkeyPatch.context() as monkeypatch, poisoned_memory():
        mistake(monkeypatch)
        rungs = (measure(rung, subject, "float32", "sdpa") for rung in ("fused_ratio", "ratio_1_batch"))
        assert any(not rung.passed and rung.tolerance is not None for rung in rungs)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}])
def test_decoding_behind_a_blend_goes_on_as_stock(name, how):
    model = subject_of(name).model
    blended = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=1.0)
    inputs = blended.inputs(None, **pieces())
    given = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, **how}
    torch.manual_seed(0)
    got = model.generate(**inputs, past_key_values=blended, **given)
    torch.manual_seed(0)
    caches = name != "minimax" or "num_beams" not in how  # its stock cache does not follow the beams
    assert torch.equal(got, model.generate(**inputs, **given, use_cache=caches))
    assert blended.report.reusable_tokens >= 35


NEEDS_OPTION = ("explicit", "learned")


@pytest.mark.parametrize("selector", [name for name in plugins.describe("selectors") if name not in NEEDS_OPTION])
def test_every_selector_chooses_among_the_tokens_of_a_hybrid(selector):
    model = tiny_model("lfm2", layer_types=["conv", "full_attention"] * 2)
    for ratio in (0.3, 1.0):
        blended = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=ratio, selector=selector)
        inputs = blended.inputs(None, **pieces())
        with torch.no_grad():
            got = model(**inputs, past_key_values=blended, use_cache=True, logits_to_keep=1).logits
            plain = model(**inputs, use_cache=False).logits[:, -1:]
        assert got.isfinite().all()
        if len(blended.report.chosen_columns[0]) == 35:
            assert torch.allclose(got, plain, atol=1e-5)
    assert selector == "none" or len(blended.report.chosen_columns[0]) == 35


@pytest.mark.parametrize("name", [*FAST, "jamba", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_types_that_ignore_a_state_are_those_of_which_running_shows_it(name):
    model = tiny_model(name)
    assert continuing(model, fingerprint(model)).at_once == (name not in IGNORES_STATES)


@pytest.mark.parametrize("name", ["jamba", "zamba"])
def test_a_further_prompt_is_refused_where_the_model_would_ignore_the_state(name):
    model = tiny_model(name)
    cache = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=1.0)
    first = model.generate(**cache.inputs(None, **pieces()), past_key_values=cache, max_new_tokens=3, do_sample=False)
    more, words = torch.cat((first, torch.tensor([[7, 9, 11]])), dim=1), f"the code of {name} models takes the states"
    with pytest.raises(ConfigError, match=words):
        model.generate(more, past_key_values=cache, max_new_tokens=3, do_sample=False)
    again = cache.inputs(None, prefix=[], chunks=[], question=[7, 9, 11], history=first)
    with pytest.raises(ConfigError, match=words):
        model.generate(**again, past_key_values=cache, max_new_tokens=3, do_sample=False)
    cache.reset()
    got = model.generate(more, past_key_values=cache, max_new_tokens=3, do_sample=False)
    assert torch.equal(got, model.generate(more, max_new_tokens=3, do_sample=False))


def test_a_cache_of_a_hybrid_can_be_reset_and_copied_and_refuses_to_crop():
    model = subject_of("qwen3_next").model
    blended = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=0.3)

    def step(one, ids):
        return model(torch.tensor([[ids]]), past_key_values=one, use_cache=True).logits

    with torch.no_grad():
        logits = []
        for _ in range(2):
            inputs = blended.inputs(None, **pieces())
            logits.append(model(**inputs, past_key_values=blended, use_cache=True, logits_to_keep=1).logits)
            twin = copy.deepcopy(blended)
            assert torch.equal(step(blended, 9), step(twin, 9))
            with pytest.raises(ConfigError, match="whose state holds"):
                blended.crop(-1)
            blended.crop(0)
            blended.reset()
            assert blended.get_seq_length() == 0
    assert torch.equal(*logits)


def test_a_forward_that_fails_leaves_the_states_as_they_were():
    model = subject_of("qwen3_next").model
    blended = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=0.3)
    inputs = blended.inputs(None, **pieces())

    @observer
    def fail(*_):
        raise KeyError("on purpose")

    handle = model.model.layers[2].register_forward_hook(fail)
    with pytest.raises(KeyError, match="on purpose"), torch.no_grad():
        model(**inputs, past_key_values=blended, use_cache=True, logits_to_keep=1)
    handle.remove()
    assert not any(any(one.has_previous_state.values()) for one in blended.layers if isinstance(one, MixerLayer))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.model.layers.modules())
    with torch.no_grad():
        model(**blended.inputs(None, **pieces()), past_key_values=blended, use_cache=True, logits_to_keep=1)
    assert blended.report.reusable_tokens == 35


def test_what_no_other_token_feels_is_not_stored():
    model = subject_of("qwen3_next").model
    config, (first, *_) = model.config, mixers_of(model)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    assert first.width == 2 * keys + values + 2 * config.linear_num_value_heads  # without the gate, as wide as values
    out = next(one for one in first.projections if one.module is first.module.out_proj)
    assert out.width == 0


@pytest.mark.parametrize(
    ("columns", "slices"), [([], 0), ([4], 1), (range(7), 1), (range(0, 90, 2), 1), ([0, 1, 2, 8, 9, 10], 2)]
)
def test_columns_are_read_and_written_by_slices_also_where_gates_stand_between(columns, slices):
    parts = mixer.regular(columns)
    assert [number for part in parts for number in range(100)[part]] == list(columns)
    assert len(parts) == slices


@contextmanager
def poisoned_memory():
    """What nobody wrote is NaN, and not by chance what was there before."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Written(TorchDispatchMode):
    """Counts the numbers that operations write, views left out."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            outputs = output if isinstance(output, tuple | list) else [output]
            self.numbers += sum(one.numel() for one in outputs if isinstance(one, torch.Tensor))
        return output


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "qwen3_5_text"])
@torch.no_grad()
def test_what_is_stored_of_a_mixer_is_written_once_and_nothing_else_is_made_for_all_tokens(name):
    model, tokens = tiny_model(name), 512
    one = next(filter(None, mixers_of(model)))
    hidden, rows = torch.randn(1, tokens, 64), torch.tensor([[3, 40, 41, tokens - 1]])

    def run(given, rows, **how):
        cache = DynamicCache(config=model.config)
        cache_name = "past_key_values" if name == "lfm2" else "cache_params"
        entered = MixerPass(one, cache, ActiveRows(rows, tokens, {}), **how)
        entered.enter()
        with Written() as written:
            got = one.module(hidden_states=given, **{cache_name: cache})
        entered.leave()
        return got, entered.states, written.numbers

    expected, states, stock = run(hidden, None)

    def lay(into, spans):
        for columns, stored in spans:
            into[..., columns] = states[..., stored]

    with poisoned_memory():
        got, kept, blended = run(hidden[:, rows[0]], rows, lay=lay, keeps=False)
    assert kept is None
    assert torch.allclose(got, expected[:, rows[0]], atol=1e-6)
    out = next(projection.features for projection in one.projections if projection.is_result)
    scan = stock - tokens * (one.full_width + out + one.width)  # the projections' own outputs, and the states kept
    assert blended <= scan + tokens * one.full_width + 8 * len(rows[0]) * (one.full_width + out)


def test_a_layer_that_runs_once_lays_what_is_stored_where_its_mixer_reads_it(monkeypatch):
    kinds = ["conv", "conv", "full_attention", "conv", "conv", "conv"]
    subject = ModelUnderTest(tiny_model("lfm2", num_hidden_layers=len(kinds), layer_types=kinds))
    made = {index: [] for index in range(len(kinds))}
    subject.blend(subject.prompts[:1], 0.3)  # tests the model, at first use
    lay = Realigner.lay_projections

    def laying(self, layer, slots, states, *spans):
        made[layer].append(states.shape[-1])
        lay(self, layer, slots, states, *spans)

    monkeypatch.setattr(Realigner, "lay_projections", laying)
    monkeypatch.setattr(ActiveRows, "spread", lambda *_: pytest.fail("hidden states of all tokens were made"))
    subject.blend(subject.prompts[:1], 0.3)
    assert [made[index] for index in (3, 4)] == [[3 * 64]] * 2  # into the output of its projection
    assert made[5] == [2 * 64]  # looked at first, so kept


def test_unchosen_tokens_have_the_stored_projections(monkeypatch):
    subject, kept = subject_of("lfm2"), {}
    leave = mixer.MixerPass.leave

    def leaving(self):
        if self.states is not None and self.rows.columns is not None:
            kept[id(self._mixer.module)] = self.states.clone()
        leave(self)

    monkeypatch.setattr(mixer.MixerPass, "leave", leaving)
    got = subject.blend(subject.prompts[:1], 0.3)
    states = kept[id(mixers_of(subject.model)[3].module)][0]
    prompt, chosen = subject.prompts[0], set(got.cache.report.chosen_columns[0])
    for start, ids, *_ in prompt.spans():
        stored = subject.chunk(ids).layers[3][0][0]
        same = [bool(torch.equal(states[start + at], stored[at])) for at in range(len(ids))]
        assert same == [start + at not in chosen for at in range(len(ids))]


def test_projections_come_back_from_disk_as_they_were_stored(tmp_path):
    subject, ids = subject_of("lfm2"), tuple(range(20, 33))
    chunk = subject.chunk(ids)
    with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store:
        store.put(chunk)
        back = store.get(ChunkKey(fingerprint(subject.model), subject.chunk_prefix_ids, ids))
    assert [len(layer) for layer in back.layers] == [1, 1, 2, 1]
    assert back.layout == chunk.layout
    pairs = zip(chunk.named_tensors(), back.named_tensors(), strict=True)
    assert all(one == other and torch.equal(a, b) for (one, a), (other, b) in pairs)


@pytest.mark.parametrize("name", ["lfm2-deep", pytest.param("qwen3_next-deep", marks=pytest.mark.slow)])
def test_a_chunk_that_is_found_damaged_inside_a_mixer_is_computed_and_changes_nothing(name, tmp_path, monkeypatch):
    """A chunk is then computed by a forward of the same modules, in the middle of the one that asks for it."""
    monkeypatch.setattr(stack, "READ_BYTES", 0)  # a layer at a time, each when it is used
    model, layers = subject_of(name).model, range(len(DEEP[name][1]))

    def logits():
        with ChunkStore.open(tmp_path, memory_bytes=0, durability="none") as store, torch.no_grad():
            store.pipeline_depth = 1e-9
            cache = BlendCache(model, store, recompute_ratio=0.3)
            given = cache.inputs(None, **pieces())
            return model(**given, past_key_values=cache, logits_to_keep=1).logits, cache.report.computed_chunks

    logits()
    expected, computed = logits()
    assert computed == 0
    sound = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for layer in layers:
        for path, content in sound.items():
            _, last = next(at for name, at in tensors_of(content).items() if re.search(rf"\b{layer}\b", name))
            path.write_bytes(content[: last - 1] + bytes([content[last - 1] ^ 1]) + content[last:])
        got, computed = logits()
        assert torch.equal(got, expected), layer
        assert computed == len(sound), layer


def test_sequences_that_move_are_refused_for_a_hybrid_by_what_it_keeps():
    with pytest.raises(UnsupportedModelError, match=r"layer 0 keeps a state of another kind \(LinearAttention\)"):
        SequenceCache(subject_of("qwen3_next").model)


@pytest.mark.parametrize("name", FAST)
def test_a_chat_goes_on_in_the_cache_of_a_hybrid(name):
    tokenizer = small_tokenizer("spaces")
    model = tiny_model(name, vocab_size=len(tokenizer), max_position_embeddings=2048)
    blended = BlendCache(model, ChunkStore.open("memory://"), recompute_ratio=1.0)
    messages = [{"role": "user", "content": DOCUMENTS[0]}]
    for said in ("It is slow.", "Why?"):
        given = {"chat_template": CHATML, "add_generation_prompt": True}
        inputs = blended.inputs_from_messages(tokenizer, messages, DOCUMENTS[:1], chat_template=CHATML)
        stock = tokenizer.apply_chat_template(messages, **given, return_dict=True, return_tensors="pt")
        got = model.generate(**inputs, past_key_values=blended, **WORDS)
        assert torch.equal(got, model.generate(stock["input_ids"], **WORDS))
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
