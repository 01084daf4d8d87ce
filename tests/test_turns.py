# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A `BlendCache` is a conversation: each turn is what the chat template writes of all messages.

The oracle is `apply_chat_template` over the whole list, and stock `generate` on its tokens.
"""

import copy
import itertools

import pytest
import torch
from transformers import LogitsProcessor

from hf_blend import BlendCache, PromptError
from tests.asking import as_stock, generated, memory
from tests.chat_templates import DOCUMENTS, SYSTEM, TEMPLATES, assistant, small_tokenizer, user
from tests.conftest import shared_zoo_model, slow_but

SCRIPT = (  # what is asked; what is answered, and whether it was cut there
    ("Who is Ines Okafor?", "<think>\nA harbour.\n</think>\n\nA harbour master.", False),
    ("What does she keep?", "She keeps bees, since 2009, in the gar", True),
    (" Where? ", "  In the garden of the house.\n", False),
    ("How slow is the clock?", "<think>\nThe clock of the house is", True),
    ("Why?", "Nobody has repaired it.", False),
)
ENDS = {
    "llama3": "<|eot_id|>", "date": "<|eot_id|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>",
    "phi": "<|end|>", "command_r": "<|END_OF_TURN_TOKEN|>", "bos": "</s>", "granite": "</s>", "deepseek": "</s>",
    "mistral": "</s>", "system_last": "</s>",
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


class Chat:
    """Messages, and the cache of what was said; the model is made to say an answer, or free."""

    def __init__(self, model, tokenizer, template="chatml", **settings):
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.cache = BlendCache(model, memory(), **{"recompute_ratio": 1.0, "allow_unverified": True} | settings)
        self.messages = [] if template == "gemma" else [SYSTEM]
        self.output = None  # ids of the last prompt and its answer

    def ask(self, question, answer=None, is_cut=False, documents=()):
        """Ask; the prompt is that of stock transformers, and so is a free answer."""
        self.messages.append(user("".join([*documents, question])))
        inputs = self.cache.inputs_from_messages(self.tokenizer, self.messages, documents)
        stock = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=True)
        assert inputs["input_ids"][0].tolist() == stock["input_ids"]
        if answer is None:
            output = as_stock(self.model, inputs, self.cache, **PLAIN)
        else:
            output = generated(self.model, inputs, self.cache, **self._forced(answer, is_cut))
        answer_ids = output[0, inputs["input_ids"].shape[1] :]
        text = self.tokenizer.decode(answer_ids, skip_special_tokens=True)
        self.messages.append(assistant(text.strip()))
        self.output = output

    def _forced(self, answer, is_cut):
        text = STARTS.get(self.template, "") + answer
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        end = None
        if not is_cut:
            end = self.tokenizer.convert_tokens_to_ids(ENDS.get(self.template, "<|im_end|>"))
            ids = [*ids, end]
        return {"max_new_tokens": len(ids), "logits_processor": [Says(ids)], "eos_token_id": end}


CASES = [(name, ("bytes", "spaces")[at % 2], 2 + at % 4) for at, name in enumerate(sorted(TEMPLATES))]
HYBRIDS = [*itertools.product(("gemma3_text", "qwen3_next", "jamba"), ("chatml", "qwen3"))]


@pytest.mark.parametrize(("template", "kind", "turns"), CASES)
def test_turns_are_those_of_stock_for_every_template(template, kind, turns):
    chat = Chat(*small(kind, template), template)
    for turn in SCRIPT[:turns]:
        chat.ask(*turn)
    chat.ask("Is it so?")
    assert chat.cache.report.past_tokens > 0


@pytest.mark.parametrize(("model_type", "template"), slow_but(HYBRIDS[1], *HYBRIDS[2:5], among=HYBRIDS))
def test_turns_are_those_of_stock_for_windows_and_states(model_type, template):
    chat = Chat(*small("bytes", template, model_type, num_hidden_layers=4), template)
    for turn in (SCRIPT[1], SCRIPT[0]):
        chat.ask(*turn)
    chat.ask("Is it so?")
    # Neither window nor state can be cut where a template rewrites an answer; jamba's code cannot continue a state.
    assert bool(chat.cache.report.past_tokens) == (template == "chatml" and model_type != "jamba")


@pytest.mark.parametrize("template", ["qwen3", "llama3", "system_last"])
def test_turn_blends_documents_behind_earlier_turns(template):
    chat = Chat(*small("bytes", template), template)
    chat.cache.store.add(chat.model, chat.tokenizer, DOCUMENTS)
    for documents in ([], DOCUMENTS[:2], DOCUMENTS[1:]):
        chat.ask("\n\nWho is it?", "<think>\nHm.\n</think>\n\nMarta.", documents=documents)
        if documents:
            tokens = sum(len(chat.tokenizer(one)["input_ids"]) for one in documents)
            assert chat.cache.report.reusable_tokens > 0.8 * tokens
            assert chat.cache.report.past_tokens > 0
    chat.ask("Is it so?")


def test_half_of_surrogate_pair_is_refused_by_name():
    model, tokenizer = small()
    half = "Who\ud83d?"
    cache = BlendCache(model, memory())
    pieces = {"prefix": "p", "chunks": ["a", "b"], "question": "c", "separator": " "}
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        cache.inputs_from_messages(tokenizer, [user(half)])
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        cache.store.add(model, tokenizer, [half])
    for wrong in ({"chunks": [half]}, {"prefix": half}, {"question": half}, {"separator": half}):
        with pytest.raises(PromptError, match="half of a surrogate pair"):
            cache.inputs(tokenizer, **pieces | wrong)


@pytest.mark.parametrize("expected", [True, False])
def test_prompt_that_never_came_counts_as_no_part_of_cache(expected):
    """The next turn is built but not passed: the first prompt is continued otherwise, from its last token on."""
    model, tokenizer = small()
    cache = BlendCache(model, memory(), allow_unverified=True, recompute_ratio=1.0)
    text = "".join(DOCUMENTS) + "Who?"
    messages = [user(text)]
    first = cache.inputs_from_messages(tokenizer, messages, DOCUMENTS)["input_ids"]
    generated(model, {"inputs": first}, cache, max_new_tokens=6)
    later = [*messages, assistant("It is Mara."), user("And a goat?")]
    turn = cache.inputs_from_messages(tokenizer, later)["input_ids"]
    kept = cache.get_seq_length()
    following = int(turn[0, kept]) if expected else ord("X")
    with torch.no_grad():
        for token in (following, 5, 7, 9, 11):
            model(torch.tensor([[token]]), past_key_values=cache)
    again = cache.inputs_from_messages(tokenizer, later)["input_ids"]
    assert cache.get_seq_length() == kept + expected
    rest = again[:, cache.get_seq_length() :]
    with torch.no_grad():
        logits = model(rest, past_key_values=cache).logits[:, -1]
        true = model(again).logits[:, -1]
    torch.testing.assert_close(logits, true, rtol=1e-4, atol=1e-4)
