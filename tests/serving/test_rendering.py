# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Chat templates under a clock: what loops ends, whatever it loops with, and what does not is left as it was."""

import copy
import sys

import pytest

from hf_blend.errors import PromptError
from hf_blend.serving.prompts import chat_prompt
from hf_blend.serving.rendering import Renderer
from tests.chat_templates import DOCUMENTS, QWEN3, TOOLS, TURNS, small_tokenizer

MESSAGES = [{"role": "user", "content": "a"}] * 300
ROWS = "{% for a in range(99999) %}"
LONG = {
    "ranges": f"{ROWS}{ROWS}{{% endfor %}}{{% endfor %}}",
    "messages": "".join(f"{{% for {name} in messages %}}" for name in "abc")
    + "{{ a.role + b.role }}"
    + "{% endfor %}" * 3,
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters": f"{ROWS}{{{{ messages | map(attribute='content') | map('length') | sum }}}}{{% endfor %}}",
    "a sort": f"{ROWS}{{{{ messages | sort(attribute='content') | length }}}}{{% endfor %}}",
}


def templated(template):
    tokenizer = copy.deepcopy(small_tokenizer("spaces"))
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("what", LONG)
def test_renderer_ends_a_template_that_takes_long_and_says_so(what):
    with pytest.raises(
        PromptError, match=r"the chat template came to no end within 0\.05 s for 300 messages with n\b"
    ):
        Renderer(0.05)(templated(LONG[what]), MESSAGES, n=1)
    assert sys.gettrace() is None or "look" not in getattr(sys.gettrace(), "__name__", "")


def test_renderer_writes_what_apply_chat_template_does_and_puts_a_tracer_back():
    tokenizer, given = templated(QWEN3), {"tools": TOOLS, "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False, **given)
    before = sys.gettrace()
    seen = lambda *_: None  # noqa: E731
    sys.settrace(seen)
    try:
        found = Renderer(5.0)(tokenizer, TURNS, **given), sys.gettrace()
    finally:
        sys.settrace(before)
    assert found == (expected, seen)


def test_renderer_counts_all_renders_of_a_request_together():
    renderer = Renderer(0.1)
    slow = templated("{% for a in range(3000) %}{% endfor %}done")
    assert renderer(slow, MESSAGES[:1]) == "done"
    with pytest.raises(PromptError, match="came to no end within"):
        all(renderer(slow, MESSAGES[:1]) for _ in range(200))


def test_chat_prompt_refuses_what_a_template_writes_beyond_the_tokens_there_are():
    tokenizer = templated("{% for a in range(3000) %}{{ messages[0].content }} {% endfor %}")
    with pytest.raises(PromptError, match="characters of the prompt have more than 500 tokens"):
        chat_prompt(tokenizer, [{"role": "user", "content": "the office"}], [], tokens=500, render_s=5.0)
    assert chat_prompt(templated(QWEN3), TURNS, DOCUMENTS, tokens=2000, render_s=5.0).spans()
