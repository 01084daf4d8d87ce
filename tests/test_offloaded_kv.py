# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""KV that accelerate places beyond the device: the text is the same, the device holds no more than allowed."""

import copy
import gc
import os
import signal
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tiny_models import tiny_model as zoo_model

from hf_blend import BlendCache, BlendConfig, ConfigError, observer, sparse_decoding
from hf_blend.cache.layers import BlendLayer
from hf_blend.cache.quantised_layer import QuantisedLayer
from hf_blend.errors import OffloadError
from hf_blend.offload import memory as placing
from hf_blend.offload.layer import OffloadedLayer
from hf_blend.offload.memory import GROW_TOKENS, KVMemory
from hf_blend.offload.states import Folder, States
from tests.asking import GREEDY, memory
from tests.asking import LONG as PIECES
from tests.asking import asked as answered
from tests.conftest import slow_but

HOW = {
    "beams": {"num_beams": 3}, "lookup": {"prompt_lookup_num_tokens": 4}, "sampling": {"do_sample": True, "top_k": 20},
    "parts": {"prefill_chunk_size": 50}, "batch": {}, "auto": {}, "here": {},
}  # fmt: skip
ALL = product(("llama", "gemma3_text", "qwen3_next"), (None, 8, 4), HOW)
CASES = [
    *(("llama", None, how) for how in ("beams", "lookup", "sampling", "batch")), ("llama", 4, "beams"),
    ("gemma3_text", None, "auto"), ("gemma3_text", 8, "batch"), ("qwen3_next", 8, "auto"), ("llama", 8, "here"),
]  # fmt: skip
LAYERS = 12  # of the long model; bytes of K and V of a token in a layer
ROW = 2 * 2 * 16 * 4
WAYS = {**GREEDY, "max_new_tokens": 12}
LONG = {
    "prefix": [1, 4, 5],
    "chunks": [[(7 * place + chunk) % 120 + 3 for place in range(250)] for chunk in range(4)],
    "question": [5, 6, 7, 8],
}
TOKENS = 3 + 4 * 250 + 4
KV_BYTES = TOKENS * ROW * LAYERS


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


@pytest.fixture(scope="module")
def long_model(tiny_model):
    return tiny_model(num_hidden_layers=LAYERS, max_position_embeddings=2048)


def asked(model, store, pieces=PIECES, ways=WAYS, **settings):
    return answered(model, pieces, store=store, ways=ways, **settings)


def files(folder):
    return sorted(path.name for path in folder.rglob("*.dat"))


class Live:
    """The oracle: tensors that are alive while a step attends, found by the garbage collector."""

    def __init__(self, model, tokens):
        self.least = tokens * ROW // 2
        self.most = (tokens + 2 * GROW_TOKENS) * ROW // 2
        self.peak = 0
        gc.collect()  # what other tests have left
        projections = [layer.self_attn.o_proj for layer in model.model.layers[5:6]]
        self.columns = range(tokens, tokens + 2 * GROW_TOKENS + 1)  # no other test has prompts of this length
        self.handles = [module.register_forward_pre_hook(observer(self.look)) for module in projections]

    def is_context(self, tensor):
        return any(size in self.columns for size in tensor.shape)

    def look(self, module, args):
        if args[0].shape[1] == 1:
            tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor and self.is_context(one)]
            storages = [one.untyped_storage() for one in tensors]
            found = {one.data_ptr(): one.nbytes() for one in storages if self.least <= one.nbytes() <= self.most}
            self.peak = max(self.peak, sum(found.values()))


