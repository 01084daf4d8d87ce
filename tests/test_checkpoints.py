# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A prompt that continues a saved prefix is what stock transformers makes of the whole, and damage is never used."""

import copy
import os
import shutil
import subprocess
import sys
from functools import cache

import pytest
import torch
from tiny_image_models import tiny_image_model
from tiny_models import tiny_model
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from hf_blend import BlendCache, ChunkStore, ConfigError, PromptError, StateCheckpoints, UnsupportedModelError
from hf_blend.context.continuing import StockForm
from hf_blend.model.anatomy import stock_cache
from tests import asking
from tests.forging import sealed_header

HYBRIDS = ("lfm2", "qwen3_next", "qwen3_5_text", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "jamba",
           "kimi_linear", "minimax", "zamba", "zamba2")  # fmt: skip
ONE_BY_ONE = ("jamba", "zamba")  # the code of 5.23 ignores the state before several tokens
TYPES = (*HYBRIDS, "llama", "gemma2", "gemma3n_text", "deepseek_v32")
FAST = {("lfm2", 7), ("qwen3_next", 7), ("falcon_h1", 1), ("jamba", 7), ("minimax", 1), ("gemma2", 7), ("llama", 1)}
CASES = [pytest.param(name, tail, marks=() if (name, tail) in FAST else pytest.mark.slow)
         for name in TYPES for tail in (1, 7)]  # fmt: skip
PREFIX = 37  # longer than the windows and some chunks of the tiny models
ALLOWED = 2e-5  # of the logits' size; a state that is not restored is off by 0.1 and more

model_of = cache(tiny_model)


def prompt(tokens=PREFIX + 7, seed=0):
    return asking.prompt(tokens, seed)


@torch.no_grad()
def stock(model, ids):
    """Logits of the last tokens and greedy text of stock transformers, which sees the whole prompt at once."""
    text = model.generate(ids, past_key_values=stock_cache(model), max_new_tokens=4, min_new_tokens=4)
    return model(ids, past_key_values=stock_cache(model)).logits, text


@torch.no_grad()
def difference(model, cache, ids):
    """How far the logits behind what a cache holds are from the stock ones; the cache is not changed."""
    held = cache.get_seq_length()
    places = torch.arange(held, ids.shape[1])[None]  # as generate gives them; Bamba counts from 0 without
    rest = model(ids[:, held:], position_ids=places, past_key_values=copy.deepcopy(cache)).logits
    expected = stock(model, ids)[0][:, -rest.shape[1] :]
    return float((rest - expected).norm() / expected.norm())


@pytest.mark.parametrize(("name", "tail"), CASES)
def test_logits_and_text_behind_a_saved_prefix_are_those_of_the_whole_prompt(tmp_path, name, tail, untouched):
    model, ids = model_of(name), prompt(PREFIX + tail)
    with untouched(model):
        live = StateCheckpoints(model, tmp_path).prefill(ids[:, :PREFIX])
        again = StateCheckpoints(model, tmp_path)
        resumed = again.resume(ids)
    assert again.stats.resumed_tokens == PREFIX
    assert resumed.get_seq_length() == (PREFIX + tail - 1 if name in ONE_BY_ONE else PREFIX)
    if name not in ONE_BY_ONE:  # bit for bit as the cache in the other object continues
        assert difference(model, resumed, ids) == difference(model, live, ids)
    assert difference(model, resumed, ids) <= ALLOWED
    got = model.generate(ids, past_key_values=resumed, max_new_tokens=4, min_new_tokens=4)
    assert torch.equal(got, stock(model, ids)[1])


def found(model, folder, ids, **how):
    """How many tokens of a prompt another process finds saved."""
    return StateCheckpoints(model, folder, **how).resume(ids).get_seq_length()


def passes_over(model, folder, ids):
    """The same where one file is passed over as faulty."""
    again = StateCheckpoints(model, folder)
    tokens = again.resume(ids).get_seq_length()
    assert again.stats.faults == 1
    return tokens


