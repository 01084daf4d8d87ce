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
    """A conversation.

    Attributes:
        model: a causal language model.
        source: where it and its tokenizer came from.
        store: where chunks are kept.
        retriever: holds the pieces of the documents.
        config: how to blend.
        system: instruction before the documents, as `prompting.request` takes it.
        max_new_tokens: where an answer is cut.
        is_fixed: the pieces retrieved in the first turn are those of every turn.
        turns: what was said; the oldest turns leave when the model has no room for them.
    """

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
        """Retrieve for a question, forgetting the oldest turns as far as they leave no room.

        Args:
            question: what is asked next.

        Returns:
            The prompt and its sources.

        Raises:
            PromptError: the question alone leaves no room for a piece.
        """
        while True:
            try:
                asked = prepare(
                    self.source, self.retriever, question, self.system, self.max_new_tokens, self.turns
                )
                break
            except PromptError:
                if not self.turns:
                    raise
                del self.turns[0]
        if self.is_fixed and not self.turns:
            self.retriever = Retriever(asked.sources)
        return asked

    def answer(self, asked: Asked, tell: Callable[[str], None] | None = None) -> Answer:
        """Answer, and remember question and answer.

        Args:
            asked: as `prepare` gave it.
            tell: is given the answer piece by piece, while it is written.

        Returns:
            The answer.
        """
        method = Method("blend", self.config)
        got = answer(self.model, self.source.tokenizer, self.store, method, asked.pieces, tell, self.max_new_tokens)
        self.turns.append(Turn(asked.question, got.text))
        return got
