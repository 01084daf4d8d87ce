# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A conversation over documents: what `hf-blend chat` does.

Every turn is a prompt of its own: the documents retrieved for it come first, from the store and at any place, and the
conversation so far comes behind them. So a turn computes the conversation and a share of the documents, and what is
stored grows by pieces of documents only, never by what was said.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from hf_blend import ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import PromptError

from .answering import Answer, Method, answer
from .asking import Asked, prepare
from .bundled import ModelSource
from .prompting import Turn
from .retrieving import Retriever


@dataclass
class Chat:
    """A conversation."""

    model: nn.Module
    source: ModelSource
    store: ChunkStore
    retriever: Retriever
    config: BlendConfig
    system: str | None = None
    max_new_tokens: int = 256
    is_fixed: bool = False
    turns: list[Turn] = field(default_factory=list)

    def prepare(self, question: str) -> Asked:
        """Retrieve for a question, forgetting the oldest turns as far as they leave no room."""
        while True:
            try:
                asked = prepare(self.source, self.retriever, question, self.system, self.max_new_tokens, self.turns)
                break
            except PromptError:
                if not self.turns:
                    raise
                del self.turns[0]
        if self.is_fixed and not self.turns:
            self.retriever = Retriever(asked.sources)
        return asked

    def answer(self, asked: Asked, tell: Callable[[str], None] | None = None) -> Answer:
        """Answer, and remember question and answer."""
        method = Method("blend", self.config)
        got = answer(self.model, self.source.tokenizer, self.store, method, asked.pieces, tell, self.max_new_tokens)
        self.turns.append(Turn(asked.question, got.text))
        return got