def entries(folder):
    """The files of saved prefixes, the shortest first: the end of a name is the number of tokens."""
    return sorted(folder.rglob("*.safetensors"), key=lambda path: int(path.stem[-8:], 16))


def saved_states(folder, model=None):
    """A model, a prompt, and a folder in which its first tokens are saved."""
    model, ids = model or model_of("lfm2"), prompt()
    StateCheckpoints(model, folder).prefill(ids[:, :PREFIX])
    return model, ids


MANY = """
import sys, torch
from hf_blend import StateCheckpoints
from tiny_models import tiny_model
model = tiny_model("lfm2")
saved = StateCheckpoints(model, sys.argv[1], max_bytes=60_000)
draw = torch.Generator().manual_seed(int(sys.argv[2]))
beginnings = [torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
for round in range(40):
    ids = torch.cat((beginnings[round % 4], torch.randint(3, 6, (1, 3), generator=draw)), dim=1)
    held = saved.prefill(ids, ends=[20, 22])
    got = model(ids[:, 22:], past_key_values=held, position_ids=torch.tensor([[22]])).logits[:, -1]
    error = (got - model(ids).logits[:, -1]).norm() / got.norm()
    assert error < 2e-5, (round, error)
print(saved.stats.hits > 0, saved.stats.evicted > 0, saved.stats.rejected, saved.stats.faults)
"""


