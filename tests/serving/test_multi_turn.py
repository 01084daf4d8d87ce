# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Further turns of a served conversation: each is what the chat template writes of all messages that are sent."""

import pytest
import torch
from tiny_models import tiny_model

from hf_blend.serving.prompts import chat_prompt
from tests.chat_templates import TEMPLATES, small_tokenizer
from tests.conftest import slow_but

SCRIPT = ("<think>\nA harbour.\n</think>\n\nA harbour master.", "She keeps bees, since", "  In the garden.\n", "So.")


def written(tokenizer, messages):
    """The tokens of stock transformers."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_chat_prompt_has_the_tokens_of_apply_chat_template_in_each_turn(template):
    tokenizer = small_tokenizer(("bytes", "spaces")[len(template) % 2])
    tokenizer.chat_template = TEMPLATES[template]
    messages = [] if template == "gemma" else [{"role": "system", "content": "Be brief."}]
    for number, answer in enumerate(SCRIPT):
        messages.append({"role": "user", "content": f"Who is {number}? "})
        assert [*chat_prompt(tokenizer, messages, []).ids] == written(tokenizer, messages)
        messages.append({"role": "assistant", "content": answer})


@pytest.mark.parametrize("template", slow_but("qwen3", among=["chatml", "qwen3", "system_last"]))
def test_an_engine_answers_each_turn_as_stock_generate_does(template, bench, store):
    tokenizer = small_tokenizer()
    tokenizer.chat_template = TEMPLATES[template]
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512, num_hidden_layers=2)
    messages, engine = [{"role": "system", "content": "Be brief."}], bench.engine(model, store)
    with engine:
        for number, answer in enumerate(SCRIPT):
            messages.append({"role": "user", "content": f"Who is {number}?"})
            got = bench.answer(engine, chat_prompt(tokenizer, messages, []))[0]
            prompt = torch.tensor([written(tokenizer, messages)])
            expected = model.generate(prompt, generation_config=bench.generation())
            assert got == expected[0, prompt.shape[1] :].tolist()
            messages.append({"role": "assistant", "content": answer})