def test_max_memory_holds_a_prompt_of_four_times_its_size_and_the_text_is_the_same(long_model, untouched, tmp_path):
    store = memory()
    _, expected = asked(long_model, store, LONG)
    limit = KV_BYTES // 4
    with untouched(long_model):
        cache = BlendCache(
            long_model, store, kv_device_map="auto", max_memory={"cpu": limit}, offload_folder=str(tmp_path)
        )
        got = long_model.generate(**cache.inputs(None, **LONG), past_key_values=cache, **WAYS)
    assert torch.equal(got, expected)
    assert cache.report.reusable_tokens == 1000
    held = cache.kv_memory
    layer = (TOKENS + 12 + 2 * GROW_TOKENS) * ROW
    assert held.peak_resident_bytes <= limit + layer, "a layer beyond: the one read ahead"
    assert list(held.device_map.values()).count("cpu") == 1
    assert list(held.device_map.values()).count("disk") == 11
    assert held.loads >= 11 * 11
    assert held.prefetched >= held.loads - 12
    assert held.disk_bytes > 10 * TOKENS * ROW
    live = Live(long_model, TOKENS)
    long_model.generate(got, past_key_values=cache, **{**WAYS, "max_new_tokens": 3})
    for handle in live.handles:
        handle.remove()
    assert 2 * TOKENS * ROW <= live.peak <= limit + layer, "the counter is right: the tensors themselves are no more"
    del cache, held
    assert list(tmp_path.iterdir()) == [], "what was offloaded is deleted with the cache"


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_offloaded_layer_is_a_layer_on_its_device_whatever_is_done_with_it(tmp_path, monkeypatch, place, bits):
    monkeypatch.setattr(placing, "is_same", lambda *_: False)  # as if a GPU computed, and "cpu" were another place
    torch.manual_seed(0)

    def states(tokens, batch=2):
        return torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 6)

    plain = BlendLayer() if bits is None else QuantisedLayer(bits)
    memory = KVMemory([0, 1], BlendConfig(kv_device_map=place, offload_folder=tmp_path, kv_bits=bits))
    layer = OffloadedLayer(memory, 0)
    other = OffloadedLayer(memory, 1)

    def same(what):
        assert layer.get_seq_length() == plain.get_seq_length(), what
        if plain.get_seq_length():
            assert torch.equal(layer.keys, plain.keys), what
            assert torch.equal(layer.values, plain.values), what

    for number, tokens in enumerate((150, 1, 1, 70, *([1] * 130), 200, 1)):
        new = states(tokens)
        seen = [one.update(*new) for one in (plain, layer)]
        other.update(*new)
        assert all(torch.equal(*pair) for pair in zip(*seen, strict=True))
        if number % 40 == 0:
            same(tokens)
    same("appended")
    for removed in (-1, -30, -100, -1):
        for one in (plain, layer):
            one.crop(removed)
        same(removed)
        new = states(5)
        assert torch.equal(plain.update(*new)[0], layer.update(*new)[0])
    twin = copy.deepcopy(layer)
    for one in (plain, layer):
        one.batch_select_indices(torch.tensor([1, 0]))
        one.batch_repeat_interleave(2)
    same("batch")
    new = states(3, 4)
    assert torch.equal(plain.update(*new)[1], layer.update(*new)[1])
    assert twin.keys.shape[0] == 2
    before = [one.snapshot() for one in (plain, layer)]
    for one, snapshot in zip((plain, layer), before, strict=True):
        one.update(*(part.repeat(1, 1, 30, 1) for part in new))
        one.open(9, *new)
        one.restore(snapshot)
    same("restored")
    assert torch.equal(copy.deepcopy(layer).keys, plain.keys), "no bit changes in a copy"
    for one in (plain, layer):
        one.reset()
        one.update(*(part[:1] for part in new))
    same("used again")
    layer.reset()
    other.reset()
    assert memory.resident_bytes == memory.disk_bytes == 0
    assert bool(files(tmp_path)) == (place == "disk"), "those of the copy"
    del twin
    gc.collect()
    assert files(tmp_path) == []


