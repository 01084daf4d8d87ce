# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every option of `generate` × every cache × the turns of a conversation: each cell is stock's, or refused by name.

The oracle is stock transformers with a `DynamicCache` that holds the same tokens. Compared is all that comes back:
ids, logits, scores, hidden states, attentions. `generate_options.json` says what is refused, by which words; a cell in
no line of it is equal. What stock refuses by a ValueError is refused by a ValueError. Behind the turns a greedy one
shows that nothing is left over.
"""

import copy
import inspect
import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache as remembered
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_iter
from transformers import CompileConfig, DynamicCache, GenerationConfig, GenerationMixin, LogitsProcessor
from transformers.generation import StoppingCriteria

from hf_blend import BlendCache, ChunkStore, SequenceCache, ShiftCache, self_extend, sparse_decoding
from hf_blend.errors import HfBlendError
from tests.asking import apart, batched
from tests.chat_templates import small_tokenizer
from tests.conftest import IS_OLDEST, random_ids, shared_zoo_model

PLAIN = {
    "max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True,
    "output_logits": True,
}  # fmt: skip
TOLERANCE = 2e-5  # of values of size 1, float32
NOISE = 5e-2  # of the first logits over K and V in 8 bits
AWAY = TemporaryDirectory()


# Caches


def extended(model, *_):
    return self_extend(model, trained_tokens=64, max_tokens=512)


def sparse(model, cache):
    return sparse_decoding(model, cache, share=0.999, block_tokens=8, min_tokens=0)


@dataclass(frozen=True)
class Kind:
    """A cache: of which model, with which settings, and what is around its calls (`extended`: around stock's, too)."""

    model_type: str
    settings: dict = field(default_factory=dict)
    layer_types: tuple = ()
    fields: dict = field(default_factory=dict)
    attention: str = "sdpa"
    cache: type = BlendCache
    partial: float | None = None
    around: Any = nullcontext

    @property
    def model(self):
        fields = {**self.fields}
        if self.layer_types:
            fields["layer_types"] = [*self.layer_types]
        return shared_zoo_model(self.model_type, self.attention, num_hidden_layers=2, **fields)

    def make(self):
        if self.cache is not BlendCache:
            return self.cache(self.model)
        return BlendCache(self.model, store_of(self.partial), recompute_ratio=1.0, selector="ramp", **self.settings)

    def entered(self, cache):
        return nullcontext() if self.around is nullcontext else self.around(self.model, cache)


@remembered
def store_of(partial):
    return ChunkStore.open(f"{AWAY.name}/store" if partial else "memory://", partial=partial)


# all tokens: where scores of an indexer tie, sums in another order choose another token, in stock as well
INDEXED = {"first_k_dense_replace": 2, "index_n_heads": 2, "index_topk": 512}
OFFLOADED = {"kv_device_map": {0: "cpu", 1: "disk"}, "offload_folder": AWAY.name}
KINDS = {
    "BlendCache": Kind("llama"),
    "kv_bits": Kind("llama", {"kv_bits": 8}),
    "kv_device_map": Kind("llama", OFFLOADED),
    "partial": Kind("llama", partial=1.0),
    "sparse_decoding": Kind("llama", around=sparse),
    "windows": Kind("gemma3_text", layer_types=("sliding_attention", "full_attention"), attention="eager"),
    "convolution": Kind("lfm2", layer_types=("conv", "full_attention")),
    "linear attention": Kind("qwen3_next", layer_types=("linear_attention", "full_attention")),
    "indexer": Kind("deepseek_v32", attention="eager", fields=INDEXED),
    "SequenceCache": Kind("llama", attention="eager", cache=SequenceCache),
    "ShiftCache": Kind("llama", cache=ShiftCache),
    "SequenceCache in self_extend": Kind("llama", cache=SequenceCache, around=extended),
    "BlendCache in self_extend": Kind("llama", around=extended),
}
SINGLE = ("SequenceCache", "ShiftCache", "SequenceCache in self_extend")


# Options


class Louder(LogitsProcessor):
    """Changes the scores."""

    def __call__(self, input_ids, scores):
        return scores * torch.linspace(0.5, 1, scores.shape[1])


class Every(StoppingCriteria):
    """Stops at every seventh token."""

    def __call__(self, input_ids, scores, **_):
        return torch.full((len(input_ids),), input_ids.shape[1] % 7 == 0)


class Streamer(list):
    """Notes what it is given."""

    def put(self, value):
        self.append(value)

    def end(self):
        pass


def without_cache(model, given):
    config = copy.deepcopy(model.generation_config)
    config.use_cache = False
    return {"generation_config": config}


def assistant(**more):
    return lambda model, given: {"assistant_model": shared_zoo_model("llama", seed=3, num_hidden_layers=1), **more}


def embeddings(model, given):
    return {"inputs_embeds": model.get_input_embeddings()(given["input_ids"]).detach()}


def negative(model, given):
    rows = len(given["input_ids"])
    ids = torch.tensor([[0, 5, 6, 7]] * rows)
    return {"guidance_scale": 1.5, "negative_prompt_ids": ids, "negative_prompt_attention_mask": ids.clamp_max(1)}


def masked(columns):
    def change(model, given):
        mask = given["attention_mask"]
        changed = mask[:, :columns]
        if columns > 0:
            more = mask.new_ones(len(mask), columns)
            changed = torch.cat([mask, more], 1)
        return {"attention_mask": changed}

    return change


def positioned(by):
    return lambda model, given: {"position_ids": positions_of(given["attention_mask"]) + by}


def positions_of(mask):
    before = mask.cumsum(-1) - 1
    return before.clamp_min(0)


def allowed(batch, ids):
    return [*range(3, 90)]


SAMPLED = {"do_sample": True, "temperature": 1.3}
TABLE = json.loads(Path(__file__).with_name("generate_options.json").read_text("utf-8"))
OF_STOCK = TABLE["refused by stock"]  # with any cache
ELSEWHERE = TABLE["elsewhere"]  # what is in no line, and why
OPTIONS = TABLE["equal"] | {
    "use_cache of a config": without_cache,
    "assistant": assistant(num_assistant_tokens=2, num_assistant_tokens_schedule="constant"),
    "assistant that samples": assistant(assistant_confidence_threshold=0.1, assistant_ensemble_weight=0.5, **SAMPLED),
    "longest": {"max_new_tokens": None, "max_length": 300, "stopping_criteria": [Every()]},
    "ends": {"eos_token_id": [*range(3, 60)], "bos_token_id": 1},
    "stop_strings": lambda *_: {"stop_strings": ["a", "b"], "tokenizer": small_tokenizer("bytes")},
    "streamer": lambda *_: {"streamer": Streamer()},
    "processors": {"logits_processor": [Louder()], "prefix_allowed_tokens_fn": allowed},
    "compiled": {"disable_compile": True, "compile_config": CompileConfig()},
    "guidance against": negative,
    "custom_generate": lambda model, given: {"custom_generate": type(model)._sample},
    "inputs_embeds": lambda model, given: {**embeddings(model, given), "input_ids": None},
    "ids beside inputs_embeds": embeddings,
    "longer mask": masked(4),
    "shorter mask": masked(-3),
    "position_ids": positioned(0),
    "other position_ids": positioned(3),
    "packed": {"cu_seq_lens_q": torch.tensor([0, 5])},
}
ALL = OPTIONS | OF_STOCK
REFUSED = TABLE["refused: caches, options, turns, and the words of the refusal; the first line counts"]
SKIPPED = {("convolution", "early exit"): "stock fails, and leaves the model's config with a layer less"}
if IS_OLDEST:
    del KINDS["indexer"]  # its keys are turned in a way that is refused
    unlike = {
        ("windows", "early exit"),
        ("linear attention", "packed"),
        *product(KINDS, ("prefill_chunk_size", "longer mask")),
    }
    SKIPPED |= dict.fromkeys(unlike, "transformers 5.17 does this otherwise: parts, masks, packing, early exits")
ENDED = {"inputs_embeds", "ids beside inputs_embeds"}  # nobody knows the ids that a sequence holds: no oracle


# Turns


def cut(cache, ids):
    cache.crop(-6)
    return ids[:, : cache.get_seq_length()]


def edited(cache, ids):
    ids = ids.clone()
    ids[:, -3] = (ids[:, -3] + 7) % 90 + 3
    return ids


TURNS = {
    "first": None,
    "continued": lambda cache, ids: ids,
    "cut": cut,
    "edited": edited,
    "three rows": lambda cache, ids: ids[:1].repeat(3, 1),
    "other order": lambda cache, ids: ids.flip(0),
    "one row": lambda cache, ids: ids[:1],
}


def prompted(cache, ids, number):
    """The inputs of a turn, by the cache itself."""
    question = random_ids(9, number)
    document = random_ids(70, 1)
    if isinstance(cache, SequenceCache):
        if cache:
            return dict(cache.inputs(question))
        first = torch.tensor([[1, 4, 5, *document, *question]])
        return {"input_ids": first, "attention_mask": torch.ones_like(first)}
    if ids is None:
        return dict(cache.inputs(None, prefix=[1, 4, 5], chunks=[document], question=question))
    chunks = [random_ids(12, 50 + number)]
    requests = []
    for row, prefix in enumerate(ids.tolist()):
        requests.append({"prefix": prefix, "chunks": chunks, "question": question[: 9 - row % 3]})
    return dict(cache.inputs(None, **batched(*requests)))


def asked(model, given, option, cache):
    """What `generate` gives, as tensors by name."""
    more = option(model, given) if callable(option) else option
    ways = {}
    for name, value in {**PLAIN, **given, **more}.items():
        if value is not None or name == "eos_token_id":
            ways[name] = value
    torch.manual_seed(5)
    output = model.generate(**ways, past_key_values=cache)
    if isinstance(output, torch.Tensor):
        output = {"sequences": output}
    found = {}
    for name, value in output.items():
        if name != "past_key_values":
            found[name] = tensors_of(value)
    found["stream"] = ways.get("streamer", [])
    return found


def tensors_of(value):
    return [one for one in tree_iter(value) if isinstance(one, torch.Tensor)]


@torch.no_grad()
def stock(kind, given, held, option):
    """What stock gives behind the first `held` columns, or the ValueError or NotImplementedError that it raises."""
    model = kind.model
    with kind.entered(None) if kind.around is extended else nullcontext():
        cache = DynamicCache(config=model.config)
        if held:
            mask = given["attention_mask"][:, :held]
            beginning = {"input_ids": given["input_ids"][:, :held], "attention_mask": mask}
            model(**beginning, position_ids=positions_of(mask), past_key_values=cache)
        try:
            return asked(model, given, option, cache)
        except (ValueError, NotImplementedError) as error:
            return error


ANSWERS = {}


def expected(name, kind, given, held, option):
    """`stock`, once for all caches over one model."""
    ids = given["input_ids"].tolist()
    mask = given["attention_mask"].tolist()
    key = repr((kind.model_type, kind.attention, kind.around is extended, name, held, ids, mask))
    if key not in ANSWERS:
        ANSWERS[key] = stock(kind, given, held, option)
    return ANSWERS[key]


def check_equal(got, expected, is_noisy):
    """All is the same; over K and V in few bits the first logits are near."""
    if is_noisy:
        if "logits" in expected:
            first = expected["logits"][0]
            assert apart(got["logits"][0], first) <= NOISE * first.abs().max()
        return
    assert got.keys() == expected.keys()
    for name, tensors in expected.items():
        for one, other in zip(got[name], tensors, strict=True):
            allowed = 0.0
            if other.is_floating_point():
                finite = other[other.isfinite()]
                allowed = TOLERANCE * max(1.0, float(finite.abs().max()))
            torch.testing.assert_close(one, other, rtol=0, atol=allowed)


def refusal(name, option, turn, refused=REFUSED):
    """By which words a cell is refused; None: it is not."""
    cell = name, option, turn
    for *patterns, words in refused:
        if all(map(re.fullmatch, patterns, cell)):
            return words
    return None


class Conversation:
    """The turns of one cache."""

    def __init__(self, name):
        self.name = name
        self.kind = KINDS[name]
        self.cache = self.kind.make()
        self.ids = None  # of the last prompt and its answer
        self.count = 0

    def ask(self, turn, option):
        """Take a turn, which is as stock's; or give the words by which it is refused."""
        values = ALL[option]
        self.count += 1
        try:
            if self.ids is not None:
                self.ids = TURNS[turn](self.cache, self.ids)
            given = prompted(self.cache, self.ids, self.count)
            held = self.cache.get_seq_length()
            got = asked(self.kind.model, given, values, self.cache)
        except HfBlendError as error:
            return str(error)
        except (ValueError, NotImplementedError) as error:
            got = error
        answer = expected(option, self.kind, given, held, values)
        if isinstance(got, Exception) or isinstance(answer, Exception):
            assert type(got) is type(answer), (got, answer)
            return ""
        check_equal(got, answer, self.name == "kv_bits")
        self.ids = got["sequences"][0]
        return ""


def turns_of(name):
    """A sequence shows its own tokens, so that none is edited, and is alone, so that there are no rows."""
    return ["first", "continued", "cut"] if name in SINGLE else [*TURNS][:-1]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_each_turn_is_that_of_stock_or_refused_by_name(name, option):
    if why := SKIPPED.get((name, option)):
        pytest.skip(why)
    talk = Conversation(name)
    with talk.kind.entered(talk.cache):
        for turn in turns_of(name):
            words = refusal(name, option, turn)
            said = talk.ask(turn, option)
            assert bool(said) == (words is not None), (turn, said)
            assert words is None or re.search(words, said), turn
        last = "continued" if name in SINGLE else "one row"
        if refusal(name, "greedy", last) is None and not (name in SINGLE and option in ENDED):
            assert talk.ask(last, "greedy") == ""


@pytest.mark.parametrize("name", KINDS)
def test_what_stock_refuses_is_refused_and_leaves_nothing(name):
    talk = Conversation(name)
    with talk.kind.entered(talk.cache):
        for turn in ("first", "continued"):
            for option in OF_STOCK:
                words = refusal(name, "greedy", turn)  # some are refused in the first forward
                said = talk.ask(turn, option)
                assert said == "" or (words and re.search(words, said)), option
            if refusal(name, "greedy", turn) is None:
                assert talk.ask(turn, "greedy") == ""


def test_each_option_of_generate_is_in_table():
    known = {*GenerationConfig().to_dict(), *inspect.signature(GenerationMixin.generate).parameters}
    model = KINDS["BlendCache"].model
    given = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "attention_mask": torch.ones(1, 1)}
    named = {*ELSEWHERE, *PLAIN}
    for option in ALL.values():
        named.update(option(model, given) if callable(option) else option)
    assert not known - named, "write a line for it"
    assert not {*ELSEWHERE} - known, "it is gone"


