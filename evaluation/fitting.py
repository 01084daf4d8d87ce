# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts that a correction is fitted on and trained with; what `hf-blend fit` does."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_blend.prompt.messages import build_messages
from hf_blend.prompt.pieces import Span
from hf_blend.prompt.text import build_text

from .rows import CHUNKS, QUESTION, read_rows

PROMPTS, QUESTIONS = 48, 3  # and questions of each
DOCUMENTS = 8  # of a prompt that is made
MADE = (
    "What is {} known for?",
    "Where is {} located?",
    "When was {} founded or born?",
    "Who founded, wrote or made {}?",
    "In which country is {}?",
    "Who is {}?",
    "What year did {} begin?",
    "What kind of thing is {}?",
    "What is the name of the person who is mentioned together with {}?",
    "Which came first, {} or {}?",
    "What do {} and {} have in common?",
    "What do these documents say about {}?",
    "Continue: {}",
)
SYSTEMS = ("", "Answer from the documents, in a few words.", "Answer the question. Reply with the answer only.")
NAME = re.compile(r"[A-Z][\w'-]{2,}(?: [A-Z][\w'-]+){0,3}")  # words that begin with a capital
TOPIC_WORDS = 3, 12  # of a document, in the place of what a question is about


@dataclass(frozen=True)
class Documents:
    """What is retrieved together, and what is asked about it."""

    texts: tuple[str, ...]
    questions: tuple[str, ...]


def read_documents(path: Path, count: int = PROMPTS, questions: int = QUESTIONS, seed: int = 0) -> list[Documents]:
    """Read rows of chunks and a question, and ask some of the other rows' questions about each, too."""
    draw, rows = random.Random(seed), read_rows(path, (CHUNKS, QUESTION))[:count]
    return [
        Documents(
            tuple(dict.fromkeys(row[CHUNKS])),
            (row[QUESTION], *(draw.choice(rows)[QUESTION] for _ in range(questions - 1))),
        )
        for row in rows
    ]


def made_documents(
    texts: Sequence[str], count: int = PROMPTS, questions: int = QUESTIONS, seed: int = 0
) -> Iterator[Documents]:
    """Put texts together at random, and ask about words of them.

    No text is in a prompt twice; all are used before one is used again.
    """
    draw, left = random.Random(seed), list[str]()
    unlike = list(dict.fromkeys(texts))
    for _ in range(count):
        own = list[str]()
        while len(own) < min(DOCUMENTS, len(unlike)):
            left = left or draw.sample(unlike, len(unlike))
            text = left.pop()
            if not any(text in other or other in text for other in own):
                own.append(text)
            elif not left and len(own) > 1:
                break
        yield Documents(tuple(own), tuple(_question(draw, own) for _ in range(questions)))


def _question(draw: random.Random, texts: Sequence[str]) -> str:
    """Ask about words of one of some texts, or of two: names, if there are any."""
    question = draw.choice(MADE)
    fewest, most = TOPIC_WORDS
    topics = []
    for _ in range(question.count("{}")):
        text = draw.choice(texts)
        names, words = NAME.findall(text), text.split()
        first = draw.randrange(max(1, len(words) - most))
        count = most if question.startswith("Continue") else draw.randint(fewest, 2 * fewest)
        is_named = bool(names) and count < most and draw.random() < 0.7
        topics.append(draw.choice(names) if is_named else " ".join(words[first : first + count]))
    return question.format(*topics)


def prompts_of(
    tokenizer: Any, listed: Sequence[Documents], seed: int = 0
) -> Iterator[tuple[tuple[int, ...], list[Span]]]:
    """Build a prompt for each question: ids, and where each text is in them; those of the same texts in a row."""
    draw = random.Random(seed)
    for documents in listed:
        text, system = "\n\n".join(documents.texts), draw.choice(SYSTEMS)
        for question in documents.questions:
            message = f"{text}\n\n{draw.choice(('', 'Question: '))}{question}"
            if getattr(tokenizer, "chat_template", None):
                messages = [{"role": "user", "content": message}]
                messages = [{"role": "system", "content": system}, *messages] if system else messages
                prompt = build_messages(tokenizer, messages, documents.texts, {})
            else:
                prompt = build_text(tokenizer, f"{message}\nAnswer:", documents.texts, special=True)
            yield prompt.ids, prompt.spans()