@pytest.mark.parametrize(("family", "bits", "how"), slow_but(*CASES, among=ALL))
def test_kv_device_map_gives_the_logits_of_a_cache_on_its_device(tmp_path, family, bits, how):
    model = zoo_model(family)
    store = memory()
    pieces = PIECES
    ways = {**WAYS, "max_new_tokens": 70, "output_logits": True, "return_dict_in_generate": True, **HOW[how]}
    ways |= {"prompt_lookup_num_tokens": None} if family == "qwen3_next" else {}
    places = {"kv_device_map": {"here": "cpu", "auto": "auto"}.get(how, "disk"), "offload_folder": tmp_path}
    places |= {"max_memory": {"cpu": 60_000}} if how == "auto" else {}
    model = copy.deepcopy(model).to(torch.bfloat16) if how == "sampling" else model
    if how == "batch":
        chunks = [PIECES["chunks"], [[9, 8, 7] * 30, [4, 5] * 20]]
        pieces = {**PIECES, "prefix": [[1, 4, 5]] * 2, "chunks": chunks, "question": [[5, 6, 7], [8, 9]]}
    torch.manual_seed(3)
    there, found = asked(model, store, pieces, ways, kv_bits=bits, **places)
    torch.manual_seed(3)
    here, expected = asked(model, store, pieces, ways, kv_bits=bits)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(*pair) for pair in zip(found.logits, expected.logits, strict=True))
    own = {index: layer for index, layer in enumerate(here.layers) if type(layer) in (BlendLayer, QuantisedLayer)}
    assert {*there.kv_memory.device_map} == {*own}, "windows and states stay where they are"
    assert (there.kv_memory.disk_bytes > 0) == (how != "here")
    whole = sum(layer.keys.nbytes + layer.values.nbytes for layer in own.values())
    assert there.kv_memory.disk_bytes <= whole * {None: 1, 8: 0.6, 4: 0.5}[bits]
    assert not bits or all(there.layers[n].away_tokens == one.packed_tokens > 100 for n, one in own.items())


@pytest.mark.parametrize("how", ["cpu", "disk"])
def test_kv_device_map_of_a_model_that_accelerate_offloads(tiny_model, tmp_path, how):
    model = tiny_model()
    store = memory()
    _, expected = asked(model, store)
    if how == "cpu":
        cpu_offload(model, torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path / "weights"), execution_device=torch.device("cpu"))
    forwards = {name: module.forward for name, module in model.named_modules() if hasattr(module, "_hf_hook")}
    places = {"kv_device_map": "auto", "max_memory": {"cpu": 2 * 160 * ROW}, "offload_folder": tmp_path / "kv"}
    cache, got = asked(model, store, **places)
    assert torch.equal(got, expected)
    assert "disk" in cache.kv_memory.device_map.values()
    assert forwards == {name: module.forward for name, module in model.named_modules() if hasattr(module, "_hf_hook")}


@pytest.mark.parametrize(
    "sparse", [None, {"share": 0.999, "block_tokens": 8, "min_tokens": 0}], ids=["dense", "sparse"]
)
def test_damaged_file_is_refused_and_the_model_and_the_cache_stay_usable(model, untouched, tmp_path, sparse):
    store = memory()
    _, expected = asked(model, store)
    cache = BlendCache(model, store, kv_device_map={1: "disk", 3: "disk"}, offload_folder=str(tmp_path))
    with untouched(model), nullcontext() if sparse is None else sparse_decoding(model, cache, **sparse):
        text = model.generate(**cache.inputs(None, **PIECES), past_key_values=cache, **{**WAYS, "max_new_tokens": 1})
        [path] = tmp_path.rglob("layer.3.values.dat")
        with path.open("r+b") as file:
            file.seek(1234)
            file.write(b"\x55\xaa")
        message = r"tokens 0 to .* of layer\.3\.values.* not what was written.*reset\(\)"
        with pytest.raises(OffloadError, match=message):
            model.generate(text, past_key_values=cache, **WAYS)
    cache.reset()
    assert files(tmp_path) == []
    got = model.generate(**cache.inputs(None, **PIECES), past_key_values=cache, **WAYS)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("failing", ["a layer", 1, 3])
