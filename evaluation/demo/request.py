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
from ..bundled import HANDBOOK, REAL, handbook_pages
from ..documents import Document
from ..meaning import Meaning
from ..model_choice import choose_top_k
from ..retrieving import Retriever, Splitter
from .model_cache import Loaded
from .visitors import Limits

OPENING = "On which channel does the radio reach the rescue station?"
RIGHT = (19, 14, 13)  # of the page's questions: by full prefill, full reuse, blending (benchmarks/page_questions.py)
GAINED, LOST = 1, 1  # questions that full prefill and only blending answers rightly; and only full reuse
RESEARCH = ("explicit",)  # selectors that need what a visitor cannot give


@dataclass(frozen=True)
class DemoRequest:
    """What a visitor asks for."""

    documents: str
    question: str
    recompute_ratio: float = BlendConfig.recompute_ratio
    selector: str = BlendConfig.selector
    files: tuple[Document, ...] = ()
    top_k: int | None = None  # where left out, by the model's size

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
    """The questions over them: question → right answers. They were fixed before any was asked."""
    rows = json.loads((HANDBOOK / "page_questions.json").read_text("utf-8"))
    return {row["question"]: tuple(row["answers"]) for row in rows}


def first_request() -> DemoRequest:
    """The question that the page opens with."""
    return DemoRequest(handbook(), OPENING)


def counts() -> str:
    """How often each method answers the questions of the page rightly, for and against blending."""
    full, reuse, blend = RIGHT
    return (
        f"This question was chosen. Of {len(page_questions())} that were written before any was asked, {REAL} answers "
        f"{full} rightly by full prefill, {reuse} by full reuse, {blend} by blending. On {GAINED} reuse alone fails, "
        f"on {LOST} blending alone. So small a model hardly tells the two apart; <b>Quality</b> shows the error."
    )


def selectors() -> dict[str, str]:
    """The selectors that a visitor may choose: name → what it does."""
    return {name: line for name, line in plugins.describe("selectors").items() if name not in RESEARCH}


def documents_of(text: str) -> list[str]:
    """Take a text apart: at empty lines if there are any, else at every line."""
    lines = text.replace("\r\n", "\n").strip().split("\n")
    if all(line.strip() for line in lines):
        return [f"{line}\n" for line in lines]
    parts = "\n".join(line.rstrip() for line in lines).split("\n\n")
    return [f"{paragraph.strip()}\n" for paragraph in parts if paragraph.strip()]


def prepare(loaded: Loaded, query: DemoRequest, limits: Limits) -> Question:
    """Make a prompt of what was asked for."""
    text = query.documents or "".join(file.text for file in query.files)
    limits.check_letters(text, query.question, bool(query.files))
    boxed = enumerate(documents_of(query.documents), 1)
    documents = query.files or [Document(f"document {number}", text) for number, text in boxed]
    pieces = Splitter(loaded.tokenizer, limits.chunk_tokens).split_all(documents)
    most = limits.most_tokens(loaded.token_bytes)
    room = min(most, loaded.source.positions or most) - limits.new_tokens
    if query.files:
        top_k = choose_top_k(loaded.source, pieces, limits.new_tokens) if query.top_k is None else query.top_k
        meaning = Meaning(loaded.encoder, pieces) if loaded.encoder else None
        pieces = Retriever(pieces, top_k, meaning).rank(query.question)
    while True:
        made = build_request(loaded.tokenizer, [piece.prompt_text for piece in pieces], query.question, None)
        if (tokens := len(ids_of(loaded.tokenizer, made))) <= room:
            return Question(query.question, made, _known_answers(query), tuple(pieces) if query.files else ())
        if not query.files or len(pieces) < 2:
            raise PromptError(
                f"documents and question have {tokens:,} tokens for this model, and {room:,} fit: their KV takes "
                f"{loaded.token_bytes / 1000:,.0f} kB a token. Leave some documents out, or put them into files: of "
                "files the pieces that a question is about are read."
            )
        pieces = pieces[:-1]


def _known_answers(query: DemoRequest) -> tuple[str, ...]:
    is_handbook = query.documents.replace("\r\n", "\n").strip() == handbook()
    return page_questions().get(query.question.strip(), ()) if is_handbook else ()


ANSWER = re.compile(r'data-method="([^"]+)" data-state="done".*?class="hb-answer">(.*?)</p>', re.DOTALL)


def first_answers(url: str, model: str) -> dict[str, str]:
    """Ask the question that the page opened with."""
    client = import_extra("gradio_client", extra="demo", wanted_by="checking the page").Client(url, verbose=False)
    query = first_request()
    how = (query.recompute_ratio, query.selector)
    outputs = client.predict(model, query.documents, query.question, *how, api_name="/ask")
    return {method: unescape(text) for value in outputs for method, text in ANSWER.findall(str(value))}