@pytest.mark.slow
def test_processes_that_share_a_bounded_folder_never_see_half_a_file(tmp_path):
    how = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}}
    running = [subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path), str(seed)], **how) for seed in range(3)]
    outputs = [process.communicate()[0].strip() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert outputs == ["True True 0 0"] * 3
    assert not list(tmp_path.rglob("*.tmp"))


def test_no_damage_is_used_and_what_is_left_still_is(tmp_path):
    model, ids = model_of("lfm2"), prompt()
    first = StateCheckpoints(model, tmp_path)
    cache = first.prefill(ids[:, :20])
    first.prefill(ids[:, :PREFIX])
    short, long = entries(tmp_path)
    intact = {path: path.read_bytes() for path in (short, long)}
    contents = [b"", b"hello", b'{"__metadata__":{"format":"hf_blend.checkpoint/2"']
    content = intact[long]
    contents += [content[: len(content) * part // 7] for part in range(1, 7)] + [content[:-1], content + b"\0"]
    contents += [content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :] for at in range(0, len(content), 1501)]
    for damaged in contents:
        long.write_bytes(damaged)
        assert passes_over(model, tmp_path, ids) == 20
        assert not long.exists()  # it can never become good
    assert difference(model, StateCheckpoints(model, tmp_path).resume(ids), ids) <= ALLOWED
    long.write_bytes(content)
    short.write_bytes(intact[short][:-3])  # what the longer one continues
    again = StateCheckpoints(model, tmp_path)
    assert again.resume(ids).get_seq_length() == 0
    assert (again.stats.misses, again.stats.faults, again.nbytes) == (1, 1, 0)
    assert again.save(cache, ids) > 0
    StateCheckpoints(model, tmp_path).prefill(ids, ends=[20, PREFIX])
    short.unlink()  # as where another process needed the room, so that nothing can be done with the longer one
    again = StateCheckpoints(model, tmp_path)
    assert again.prefill(ids, ends=[PREFIX]).get_seq_length() == PREFIX
    assert (again.stats.misses, again.stats.saved, again.stats.faults) == (1, 1, 0)
    assert again.resume(ids).get_seq_length() == PREFIX


HOLES = {
    "longer than its header says": lambda path: os.truncate(path, 1 << 43),
    "as long as its header says": lambda path: pretend(path, 1 << 43),
    "with a header of its length": lambda path: pretend(path, 1 << 43, size=(1 << 43) - 200),
}


def pretend(path, nbytes, size=None):
    """A file whose header tells of as many bytes as it has, all of them holes."""
    row = f'"x":{{"dtype":"U8","shape":[{nbytes}],"data_offsets":[0,{nbytes}]}}}}'
    content = sealed_header("hf_blend.checkpoint/2", f'","digests":"[\\"{"0" * 32}\\"]"}},{row}'.encode())
    path.write_bytes(content if size is None else size.to_bytes(8, "little") + content[8:])
    os.truncate(path, len(content) + nbytes if size is None else 8 + size)


@pytest.mark.parametrize("holes", HOLES.values(), ids=HOLES)
def test_a_file_of_terabytes_of_holes_is_passed_over_and_removed_unread(tmp_path, holes):
    model, ids = model_of("lfm2"), prompt()
    StateCheckpoints(model, tmp_path).prefill(ids, ends=[20, PREFIX])
    _, path = entries(tmp_path)
    holes(path)
    assert passes_over(model, tmp_path, ids) == 20
    assert not path.exists()
    StateCheckpoints(model, tmp_path).prefill(ids, ends=[PREFIX])
    assert found(model, tmp_path, ids) == PREFIX


def test_a_file_larger_than_all_may_be_leaves_before_any_other(tmp_path):
    model, ids = saved_states(tmp_path)
    (kept,) = entries(tmp_path)
    long = kept.with_stem(f"{kept.stem[:-8]}{99:08x}")
    long.write_bytes(b"")
    os.truncate(long, 1 << 43)
    StateCheckpoints(model, tmp_path, max_bytes=100 * kept.stat().st_size).prefill(prompt(12, 5))
    assert not long.exists()
    assert found(model, tmp_path, ids) == PREFIX


def test_files_of_other_tokens_another_model_or_another_secret_are_passed_over(tmp_path):
    model, ids = saved_states(tmp_path / "a")
    (own,) = entries(tmp_path / "a")
    others = {"tokens": (model, {}), "model": (tiny_model("lfm2", seed=1), {}), "secret": (model, {"secret": b"x"})}
    for number, (other, options) in enumerate(others.values(), 2):
        folder = tmp_path / str(number)
        seed = number if other is model and not options else 0  # otherwise the same tokens
        StateCheckpoints(other, folder, **options).prefill(prompt(seed=seed)[:, :PREFIX])
        (path,) = entries(folder)
        assert path.name != own.name
        shutil.copytree(tmp_path / "a", folder, dirs_exist_ok=True)
        path.rename(folder / own.relative_to(tmp_path / "a"))  # as if two prefixes had one name
        assert passes_over(model, folder, ids) == 0
    StateCheckpoints(model, tmp_path / "4", secret=b"x").prefill(ids[:, :PREFIX])
    assert found(model, tmp_path / "4", ids) == 0
    assert found(model, tmp_path / "4", ids, secret=b"x") == PREFIX


def test_changed_weights_another_dtype_and_another_transformers_find_nothing(tmp_path, monkeypatch):
    model, ids = saved_states(tmp_path, tiny_model("lfm2", seed=3))
    with torch.no_grad():
        model.model.layers[0].feed_forward.w1.weight.add_(0.01)
    assert found(model, tmp_path, ids) == 0
    model = tiny_model("lfm2", seed=3)
    assert found(model, tmp_path, ids) == PREFIX
    monkeypatch.setattr("transformers.__version__", "5.999.0")
    assert found(model, tmp_path, ids) == 0
    assert StateCheckpoints(model.bfloat16(), tmp_path).resume(ids).get_seq_length() == 0


@pytest.mark.parametrize("name", ["qwen3_next", "gemma2", "llama"])
def test_two_tails_of_one_prefix_do_not_feel_each_other(tmp_path, name):
    model, one, other = model_of(name), prompt(), prompt()
    other[:, PREFIX:] = prompt(7, 5)
    saved = StateCheckpoints(model, tmp_path)
    saved.prefill(one[:, :PREFIX])
    first, second = saved.resume(one), saved.resume(other)
    texts = [model.generate(ids, past_key_values=held, max_new_tokens=4, min_new_tokens=4)
             for ids, held in ((one, first), (other, second))]  # fmt: skip
    assert torch.equal(texts[0], stock(model, one)[1])
    assert torch.equal(texts[1], stock(model, other)[1])


def test_the_longest_prefix_is_found_and_keys_and_values_are_saved_once(tmp_path):
    model, ids = model_of("bamba"), prompt(200)
    saved = StateCheckpoints(model, tmp_path)
    sizes = []
    for end in (50, 100, 150):
        before = saved.stats.saved_bytes
        saved.prefill(ids[:, :end])
        sizes.append(saved.stats.saved_bytes - before)
    assert max(sizes) - min(sizes) < 200  # 50 tokens and the states each, and some bytes of header
    assert saved.nbytes == sum(sizes) == saved.stats.saved_bytes
    for length, expected in ((200, 150), (150, 100), (120, 100), (51, 50), (50, 0)):
        assert found(model, tmp_path, ids[:, :length]) == expected
    resumed = StateCheckpoints(model, tmp_path).resume(ids)
    assert difference(model, resumed, ids) <= ALLOWED
    assert saved.save(saved.resume(ids), ids) == 0  # is saved already


def test_what_was_used_last_stays_and_no_beginning_leaves_before_what_continues_it(tmp_path):
    model, ids, other = model_of("lfm2"), prompt(), prompt(PREFIX, 9)
    saved = StateCheckpoints(model, tmp_path)
    saved.prefill(ids, ends=[20, PREFIX])
    size = saved.nbytes
    saved.prefill(other)
    assert found(model, tmp_path, ids) == PREFIX  # used after the other one
    alone = tmp_path / "one"
    room = size + StateCheckpoints(model, alone).save(computed(model, prompt(4, 4), alone), prompt(4, 4))
    bounded = StateCheckpoints(model, tmp_path, max_bytes=room)
    bounded.prefill(prompt(4, 4))
    assert (bounded.stats.evicted, bounded.stats.rejected) == (1, 0)
    assert bounded.resume(torch.cat((other, other), 1)).get_seq_length() == 0
    bounded.prefill(prompt(4, 5))
    assert bounded.nbytes <= room
    assert found(model, tmp_path, ids) == 20  # the longer one left first
    small = StateCheckpoints(model, tmp_path, max_bytes=100)
    held = small.prefill(prompt(30, 11))
    assert (held.get_seq_length(), small.stats.rejected, small.stats.evicted) == (30, 1, 0)


def computed(model, ids, folder):
    """A cache of `resume` that a call of the model has filled."""
    held = StateCheckpoints(model, folder).resume(ids)
    with torch.no_grad():
        model(ids, past_key_values=held)
    return held


def hooked(model, held, ids):
    with model.model.layers[1].register_forward_hook(lambda module, given, output: output * 1.1):
        model(ids, past_key_values=held)


def training(model, held, ids):
    model.train()(ids, past_key_values=held)
    model.eval()


def under_autocast(model, held, ids):
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, past_key_values=held)


def by_hand(model, held, ids):
    whole = stock_cache(model)
    model(ids, past_key_values=whole)
    for index, layer in enumerate(whole.layers):
        held.update(layer.keys, layer.values, index)


def changed(model, held, ids):
    weight = model.model.layers[0].self_attn.k_proj.weight
    kept = weight.data.clone()
    weight.data.mul_(1.1)
    model(ids, past_key_values=held)
    weight.data.copy_(kept)


WRONG = {
    "training mode": training,
    "torch.autocast is on": under_autocast,
    "forward hook": hooked,
    "another model object": lambda model, held, ids: tiny_model("llama", seed=1)(ids, past_key_values=held),
    "other positions than 0 to 8": lambda model, held, ids: model(
        ids, position_ids=torch.arange(9)[None] * 2, past_key_values=held
    ),
    "its token 2 is": lambda model, held, ids: model(
        torch.where(torch.arange(9) == 2, ids + 1, ids), past_key_values=held
    ),
    "from none": by_hand,
    "the model was another one": changed,
    "padding, or with a mask": lambda model, held, ids: model(
        ids, attention_mask=torch.arange(9)[None] != 3, past_key_values=held
    ),
    "embeddings without ids": lambda model, held, ids: model(
        inputs_embeds=model.get_input_embeddings()(ids), past_key_values=held
    ),
}


@pytest.mark.parametrize("why", WRONG)
@torch.no_grad()
def test_a_cache_that_was_filled_with_something_else_is_refused_by_name(tmp_path, why):
    model, ids = tiny_model("llama", attention_dropout=0.2), prompt(9)
    saved = StateCheckpoints(model, tmp_path)
    held = saved.resume(ids)
    WRONG[why](model, held, ids)
    assert held.get_seq_length() == 9
    with pytest.raises(ConfigError, match=rf"(?s)9 tokens cannot be saved, because.*{why}.*Get it from resume"):
        saved.save(held, ids)
    model(prompt(1, 1), past_key_values=held)  # what came before or comes afterwards makes it no better
    with pytest.raises(ConfigError, match=why):
        saved.save(held, torch.cat((ids, prompt(1, 1)), dim=1))
    assert saved.nbytes == 0


@torch.no_grad()
def test_what_was_wrong_behind_a_saved_prefix_is_refused_too(tmp_path):
    model, ids = saved_states(tmp_path)
    for wrong in (training, under_autocast):
        saved = StateCheckpoints(model, tmp_path)
        held = saved.resume(ids)
        wrong(model, held, ids[:, PREFIX:])
        with pytest.raises(ConfigError, match="cannot be saved"):
            saved.save(held, ids)
    assert found(model, tmp_path, prompt(PREFIX + 9)) == PREFIX


@pytest.mark.parametrize("name", ["lfm2", "llama"])
def test_any_way_of_decoding_and_any_call_of_the_model_can_be_saved(tmp_path, name, untouched):
    model, ids = model_of(name), prompt()
    ways = {"greedy": {}, "in parts": {"prefill_chunk_size": 10}}
    ways |= {"prompt lookup": {"prompt_lookup_num_tokens": 3}} if name == "llama" else {}
    for way, settings in ways.items():
        saved = StateCheckpoints(model, tmp_path / way)
        with untouched(model):
            held = saved.resume(ids)
            text = model.generate(ids, past_key_values=held, max_new_tokens=9, do_sample=False, **settings)
            assert saved.save(copy.deepcopy(held), text) > 0
        more = torch.cat((text, prompt(5, 3)), dim=1)
        resumed = StateCheckpoints(model, tmp_path / way).resume(more)
        assert resumed.get_seq_length() == text.shape[1] - 1
        assert difference(model, resumed, more) <= ALLOWED
    held = computed(model, ids[:, :20], tmp_path / "calls")
    with torch.no_grad():
        model(ids[:, 20:30], position_ids=torch.arange(20, 30)[None], past_key_values=held)
        model(ids[:, 30:], position_ids=torch.arange(30, ids.shape[1])[None], past_key_values=held)
    assert StateCheckpoints(model, tmp_path / "calls").save(held, ids) > 0
    assert difference(model, StateCheckpoints(model, tmp_path / "calls").resume(ids[:, :-1]), ids) <= ALLOWED


def test_beyond_the_length_at_which_rotary_frequencies_change_nothing_is_saved_or_found(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=120)
    saved, ids = StateCheckpoints(model, tmp_path), prompt(125)
    saved.prefill(ids[:, :20])
    assert saved.resume(ids[:, :30]).get_seq_length() == 20
    assert saved.resume(ids).get_seq_length() == 0
    with pytest.raises(PromptError, match="rotary frequencies"):
        saved.prefill(ids)
    with pytest.raises(PromptError, match="rotary frequencies"):
        saved.save(computed(model, ids, tmp_path / "none"), ids)


def test_a_place_where_two_prompts_part_is_saved_without_being_declared(tmp_path):
    model, shared = model_of("lfm2"), prompt(100)
    prompts = [torch.cat((shared, prompt(20, seed)), dim=1) for seed in (1, 2, 3)]
    saved, counts = StateCheckpoints(model, tmp_path), []
    for ids in prompts:
        assert difference(model, saved.prefill(ids[:, :-1]), ids) <= ALLOWED
        counts.append(saved.stats.saved)
    assert counts == [1, 3, 4]
    fourth = torch.cat((shared, prompt(20, 4)), dim=1)
    assert saved.resume(fourth).get_seq_length() == 100


def forgets_before_several():
    """Code that takes a state into account only where one token comes at a time."""
    update = LinearAttentionLayer.update_conv_state

    def forgets(layer, conv_states, state_idx=0, **options):
        if conv_states.shape[-1] > 1 and layer.has_previous_state[state_idx]:
            layer.conv_states[state_idx].zero_()
        return update(layer, conv_states, state_idx, **options)

    return forgets


def test_a_model_that_forgets_its_state_before_several_tokens_is_continued_one_by_one(tmp_path, monkeypatch):
    model, ids = tiny_model("lfm2"), prompt()
    expected, held_by_stock = stock(model, ids), stock_cache(model)
    with torch.no_grad():
        model(ids, past_key_values=held_by_stock)
    monkeypatch.setattr(LinearAttentionLayer, "update_conv_state", forgets_before_several())
    saved = StateCheckpoints(model, tmp_path)
    saved.prefill(ids, ends=[20, PREFIX])
    resumed = StateCheckpoints(model, tmp_path).resume(ids)
    assert resumed.get_seq_length() == ids.shape[1] - 1
    with torch.no_grad():
        logits = model(ids[:, -1:], past_key_values=copy.deepcopy(resumed)).logits
    assert (logits - expected[0][:, -1:]).norm() / logits.norm() <= ALLOWED
    output = model.generate(ids, past_key_values=resumed, max_new_tokens=4, min_new_tokens=4)
    assert torch.equal(output, expected[1])
    assert saved.save(resumed, output) > 0
    longer = torch.cat((output, prompt(5, 1)), dim=1)
    for held in (resumed, saved.prefill(ids[:, :PREFIX]), saved.prefill(prompt(9, 8))):
        with pytest.raises(UnsupportedModelError, match="came at once"):
            model.generate(longer, past_key_values=held, max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"of resume\(\) or prefill\(\) is expected"):
        saved.save(held_by_stock, ids)
    ready = saved.prefill(longer, ends=[20])
    assert ready.get_seq_length() == longer.shape[1] - 1


def always_forgetting(monkeypatch):
    patched = LinearAttentionLayer.__dict__["lazy_initialization"]

    def forget(layer, conv_states, state_idx=0, **options):
        patched(layer, conv_states=conv_states, state_idx=state_idx)
        return torch.nn.functional.pad(conv_states, (layer.conv_kernel_size[state_idx], 0))

    monkeypatch.setattr(LinearAttentionLayer, "update_conv_state", forget)
    return tiny_model("lfm2")


OUTSIDE = {
    "cannot be continued": always_forgetting,
    "rope_deltas": lambda _: tiny_image_model("qwen2_vl"),
    "one by one differ": lambda _: tiny_model("recurrent_gemma"),
}


@pytest.mark.parametrize("why", OUTSIDE)
def test_a_model_that_forgets_its_state_or_keeps_it_outside_the_cache_is_refused(tmp_path, monkeypatch, why):
    saved = StateCheckpoints(OUTSIDE[why](monkeypatch), tmp_path)
    for call in (saved.resume, saved.prefill):
        with pytest.raises(UnsupportedModelError, match=why):
            call(prompt())


def test_only_what_the_model_computed_of_one_text_is_saved(tmp_path):
    model, ids = model_of("lfm2"), prompt()
    saved = StateCheckpoints(model, tmp_path)
    blended = BlendCache(model, ChunkStore.open("memory://"))
    model.generate(ids, past_key_values=blended, max_new_tokens=1)
    batch = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids.repeat(2, 1), past_key_values=batch)
    held = saved.prefill(ids)
    empty = saved.resume(prompt(9, 9))
    for cache_, ids_ in ((blended, ids), (batch, ids), (empty, ids), (None, ids), (held, ids[:, :5])):
        with pytest.raises(ConfigError, match="expected"):
            saved.save(cache_, ids_)
    for given in ({"input_ids": ids.repeat(2, 1)}, {"input_ids": "text"}, {"input_ids": ids.float()},
                  {"input_ids": ids, "attention_mask": torch.zeros_like(ids)},
                  {"input_ids": ids, "pixel_values": torch.ones(1, 3, 2, 2)}):  # fmt: skip
        with pytest.raises(PromptError, match="expected"):
            saved.resume(**given)
    for ends in ([], [0], [99], [-1], 5, [2.0]):
        with pytest.raises(ConfigError, match="ends are"):
            saved.prefill(ids, ends)
    with pytest.raises(ConfigError, match="max_bytes"):
        StateCheckpoints(model, tmp_path, max_bytes=0)


