# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every turn of a conversation is what the chat template writes of all messages, whatever it did to earlier turns.

The oracle is `apply_chat_template` over the whole list, and stock `generate` on its tokens.
"""

import copy
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor

from hf_blend import BlendCache, PromptError, observer
from hf_blend.context.conversation import Conversation
from hf_blend.context.session import load_session, save_session
from hf_blend.errors import ConfigError, StoreError
from tests.asking import apart, memory
from tests.chat_templates import DOCUMENTS, TEMPLATES, small_tokenizer
from tests.conftest import shared_zoo_model, slow_but

SYSTEM = "You answer from documents, in a few words."
SCRIPT = (  # what is asked; what is answered, and whether it was cut there
    ("Who is Ines Okafor?", "<think>\nA harbour.\n</think>\n\nA harbour master.", False),
    ("What does she keep?", "She keeps bees, since 2009, in the gar", True),
    (" Where? ", "  In the garden of the house.\n", False),
    ("How slow is the clock?", "<think>\nThe clock of the house is", True),
    ("Why?", "Nobody has repaired it.", False),
)
ENDS = {"llama3": "<|eot_id|>", "date": "<|eot_id|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>"} | {
    **{"phi": "<|end|>", "command_r": "<|END_OF_TURN_TOKEN|>", "bos": "</s>", "granite": "</s>", "deepseek": "</s>"},
    **{"mistral": "</s>", "system_last": "</s>"},
}  # fmt: skip
STARTS = {"no_prompt": "<|im_start|>assistant\n"}  # what the model writes itself
PLAIN = {"max_new_tokens": 4, "do_sample": False}


class Says(LogitsProcessor):
    """Lets a model say some tokens."""

    def __init__(self, ids):
        self.ids = [*ids]

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -1e9).index_fill_(1, torch.tensor([self.ids.pop(0)]), 0.0)


def small(kind="bytes", template="chatml", model_type="llama", **config):
    """A random model, which others share, and a tokenizer with a template."""
    tokenizer = copy.deepcopy(small_tokenizer(kind))  # which other tests share
    tokenizer.chat_template = TEMPLATES.get(template, template)
    config = {"num_hidden_layers": 2, "max_position_embeddings": 4096} | config
    return shared_zoo_model(model_type, vocab_size=len(tokenizer), **config), tokenizer


def said(chat, question, answer, is_cut=False, end="<|im_end|>", **options):
    """Ask, and have the model answer this; gives the answer and its tokens."""
    ids = chat.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ids, stop = (ids, None) if is_cut else ([*ids, (last := chat.tokenizer.convert_tokens_to_ids(end))], last)
    text = chat.ask(question, max_new_tokens=len(ids), logits_processor=[Says(ids)], eos_token_id=stop, **options)
    return text, ids


def written(tokenizer, messages, **template):
    """The tokens of stock transformers."""
    made = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **template)
    return made["input_ids"]


def talk(model, tokenizer, template, turns, tmp_path=None, **settings):
    """Talk, looking at each turn at what the cache holds; with a folder, each turn is of another object."""
    end, start = ENDS.get(template, "<|im_end|>"), STARTS.get(template, "")
    system = [] if template == "gemma" else [{"role": "system", "content": SYSTEM}]
    messages, settings = [*system], {"system": SYSTEM if system else None} | settings
    chat = Conversation(model, tokenizer, **settings)
    for question, answer, is_cut in SCRIPT[:turns]:
        text, ids = said(chat, question, f"{start}{answer}", is_cut, end)
        messages.append({"role": "user", "content": question})
        expected = written(tokenizer, messages)
        assert chat.cache.tokens() == [*expected, *ids[:-1]]
        messages.append({"role": "assistant", "content": text})
        if tmp_path is not None:
            chat.save(tmp_path / "chat")
            chat = Conversation(model, tokenizer, **settings | {"system": None})
            chat.load(tmp_path / "chat")
    return chat, messages


def check_last(chat, messages):
    """A free answer is that of stock `generate`, and the cache holds what stock transformers computes."""
    messages.append({"role": "user", "content": "Is it so?"})
    prompt = torch.tensor([written(chat.tokenizer, messages)])
    whole = chat.model.generate(prompt, attention_mask=torch.ones_like(prompt), **PLAIN)
    answer = chat.ask("Is it so?", **PLAIN)
    assert answer == chat.tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True).strip()
    assert chat.cache.tokens() == whole[0, :-1].tolist()
    if hasattr(chat.cache, "materialize"):
        plain = DynamicCache()
        with torch.no_grad():
            chat.model(whole[:, :-1], past_key_values=plain)
        for one, other in zip(chat.cache.materialize(), plain.layers, strict=True):
            assert max(apart(one.keys, other.keys), apart(one.values, other.values)) <= 1e-4


CASES = [(name, ("bytes", "spaces")[at % 2], 2 + at % 4, at % 3 > 0) for at, name in enumerate(sorted(TEMPLATES))]
EVERY = [
    (name, kind, 5, saves) for name in sorted(TEMPLATES) for kind in ("bytes", "spaces") for saves in (False, True)
]


@pytest.mark.parametrize(("template", "kind", "turns", "saves"), CASES)
def test_ask_shows_the_model_the_tokens_of_apply_chat_template(template, kind, turns, saves, tmp_path):
    check_last(*talk(*small(kind, template), template, turns, tmp_path if saves else None))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next", "jamba"])
@pytest.mark.parametrize(("template", "kind", "turns", "saves"), EVERY)
def test_ask_shows_any_model_the_tokens_of_apply_chat_template(template, kind, turns, saves, model_type, tmp_path):
    model, tokenizer = small(kind, template, model_type, num_hidden_layers=4)
    check_last(*talk(model, tokenizer, template, turns, tmp_path if saves else None))


def test_ask_shows_what_the_template_leaves_of_earlier_thinking():
    chat = Conversation(*small(template="qwen3"))
    _, ids = said(chat, "Who?", "<think>\nHm.\n</think>\n\nMarta.")
    said(chat, "Why?", "So.")
    text = chat.tokenizer.decode(chat.cache.tokens())
    first = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nMarta.<|im_end|>\n"
    assert text == f"{first}<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nSo."
    assert chat.rewritten_tokens == len(ids) - 1


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
@pytest.mark.parametrize("template", ["chatml", "qwen3", None])
def test_load_goes_on_as_if_there_had_been_no_save(template, model_type, tmp_path):
    model, tokenizer = small("spaces", template, model_type, num_hidden_layers=4)
    window = {"window_tokens": 90 if template else 56}
    chat = Conversation(model, tokenizer, system="You answer.", **window)
    chat.save(tmp_path / "empty")
    for question, answer, is_cut in SCRIPT[:3]:
        said(chat, question, answer, is_cut)
    assert chat.cache.shifts
    before = chat.cache.tokens()
    chat.save(tmp_path / "chat")
    assert chat.cache.tokens() == before
    later = Conversation(model, tokenizer, **window)
    later.load(tmp_path / "chat")
    assert (later.turns, later.cache.keep_tokens) == (chat.turns, chat.cache.keep_tokens)
    for one in (chat, later):
        one.ask("Is it so?", **PLAIN)
    assert (later.turns, later.cache.tokens()) == (chat.turns, chat.cache.tokens())
    later.load(tmp_path / "empty")
    assert (later.turns, later.cache.tokens()) == ([], [])
    fresh = Conversation(model, tokenizer, system="You answer.", **window)
    for one in (fresh, later):
        one.ask("Is it so?", **PLAIN)
    assert later.turns == fresh.turns


def test_load_refuses_what_holds_no_messages_and_a_bare_cache_takes_up_what_does(tmp_path):
    chat = Conversation(*small())
    said(chat, "Who?", "Marta.")
    save_session(chat.cache, tmp_path / "bare", chat.tokenizer)
    with pytest.raises(StoreError, match=r"bare holds no messages.*load_session"):
        chat.load(tmp_path / "bare")
    save_session(chat.cache, tmp_path / "odd", chat.tokenizer, conversation=b'{"messages": [{"role": 1}]}')
    with pytest.raises(StoreError, match="odd holds what no session of this model holds"):
        chat.load(tmp_path / "odd")
    chat.save(tmp_path / "chat")
    small_window = Conversation(chat.model, chat.tokenizer, window_tokens=8)
    whole = Conversation(chat.model, chat.tokenizer, system="You answer from documents, in a few words.")
    whole.save(tmp_path / "whole")
    with pytest.raises(ConfigError, match="Give a larger window_tokens"):
        small_window.load(tmp_path / "whole")
    assert (small_window.cache.keep_tokens, small_window._messages) == (1, [])
    cache = type(chat.cache)(chat.model)
    load_session(cache, tmp_path / "chat", chat.tokenizer)
    assert cache.tokens() == chat.cache.tokens()


@pytest.mark.parametrize("template", ["chatml", None])
def test_ask_refuses_half_a_surrogate_pair_by_name(template):
    model, tokenizer = small()
    tokenizer.chat_template = template and TEMPLATES[template]
    chat, half = Conversation(model, tokenizer, archive=memory()), "Who\ud83d?"
    pieces, cache = {"chunks": ["a", "b"], "question": "c"}, BlendCache(model, memory())
    calls = {
        "system": lambda: Conversation(model, tokenizer, system=half),
        "question": lambda: chat.ask(half, max_new_tokens=1),
        "document": lambda: chat.ask("Who?", [half], max_new_tokens=1),
        "add": lambda: memory().add(model, tokenizer, [half]),
        "text": lambda: cache.inputs_from_text(tokenizer, half),
        "chunk of a text": lambda: cache.inputs_from_text(tokenizer, "a", [half]),
        **{
            name: lambda name=name: cache.inputs(tokenizer, **pieces | {name: half}) for name in ("prefix", "question")
        },
        "separator": lambda: cache.inputs(tokenizer, **pieces, separator=half),
        "chunks": lambda: cache.inputs(tokenizer, **pieces | {"chunks": [half]}),
    }
    for name, call in calls.items():
        with pytest.raises(PromptError, match="half of a surrogate pair"):
            raise AssertionError((name, call()))
    said(chat, "Who?", "Marta.")


def test_ask_refuses_what_the_template_refuses_and_forgets_the_question():
    odd = TEMPLATES["chatml"] + "{% if messages[-1].content == 'No' %}{{ raise_exception('No, not so') }}{% endif %}"
    chat = Conversation(*small(template=odd))
    said(chat, "Who?", "Marta.")
    before = chat.cache.tokens(), [*chat._messages]
    for wrong, reason in (("No", "the chat template refused the 3 messages: .*No, not so"), (b"Who?", "expected")):
        with pytest.raises(PromptError, match=reason):
            chat.ask(wrong, max_new_tokens=1)
        assert (chat.cache.tokens(), chat._messages) == before
    said(chat, "Why?", "So.")
    assert len(chat.turns) == 2
    model, tokenizer = small(template="gemma")
    with pytest.raises(PromptError, match="System role not supported"):
        Conversation(model, tokenizer, system="You answer.")
    for name in ("documents", "tokenize", "add_generation_prompt"):
        with pytest.raises(PromptError, match=f"{name} was passed for the chat template"):
            Conversation(model, tokenizer, template={name: 1})


def test_ask_renders_all_messages_once_and_tokenises_them_once(monkeypatch):
    model, tokenizer = small(template="qwen3")
    chat = Conversation(model, tokenizer, system=SYSTEM)
    for question, answer, is_cut in SCRIPT[:3]:
        said(chat, question, answer, is_cut)
    calls = []
    for name in ("apply_chat_template", "__call__", "encode"):
        stock = getattr(type(tokenizer), name)
        monkeypatch.setattr(
            type(tokenizer), name, lambda *args, name=name, stock=stock, **kw: calls.append(name) or stock(*args, **kw)
        )
    chat.ask("Is it so?", **PLAIN)
    assert calls == ["apply_chat_template", "__call__"]


def kept_and_last(chat, expected):
    """What the cache holds are the first tokens that it keeps, and the last ones."""
    held, keep = chat.cache.tokens(), chat.cache.keep_tokens
    behind = len(held) - keep
    assert held == [*expected[:keep], *expected[len(expected) - behind :]]
    return len(expected) - len(held)


WINDOWS = [("chatml", "llama"), ("qwen3", "llama"), ("system_last", "qwen3_next"), ("qwen3", "qwen3_next")]


@pytest.mark.parametrize(
    ("template", "model_type"),
    slow_but(*WINDOWS[:3], among=WINDOWS),
)
def test_ask_behind_a_full_window_shows_what_is_kept_and_the_last_of_what_the_template_writes(template, model_type):
    model, tokenizer = small("bytes", template, model_type, num_hidden_layers=4)
    chat, messages = Conversation(model, tokenizer, system="Be brief.", window_tokens=120), []
    messages.append({"role": "system", "content": "Be brief."})
    gone, end = 0, ENDS.get(template, "<|im_end|>")
    for question, answer, is_cut in (SCRIPT * 2)[:7]:
        with pytest.raises(ZeroDivisionError):
            chat.ask("Whose garden is it?", stopping_criteria=[lambda *_: 1 // 0], **PLAIN)
        text, ids = said(chat, question, answer, is_cut, end)
        messages.append({"role": "user", "content": question})
        gone = max(gone, kept_and_last(chat, [*written(tokenizer, messages), *ids[:-1]]))
        assert len(chat.cache.tokens()) <= 120
        messages.append({"role": "assistant", "content": text})
    assert gone > 60
    with pytest.raises(PromptError, match="do not fit a window of 120"):
        chat.ask("Whose garden is it? " * 30, prefill_chunk_size=200, **PLAIN)
    said(chat, "Why?", "So.", end=end)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_ask_reads_all_again_where_the_template_writes_what_has_left_the_window_otherwise(model_type):
    model, tokenizer = small("bytes", "date", model_type, num_hidden_layers=4)
    chat = Conversation(model, tokenizer, system="Be brief.", window_tokens=150, template={"date_string": "1 May"})
    messages = [{"role": "system", "content": "Be brief."}]
    for number, (question, answer, _) in enumerate((SCRIPT * 2)[:8]):
        chat.template["date_string"] = date = f"{1 + number // 3} May"
        text, ids = said(chat, question, answer, end="<|eot_id|>")
        messages.append({"role": "user", "content": question})
        kept_and_last(chat, [*written(tokenizer, messages, date_string=date), *ids[:-1]])
        messages.append({"role": "assistant", "content": text})
    assert chat.cache.shifts > 1


@contextmanager
def computed(model):
    """Counts the tokens that a model computes."""
    counts = []
    note = observer(lambda module, args, given: counts.append(given["input_ids"].shape[1]))
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield counts
    handle.remove()


def test_ask_of_a_hybrid_computes_two_turns_again_where_the_template_drops_thinking_and_says_so(caplog):
    model, tokenizer = small("bytes", "qwen3", "qwen3_next", num_hidden_layers=4)
    chat, counts = Conversation(model, tokenizer, system=SYSTEM), []
    for number in range(6):
        with computed(model) as one:
            said(chat, f"Who is {number}?", "<think>\nHm.\n</think>\n\nMarta.")
        counts.append(sum(one))
    assert max(counts[3:]) < 2 * counts[0] < len(chat.cache.tokens())
    assert [one for one in caplog.messages if "are computed again" in one] == [caplog.messages[-1]]
    assert "and states cannot be cut" in caplog.text
    caplog.clear()
    plain = Conversation(model, small_with(tokenizer, "chatml"))
    for number in range(3):
        said(plain, f"Who is {number}?", "Marta.")
    assert not caplog.messages
    assert plain.rewritten_tokens == 0


def small_with(tokenizer, template):
    """The same tokenizer with another template."""
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


@pytest.mark.parametrize("template", ["qwen3", "llama3", "system_last"])
def test_ask_blends_documents_in_the_tokens_of_apply_chat_template(template):
    model, tokenizer = small("bytes", template)
    archive, end = memory(), ENDS.get(template, "<|im_end|>")
    archive.add(model, tokenizer, DOCUMENTS)
    chat, messages = Conversation(model, tokenizer, system=SYSTEM, archive=archive), []
    messages.append({"role": "system", "content": SYSTEM})
    for documents in ([], DOCUMENTS[:2], DOCUMENTS[1:]):
        question = "\n\nWho is it?"
        given = {"documents": documents, "blend": {"recompute_ratio": 1.0}} if documents else {}
        text, ids = said(chat, question, "<think>\nHm.\n</think>\n\nMarta.", end=end, **given)
        messages.append({"role": "user", "content": "".join((*documents, question))})
        assert chat.cache.tokens() == [*written(tokenizer, messages), *ids[:-1]]
        messages.append({"role": "assistant", "content": text})
        if documents:
            assert chat.report.loaded_chunks == 2
            assert chat.report.reusable_tokens > 0.8 * sum(len(tokenizer(one)["input_ids"]) for one in documents)
    check_last(chat, messages)
    with pytest.raises(PromptError, match="documents is 'Lund'"):
        chat.ask("Who?", "Lund")


def test_recall_brings_a_turn_back_and_later_turns_are_behind_it():
    model, tokenizer = small()
    chat = Conversation(model, tokenizer, system="Be brief.", window_tokens=120, archive=memory())
    said(chat, "Who keeps bees?", "Ines Okafor.")
    for question, answer, is_cut in SCRIPT:
        said(chat, question, answer, is_cut)
    text = tokenizer.decode(chat.cache.tokens())
    assert "bees" not in text
    assert chat.recall(0, recompute_ratio=0.3).report.loaded_chunks > 0
    kept, last = tokenizer.decode(chat.cache.tokens()[: chat.cache.keep_tokens]), text[-60:]
    said(chat, "Is it so?", "Yes")
    text = tokenizer.decode(chat.cache.tokens())
    back = "Who keeps bees?<|im_end|>\n<|im_start|>assistant\nInes Okafor."
    asked = "<|im_end|>\n<|im_start|>user\nIs it so?<|im_end|>\n<|im_start|>assistant\nYes"
    assert text.startswith(kept + back)
    assert asked in text
    assert last.removesuffix("<|im_end|>") in text


@pytest.mark.parametrize("expected", [True, False])
def test_a_prompt_that_never_came_counts_as_no_part_of_the_cache(expected):
    """The next turn is built but not passed: the first prompt is continued otherwise, from its last token on."""
    model, tokenizer = small()
    cache = BlendCache(model, memory(), allow_unverified=True, recompute_ratio=1.0)
    messages = [{"role": "user", "content": "".join([*DOCUMENTS, "Who?"])}]
    first = cache.inputs_from_messages(tokenizer, messages, DOCUMENTS)["input_ids"]
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(first, past_key_values=cache, max_new_tokens=6, **settings)
    later = [*messages, {"role": "assistant", "content": "It is Mara."}, {"role": "user", "content": "And a goat?"}]
    turn = cache.inputs_from_messages(tokenizer, later)["input_ids"]
    kept = cache.get_seq_length()
    following = turn[:, kept : kept + 1] if expected else torch.tensor([[ord("X")]])
    with torch.no_grad():
        for token in [following, *torch.tensor([[[5]], [[7]], [[9]], [[11]]])]:
            model(token, past_key_values=cache)
    again = cache.inputs_from_messages(tokenizer, later)["input_ids"]
    assert cache.get_seq_length() == kept + expected
    with torch.no_grad():
        logits = model(again[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, model(again).logits[:, -1], rtol=1e-4, atol=1e-4)
