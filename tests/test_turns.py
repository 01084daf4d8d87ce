# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Every turn of a conversation is what the chat template writes of all messages, whatever it did to earlier turns.

The oracle is `apply_chat_template` over the whole list, and stock `generate` on its tokens.
"""

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache, LogitsProcessor

from hf_blend.context.conversation import Conversation
from tests.asking import apart, memory
from tests.chat_templates import DOCUMENTS, TEMPLATES, small_tokenizer

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
    """A random model and a tokenizer with a template."""
    tokenizer = small_tokenizer(kind)
    tokenizer.chat_template = TEMPLATES.get(template, template)
    config = {"num_hidden_layers": 2, "max_position_embeddings": 4096} | config
    return tiny_model(model_type, vocab_size=len(tokenizer), **config), tokenizer


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


@pytest.mark.parametrize("number", range(len(TEMPLATES)))
def test_ask_shows_the_model_the_tokens_of_apply_chat_template(number, tmp_path):
    template, kind = sorted(TEMPLATES)[number], ("bytes", "spaces")[number % 2]
    model, tokenizer = small(kind, template)
    check_last(*talk(model, tokenizer, template, 2 + number % 4, tmp_path if number % 3 else None))