def test_a_cache_in_which_a_forward_failed_between_two_layers_is_refused(tmp_path, monkeypatch):
    model, ids = tiny_model("gemma3_text"), prompt(60)
    saved = StateCheckpoints(model, tmp_path)
    held = saved.prefill(ids[:, :40])
    monkeypatch.setattr(held.layers[3], "update", asking.raising(KeyError("on purpose")))
    with pytest.raises(KeyError), torch.no_grad():
        model(ids[:, 40:], past_key_values=held)  # windows are full before and behind it
    with pytest.raises(ConfigError, match=r"layers hold \[40, 60\] tokens"):
        saved.save(held, ids)


@pytest.mark.parametrize("at", [1, 3])
def test_a_cache_whose_states_are_of_two_places_is_refused(tmp_path, monkeypatch, at):
    model, ids, saved = model_of("lfm2"), prompt(), StateCheckpoints(model_of("lfm2"), tmp_path)
    saved.prefill(ids[:, :PREFIX])
    held = saved.resume(ids)
    assert held.get_seq_length() == PREFIX
    monkeypatch.setattr(held.layers[at], "update_conv_state", asking.raising(KeyError("on purpose")))
    with pytest.raises(KeyError), torch.no_grad():
        model(ids[:, PREFIX:], past_key_values=held)
    with pytest.raises(ConfigError, match="states of some layers only"):
        saved.save(held, ids)


def test_a_full_or_closed_folder_costs_only_the_checkpoint(tmp_path, monkeypatch):
    model, ids = model_of("lfm2"), prompt()
    saved = StateCheckpoints(model, tmp_path)
    full = asking.raising(OSError(28, "no space left on device"))
    monkeypatch.setattr("hf_blend.store.tiers.disk.write_atomically", full)
    assert saved.prefill(ids).get_seq_length() == ids.shape[1]
    assert saved.stats.rejected == 1
    assert saved.nbytes == 0


def test_a_layer_that_keeps_something_else_is_refused_by_name():
    held = stock_cache(model_of("lfm2"))
    held.layers[1].ring = {"buffer": torch.ones(2)}
    with pytest.raises(UnsupportedModelError, match="layer 1 of a DynamicCache keeps ring"):
        StockForm(held)
