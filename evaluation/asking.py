# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions over documents, answered by one method or by several side by side; what `hf-blend ask` does."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_blend import ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import PromptError
from hf_blend.prefill.report import BlendReport

from .answering import FULL_PREFILL, FULL_REUSE, Answer, Method, Turn, answer, documents_end, ids_of, request
from .bundled import ModelSource
from .kl import FORCED_TOKENS, Full, Measure, Prompt
from .retrieving import Piece, Retriever

STUB = "x"  # in the place of documents, where the rest of a prompt is measured
SEARCHED_TURNS = 1  # earlier questions that the next one may mean with a pronoun


@dataclass(frozen=True)
class Asked:
    """A question with its documents."""

    pieces: dict[str, Any]
    question: str
    wanted: str | None = None
    sources: tuple[Piece, ...] = ()
    squeezed_out: int = 0

    @property
    def names(self) -> list[str]:
        """The documents that the sources are from, each once, the best first."""
        return list(dict.fromkeys(piece.name for piece in self.sources))


@dataclass(frozen=True)
class Reply:
    """One method's answer to one question, and the prompt's tokens with those marked that were recomputed."""

    row: dict[str, Any]
    tokens: list[tuple[str, bool]]
    answer: Answer


def methods(config: BlendConfig, compare: bool) -> list[Method]:
    """Blending, and beside it the two ends of the scale if they are compared."""
    blend = Method("blend", config)
    return [FULL_PREFILL, FULL_REUSE, blend] if compare else [blend]


@dataclass(frozen=True)
class Asker:
    """Asks a model, whose chunks are in a store."""

    model: nn.Module
    tokenizer: Any
    store: ChunkStore

    def warm(self, asked: Asked, method: Method) -> BlendReport | None:
        """Answer once without looking at the time, so that every chunk is stored and the model is known."""
        return self.answer(asked, method, max_new_tokens=1).report

    def ask(
        self, asked: Asked, method: Method, max_new_tokens: int, tell: Callable[[str], None] | None = None
    ) -> Reply:
        """Answer one question by one method."""
        kept = FORCED_TOKENS if method.config is None else 0
        got = self.answer(asked, method, tell=tell, max_new_tokens=max_new_tokens, first_logits=kept)
        row: dict[str, Any] = {
            "method": method.name,
            "question": asked.question,
            "answer": got.text,
            "is_cut": got.is_cut,
            "ttft_ms": got.ttft_ms,
            "charged_budget": 1.0 if got.report is None else got.report.charged_budget,
            "sources": [{"name": one.name, "start": one.start, "stop": one.stop} for one in asked.sources],
        }
        if self.store.loads_in_part:
            partial = (got.report and got.report.partial) or {}
            row |= {name: partial.get(name, 0) for name in ("loaded_bytes", "all_bytes")}
        if got.report and got.report.advice:
            row["advice"] = got.report.advice
        chosen = set(got.report.chosen_columns[0]) if got.report and got.report.chosen_columns else set()
        ids = got.input_ids.tolist()[: documents_end(self.tokenizer, asked.pieces)]
        return Reply(row, [(self.tokenizer.decode([token]), place in chosen) for place, token in enumerate(ids)], got)

    def time_again(self, asked: Asked, replies: Sequence[tuple[Method, Reply]], rounds: int) -> None:
        """Measure the first token of methods in turns; the median counts, of these and of the time that is there."""
        times = [[reply.row["ttft_ms"]] for _, reply in replies]
        for _ in range(rounds - 1):
            for (method, _), taken in zip(replies, times, strict=True):
                taken.append(self.answer(asked, method, max_new_tokens=1).ttft_ms)
        for (_, reply), taken in zip(replies, times, strict=True):
            reply.row.update(ttft_ms=statistics.median(taken), rounds_ms=taken)

    def diverge(self, asked: Asked, replies: Sequence[tuple[Method, Reply]]) -> None:
        """Measure how far methods are from a full prefill over the first tokens of its answer: `kl` of their rows.

        It is None where nothing of the prompt can be chosen from, as all of it is exact or computed.
        """
        full = next(reply.answer for method, reply in replies if method.config is None)
        logits = torch.empty(0) if full.logits is None else full.logits
        reference = Full(tuple(full.ids[: len(logits)].tolist()), logits.double().log_softmax(-1), full.ttft_ms)
        measure, prompt = Measure(self.model, self.tokenizer, self.store), Prompt(asked.question, asked.pieces)
        for method, reply in replies:
            report, kl = reply.answer.report, None
            if method.config is None:
                kl = 0.0
            elif report is not None and report.reusable_tokens:
                kl = measure.loss(prompt, reference, method.config).kl
            reply.row["kl"] = kl

    def answer(self, asked: Asked, method: Method, **settings: Any) -> Answer:
        """Answer by one method; settings are those of `answering.answer`."""
        return answer(self.model, self.tokenizer, self.store, method, asked.pieces, **settings)


def prepare(
    source: ModelSource,
    retriever: Retriever,
    question: str,
    system: str | None,
    max_new_tokens: int,
    history: Sequence[Turn] = (),
) -> Asked:
    """Retrieve for a question, and put as much into a prompt as the model has room for."""
    searched = " ".join([*(turn.question for turn in history[-SEARCHED_TURNS:]), question])
    ranked = retriever.rank(searched)
    tokenizer = source.tokenizer
    rest = len(ids_of(tokenizer, request(tokenizer, [STUB], question, system, history)))
    room = math.inf if source.positions is None else source.positions - rest - max_new_tokens
    taken: list[Piece] = []
    for piece in ranked:
        if len(piece.ids) <= room:
            taken.append(piece)
            room -= len(piece.ids)
    if not taken:
        raise PromptError(
            f"the question, an answer of {max_new_tokens} tokens and a piece of {len(ranked[0].ids) if ranked else 0} "
            f"tokens do not fit into the model's {source.positions} positions. Take smaller --chunk-tokens or "
            "--max-new-tokens, or a model that reads more."
        )
    made = request(tokenizer, [piece.prompt_text for piece in taken], question, system, history)
    return Asked(made, question, sources=tuple(taken), squeezed_out=len(ranked) - len(taken))


@dataclass
class Chat:
    """A conversation."""

    asker: Asker
    source: ModelSource
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
        got = self.asker.answer(asked, method, tell=tell, max_new_tokens=self.max_new_tokens)
        self.turns.append(Turn(asked.question, got.text))
        return got
