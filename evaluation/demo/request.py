# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a visitor asks for, and the prompt that is made of it."""

import json
import re
from dataclasses import dataclass
from functools import cache
from html import unescape

from hf_blend import BlendConfig, plugins
from hf_blend.errors import PluginNotFoundError, PromptError, import_extra, suggest

from ..answering import blend_config, build_request, ids_of
from ..asking import Question
from ..bundled import HANDBOOK, handbook_pages
from ..retrieving import closed
from .loaded import Loaded
from .visitors import Limits

OPENING = "On which channel does the radio reach the rescue station?"


@dataclass(frozen=True)
class DemoRequest:
    """What a visitor asks for."""

    documents: str
    question: str
    recompute_ratio: float = BlendConfig.recompute_ratio
    selector: str = BlendConfig.selector

    def config(self) -> BlendConfig:
        """How to blend."""
        name = self.selector.partition(":")[0]
        if name not in selectors():
            raise PluginNotFoundError(f"there is no selector {name!r}. {suggest(name, selectors())}")
        return blend_config(self.selector, recompute_ratio=self.recompute_ratio)


@cache
def handbook() -> str:
    """The bundled documents as one text, an empty line between them."""
    return "\n\n".join(page.strip().replace("\n\n", "\n") for page in handbook_pages().values())


@cache
def page_questions() -> dict[str, tuple[str, ...]]:
    """The questions over them: question → right answers."""
    rows = json.loads((HANDBOOK / "page_questions.json").read_text("utf-8"))
    return {row["question"]: tuple(row["answers"]) for row in rows}


def first_request() -> DemoRequest:
    """The question that the page opens with."""
    return DemoRequest(handbook(), OPENING)


def selectors() -> dict[str, str]:
    """The selectors that a visitor may choose: name → what it does."""
    return plugins.describe("selectors")


def documents_of(text: str) -> list[str]:
    """Split a text at empty lines if there are any, else at every line."""
    lines = text.replace("\r\n", "\n").strip().split("\n")
    if all(line.strip() for line in lines):
        return [f"{line}\n" for line in lines]
    paragraphs = "\n".join(line.rstrip() for line in lines).split("\n\n")
    return [f"{paragraph.strip()}\n" for paragraph in paragraphs if paragraph.strip()]


def prepare(loaded: Loaded, query: DemoRequest, limits: Limits) -> Question:
    """Make a prompt of what was asked for."""
    limits.check_letters(query.documents, query.question)
    documents = [closed(text) for text in documents_of(query.documents)]
    request = build_request(loaded.tokenizer, documents, query.question, None)
    most = limits.most_tokens(loaded.token_bytes)
    room = min(most, loaded.source.positions or most) - limits.new_tokens
    tokens = len(ids_of(loaded.tokenizer, request))
    if tokens > room:
        raise PromptError(
            f"documents and question have {tokens:,} tokens for this model, and {room:,} fit: their KV takes "
            f"{loaded.token_bytes / 1000:,.0f} kB a token. Leave some documents out; hf-blend ask chooses among many."
        )
    return Question(query.question, request, _known_answers(query))


def _known_answers(query: DemoRequest) -> tuple[str, ...]:
    """The right answers to a question over the handbook."""
    if query.documents.replace("\r\n", "\n").strip() != handbook():
        return ()
    return page_questions().get(query.question.strip(), ())


ANSWER = re.compile(r'data-method="([^"]+)" data-state="done".*?class="hb-answer">(.*?)</p>', re.DOTALL)


def first_answers(url: str) -> dict[str, str]:
    """Ask the question that the page opened with through the page's own interface: method → answer."""
    client = import_extra("gradio_client", extra="demo", needed_by="checking the page").Client(url, verbose=False)
    query = first_request()
    outputs = client.predict(query.documents, query.question, query.recompute_ratio, query.selector, api_name="/ask")
    answers = {}
    for output in outputs:
        for method, text in ANSWER.findall(str(output)):
            answers[method] = unescape(text)
    return answers