def test_forward_or_write_that_fails_leaves_what_was_there_and_can_be_asked_again(model, untouched, tmp_path, failing):
    places = {"kv_device_map": {1: "disk", 2: "disk"}, "offload_folder": str(tmp_path)}
    cache, first = asked(model, memory(), recompute_ratio=1.0, **places)
    turn = {"chunks": [list(range(30, 100))], "question": [3, 4]}
    before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    write = States._write
    writes = iter(range(100))

    def fill(self, name, data, offset):
        if next(writes) == failing:
            write(self, name, data[: len(data) // 2], offset)
            raise OffloadError("the disk is full")
        write(self, name, data, offset)

    with untouched(model), pytest.MonkeyPatch.context() as patch:
        more = cache.inputs(None, **turn, history=first)
        patch.setattr(States, "_write", fill)
        if failing == "a layer":
            patch.setattr(cache.layers[2], "_shown", lambda: 1 / 0)  # opened by then, and the two before it settled
        with pytest.raises((OffloadError, ZeroDivisionError)):
            model.generate(**more, past_key_values=cache, **WAYS)
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    whole = torch.tensor([[*first[0].tolist(), *turn["chunks"][0], *turn["question"]]])
    got = model.generate(**cache.inputs(None, **turn, history=first), past_key_values=cache, **WAYS)
    assert torch.equal(got, model.generate(whole, **WAYS))


def test_folders_of_processes_that_were_killed_are_swept_and_those_in_use_stay(tmp_path):
    child = os.fork()
    if not child:
        folder = Folder(tmp_path)
        (folder.path / "layer.0.keys.dat").write_bytes(b"x")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert files(tmp_path) == ["layer.0.keys.dat"]
    one, two = (KVMemory([0], BlendConfig(kv_device_map="disk", offload_folder=tmp_path)) for _ in range(2))
    assert files(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2
    del one, two


REFUSED = {
    "a name": ({"kv_device_map": "disc"}, r"kv_device_map is 'disc'.*\"auto\" or layer → device"),
    "limits alone": ({"max_memory": {"cpu": 1}}, r"max_memory=.* expected \"auto\""),
    "a layer that is not there": ({"kv_device_map": {9: "cpu"}}, r"places layer 9.*\[0, 1, 2, 3\]"),
    "a layer by an odd digit": ({"kv_device_map": {"²": "cpu"}}, r"has .².: .cpu., expected the number of a layer"),
    "a layer by name": ({"kv_device_map": {"model.layers.0": "cpu"}}, r"'model.layers.0'.*number of a layer"),
    "a device": ({"kv_device_map": {0: "dsik"}}, r"device 'dsik'"),
    "a device of a limit": ({"kv_device_map": "auto", "max_memory": {"gpu": 1}}, r"accelerate refuses.*gpu"),
    "a size": ({"kv_device_map": "auto", "max_memory": {"cpu": "much"}}, r"accelerate refuses.*size"),
    "a size below 0": ({"kv_device_map": "auto", "max_memory": {"cpu": -1}}, r"'cpu': -1, expected bytes"),
}


def test_kv_device_map_refuses_at_once_what_cannot_be_placed(model):
    for settings, message in REFUSED.values():
        with pytest.raises(ConfigError, match=message):
            BlendCache(model, memory(), **settings)
    with pytest.raises(ConfigError, match=r"BlendSlidingLayer.*Leave kv_device_map out"):
        BlendCache(zoo_model("mistral"), memory(), kv_device_map="auto")


@pytest.mark.parametrize(
    ("limits", "message"), [({"cpu": 0}, "offload_folder is None"), ({"cpu": 0, "disk": 10}, "10 there")]
)
def test_max_memory_refuses_what_fits_nowhere_before_it_is_written(model, limits, message, untouched):
    with untouched(model), pytest.raises((ConfigError, OffloadError), match=message):
        asked(model, memory(), kv_device_map="auto", max_memory=limits)