# A loop of one's own


class Call:
    """What a call may bring depends on: the model, the ids, how many tokens are before them."""

    def __init__(self, model, ids, past):
        self.model = model
        self.ids = ids
        self.past = past
        self.width = past + ids.shape[1]
        self.positions = torch.arange(past, self.width)[None]

    def mask(self, rows=None, more=0):
        """Nothing is padding."""
        return {"attention_mask": torch.ones(rows or len(self.ids), self.width + more, dtype=torch.int64)}

    def mask_by_rows(self, keys=0):
        """A mask of one's own, `[1, 1, tokens, keys]`."""
        columns = torch.arange(self.width + keys)
        hidden = columns > self.positions[0, :, None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        return {"attention_mask": mask[None, None]}

    def rows(self, count):
        """Another number of rows than the cache holds."""
        if not self.past:
            return {}
        return {"input_ids": self.ids.repeat(2, 1)[:count]}

    def embeddings(self):
        return {"input_ids": None, "inputs_embeds": self.model.get_input_embeddings()(self.ids)}


CALLS = (
    TABLE["calls"]
    | {  # what a call brings beside input_ids, or in their place
        "logits by number": {"logits_to_keep": torch.tensor([0, 2])},
        "labels": lambda call: {"labels": call.ids},
        "position_ids": lambda call: {"position_ids": call.positions},
        "shifted positions": lambda call: {"position_ids": call.positions + 5},
        "short positions": {"position_ids": torch.arange(2)[None]},
        "mask": Call.mask,
        "long mask": lambda call: call.mask(more=3),
        "short mask": lambda call: call.mask(more=-1 - call.past),
        "mask of four rows": lambda call: call.mask(rows=4),
        "mask of three dimensions": lambda call: {"attention_mask": call.mask()["attention_mask"][:, None]},
        "mask by rows": Call.mask_by_rows,
        "wide mask by rows": lambda call: call.mask_by_rows(4),
        "inputs_embeds": Call.embeddings,
        "cache_position": lambda call: {"cache_position": call.positions[0]},
        "fewer rows": lambda call: call.rows(len(call.ids) - 1),
        "more rows": lambda call: call.rows(2 * len(call.ids)),
        "nothing new": lambda call: {"input_ids": call.ids[:, call.past :]} if call.past else {},
    }
)
CHANGES = {  # of a cache between two calls
    "first": lambda cache: None,
    "behind": lambda cache: None,
    "cut": lambda cache: cache.crop(-2),
    "other order": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "one of them": lambda cache: cache.batch_select_indices(torch.tensor([2])),
}
UNCHANGED = ["cut", "repeated", "one of them"]  # of states
CALLS_REFUSED = TABLE["refused calls: caches, calls, turns, and the words of the refusal; the first line counts"]


@torch.no_grad()
def called(model, cache, ids, option):
    """What a call gives, as tensors."""
    past = cache.get_seq_length()
    brought = CALLS[option]
    if callable(brought):
        brought = brought(Call(model, ids, past))
    arguments = {"input_ids": ids, **brought}
    if arguments["input_ids"] is None:
        del arguments["input_ids"]
    output = model(**arguments, past_key_values=cache)
    return {"all": tensors_of(output if isinstance(output, tuple) else output.to_tuple())}


class Loop:
    """The calls of a cache, and those of stock's beside it."""

    def __init__(self, name):
        self.name = name
        self.kind = KINDS[name]
        self.cache = self.kind.make()
        self.stock = DynamicCache(config=self.kind.model.config)
        self.rows = 1 if name in SINGLE else 2

    def call(self, option, tokens):
        """Make a call, which is as stock's; or give the words by which it is refused."""
        model = self.kind.model
        ids = torch.tensor([random_ids(tokens, 7 * tokens + row) for row in range(self.rows)])
        before = copy.deepcopy(self.stock)
        try:
            got = called(model, self.cache, ids, option)
        except HfBlendError as error:
            return str(error)
        except (ValueError, NotImplementedError) as error:
            with pytest.raises(type(error)):
                called(model, self.stock, ids, option)
            self.stock = before
            return ""
        check_equal(got, called(model, self.stock, ids, option), self.name == "kv_bits")
        return ""

    def change(self, turn):
        """Change both caches, and count the rows."""
        for cache in (self.stock, self.cache):
            CHANGES[turn](cache)
        self.rows = {"repeated": 4, "one of them": 1}.get(turn, self.rows)


def changes_of(name):
    """A sequence has no rows; windows and states cannot be cut, and states not be repeated, neither can stock's."""
    if name in SINGLE:
        return ["first", "behind", "cut"]
    left_out = {"windows": ["cut"], "convolution": UNCHANGED, "linear attention": UNCHANGED}.get(name, [])
    return [turn for turn in CHANGES if turn not in left_out]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("option", CALLS)
def test_each_call_is_that_of_stock_or_refused_by_name(name, option):
    loop = Loop(name)
    with loop.kind.entered(loop.cache):
        for turn in changes_of(name):
            loop.change(turn)
            words = refusal(name, option, turn, CALLS_REFUSED)
            said = loop.call(option, 24 if turn == "first" else 7)
            assert bool(said) == (words is not None), (turn, said)
            assert words is None or re.search(words, said), turn
            assert loop.call("nothing", 1) == ""


@pytest.mark.parametrize("name", KINDS)
def test_checkpointed_gradients_are_refused_by_every_cache(name):
    kind = KINDS[name]
    cache = kind.make()
    kind.model.gradient_checkpointing_enable()
    kind.model.train()
    try:
        with kind.entered(cache), pytest.raises(HfBlendError, match="checkpoint their gradients"):
            kind.model(torch.tensor([[1, 5, 6, 7]]), past_key_values=cache)
    finally:
        kind.model.eval()
        kind.model.gradient_checkpointing_disable()
    assert cache.get_seq_length() == 0
