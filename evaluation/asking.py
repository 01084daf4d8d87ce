# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions over documents, answered by one method or by several side by side; what `hf-blend ask` does.

What blending loses on a prompt is the KL divergence of next-token distributions from full prefill's: full prefill
answers greedily, and its answer is forced on a blended prefill of the same prompt. No right answer is needed.
"""

import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_blend import BlendCache, ChunkStore
from hf_blend.config import BlendConfig
from hf_blend.errors import ConfigError, HfBlendError, PromptError
from hf_blend.model.anatomy import cache_argument, input_device
from hf_blend.prefill.report import BlendReport

from .answering import (
    FULL_PREFILL,
    FULL_REUSE,
    REUSE,
    AnswerStreamer,
    Method,
    Turn,
    begin,
    build_request,
    divergence,
    ends_of,
    ids_of,
    spans_of,
)
from .bundled import ModelSource
from .retrieving import Piece, Retriever

logger = logging.getLogger(__name__)

HEALED_TOKENS = 64  # of a step: a question waits for no more
FORCED_TOKENS = 10  # of full prefill's answer
STUB = "x"  # in place of the documents, where the rest of a prompt is measured


class NoRoomError(PromptError):
    """The model has no room for a question with its documents and earlier turns."""


@dataclass(frozen=True)
class Question:
    """A question, and the prompt in which it is asked over documents."""

    name: str  # that people read: the question's text, or its number
    request: dict[str, Any]  # the prompt as `answering.build_request` makes it
    answers: tuple[str, ...] = ()  # that are known to be right
    sources: tuple[Piece, ...] = ()  # pieces that were retrieved for it and that the model has room for, best first
    squeezed_out: int = 0  # pieces that were retrieved and for which there is no room
    documents: tuple[str, ...] = ()  # texts of the sources that no earlier turn brought

    @property
    def retrieved(self) -> str:
        """The sources in a line for people; whether the answer used them is not known."""
        names = [f"{piece.name}, characters {piece.start} to {piece.stop}" for piece in self.sources]
        return f"Retrieved: {'; '.join(names)}"

    def source_rows(self) -> list[dict[str, Any]]:
        """The sources as rows."""
        return [{"name": piece.name, "start": piece.start, "stop": piece.stop} for piece in self.sources]


@dataclass(frozen=True)
class Answer:
    """What came back."""

    text: str
    ttft_ms: float
    input_ids: Tensor
    ids: Tensor
    is_cut: bool
    cache: BlendCache | None
    logits: Tensor

    @property
    def report(self) -> BlendReport | None:
        """What was reused and recomputed; None of a full prefill."""
        return self.cache.report if self.cache else None

    @property
    def cost(self) -> dict[str, int]:
        """Tokens of the prompt, and of these the ones that were reused as they were and the stored ones recomputed."""
        report = self.report or BlendReport()
        return {
            "prompt_tokens": len(self.input_ids),
            "reused_tokens": report.past_tokens + report.reused_tokens,
            "recomputed_tokens": sum(len(columns) for columns in report.chosen_columns),
        }


@dataclass(frozen=True)
class Loss:
    """What a config loses on one prompt to its full prefill."""

    kl: float
    kl_first: float
    charged: float
    ttft_ratio: float


@dataclass(frozen=True)
class Reply:
    """One method's answer to one question, and the prompt's tokens with those marked that were recomputed."""

    method: Method
    row: dict[str, Any]
    tokens: list[tuple[str, bool]]
    answer: Answer


def methods(config: BlendConfig, compare: bool) -> list[Method]:
    """Blending, and beside it the two ends of the scale if they are compared."""
    blend = Method("blend", config)
    return [FULL_PREFILL, FULL_REUSE, blend] if compare else [blend]


@dataclass(frozen=True)
class Pipeline:
    """Asks a model, whose chunks are in a store."""

    model: nn.Module
    tokenizer: Any
    store: ChunkStore

    def answer(
        self,
        request: dict[str, Any],
        config: BlendConfig | None,
        max_new_tokens: int,
        first_logits: int = 0,
        tell: Callable[[str], None] | None = None,
        cache: BlendCache | None = None,
    ) -> Answer:
        """Answer a request greedily.

        Args:
            request: what `answering.build_request` made.
            config: how the prompt is blended; None computes all of it.
            max_new_tokens: most tokens of the answer.
            first_logits: for so many tokens of the answer its logits are kept, `[first_logits, vocabulary]`.
            tell: is given each piece of text as it comes.
            cache: of the turns before, with whose tokens the prompt begins.
        """
        streamer = AnswerStreamer(self.tokenizer, tell)
        cache, inputs = begin(self.model, self.tokenizer, self.store, request, config, cache)
        prompt = inputs["input_ids"][0]
        output = self.model.generate(
            **inputs,
            **cache_argument(self.model, cache),
            streamer=streamer,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=first_logits > 0,
        )
        ids = output.sequences[0, len(prompt) :].cpu()
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        is_cut = len(ids) == max_new_tokens and int(ids[-1]) not in ends_of(self.model)
        logits = torch.empty(0)
        if first_logits:
            logits = torch.cat(output.logits[:first_logits]).float().cpu()
        return Answer(text, streamer.ttft_ms, prompt.cpu(), ids, is_cut, cache, logits)

    def ask(
        self, question: Question, method: Method, max_new_tokens: int, tell: Callable[[str], None] | None = None
    ) -> Reply:
        """Answer one question by one method."""
        first_logits = FORCED_TOKENS if method.config is None else 0
        answer = self.answer(question.request, method.config, max_new_tokens, first_logits, tell)
        report = answer.report
        row: dict[str, Any] = {
            "method": method.name,
            "question": question.name,
            "answer": answer.text,
            "is_cut": answer.is_cut,
            "ttft_ms": answer.ttft_ms,
            "charged_budget": 1.0 if report is None else report.charged_budget,
            "sources": question.source_rows(),
            **answer.cost,
        }
        chosen: set[int] = set()
        if report is not None:
            if report.partial:
                row |= {name: report.partial[name] for name in ("loaded_bytes", "all_bytes")}
            if report.advice:
                row["advice"] = report.advice
            if report.chosen_columns:
                chosen = set(report.chosen_columns[0])

        # Mark the recomputed tokens, up to the last of the documents
        end = max((span.stop for span in spans_of(self.tokenizer, question.request)), default=0)
        tokens = []
        for column, token in enumerate(answer.input_ids.tolist()[:end]):
            tokens.append((self.tokenizer.decode([token]), column in chosen))
        return Reply(method, row, tokens, answer)

    def reordered(self, question: Question, system: str | None) -> Question:
        """The same question, with documents first that continue the longest chain of the store."""
        texts = self.store.order(self.model, self.tokenizer, question.documents)
        request = build_request(self.tokenizer, texts, question.name, system)
        return replace(question, request=request, documents=tuple(texts))

    def time_again(self, question: Question, replies: Sequence[Reply], rounds: int) -> None:
        """Measure the first token of methods in turns; the median counts, of these and of the time that is there."""
        for reply in replies:
            reply.row["rounds_ms"] = [reply.row["ttft_ms"]]
        for _ in range(rounds - 1):
            for reply in replies:
                reply.row["rounds_ms"].append(self.answer(question.request, reply.method.config, 1).ttft_ms)
        for reply in replies:
            reply.row["ttft_ms"] = statistics.median(reply.row["rounds_ms"])

    def diverge(self, question: Question, replies: Sequence[Reply]) -> None:
        """Measure how far methods are from a full prefill over the first tokens of its answer: `kl` of their rows.

        It is None where nothing of the prompt can be chosen from, as all of it is exact or computed.
        """
        full = next(reply.answer for reply in replies if reply.method.config is None)
        for reply in replies:
            report, config = reply.answer.report, reply.method.config
            if config is None or report is None:
                reply.row["kl"] = 0.0
            elif report.reusable_tokens:
                reply.row["kl"] = self.loss(question, full, config).kl
            else:
                reply.row["kl"] = None

    def full(self, question: Question, max_new_tokens: int = FORCED_TOKENS) -> Answer:
        """Answer by a full prefill, with the logits that `loss` compares."""
        return self.answer(question.request, None, max_new_tokens, FORCED_TOKENS)

    def store_chunks(self, question: Question, config: BlendConfig) -> None:
        """Compute the chunks of a prompt that the store lacks, as a config captures them; not timed."""
        reuse = replace(REUSE, chunk_prefix_ids=config.chunk_prefix_ids, allow_unverified=config.allow_unverified)
        self.answer(question.request, reuse, 1)

    @torch.no_grad()
    def loss(self, question: Question, full: Answer, config: BlendConfig) -> Loss:
        """Blend a prompt and force full prefill's answer on it: the KL divergence of the next tokens, and the time."""
        blended = self.answer(question.request, config, 1, 1)
        report = blended.report
        if report is None or report.fallback_reason or not report.reusable_tokens:
            reason = (report and report.fallback_reason) or "no token of it is reusable. Give two chunks or more"
            raise PromptError(f"{question.name} cannot be blended: {reason.rstrip('.')}. Leave it out.")
        if report.computed_chunks:
            raise ConfigError(
                f"the store dropped {report.computed_chunks} chunks of {question.name} before they were used again, "
                "so times would be wrong. Give a store on disk with --store, or shorter prompts."
            )
        logits = blended.logits
        forced = full.ids[: len(full.logits) - 1]
        if len(forced):
            ids = forced[None].to(input_device(self.model))
            more = self.model(ids, **cache_argument(self.model, blended.cache)).logits[0]
            logits = torch.cat([logits, more.float().cpu()])
        kl = divergence(logits, full.logits)
        return Loss(float(kl.mean()), float(kl[0]), report.charged_budget, blended.ttft_ms / full.ttft_ms)


def prepare(
    source: ModelSource,
    retriever: Retriever,
    question: str,
    system: str | None,
    max_new_tokens: int,
    history: Sequence[Turn] = (),
) -> Question:
    """Retrieve for a question, and put as much into a prompt as the model has room for.

    What came with an earlier turn is not repeated. The question before is searched for, too: a pronoun may mean it.

    Raises:
        NoRoomError: not even one piece fits.
    """
    tokenizer = source.tokenizer
    searched = " ".join([*(turn.question for turn in history[-1:]), question])
    pieces = retriever.rank(searched)
    earlier = {text for turn in history for text in turn.documents}
    room = math.inf
    if source.positions is not None:
        rest = ids_of(tokenizer, build_request(tokenizer, [STUB], question, system, history))
        room = source.positions - len(rest) - max_new_tokens

    sources, texts = list[Piece](), list[str]()
    for piece in pieces:
        if piece.prompt_text in earlier:
            sources.append(piece)
        elif len(piece.ids) <= room:
            sources.append(piece)
            texts.append(piece.prompt_text)
            room -= len(piece.ids)
    if not sources:
        tokens = len(pieces[0].ids) if pieces else 0
        raise NoRoomError(
            f"the question, an answer of {max_new_tokens} tokens and a chunk of {tokens} tokens do not fit into the "
            f"model's {source.positions} positions. Take smaller --chunk-tokens or --max-new-tokens, or a model that "
            "reads more."
        )
    request = build_request(tokenizer, texts, question, system, history)
    return Question(question, request, (), tuple(sources), len(pieces) - len(sources), tuple(texts))


@dataclass
class Chat:
    """A conversation over one cache, which only grows and is healed while nobody asks."""

    pipeline: Pipeline
    source: ModelSource
    retriever: Retriever
    config: BlendConfig
    system: str | None = None
    max_new_tokens: int = 256
    turns: list[Turn] = field(default_factory=list)
    cache: BlendCache | None = None
    question: Question | None = None  # the last question

    def prepare(self, text: str) -> Question:
        """Retrieve for a question, forgetting the oldest turns that leave no room; none if it cannot be asked."""
        for first in range(len(self.turns) + 1):
            turns = self.turns[first:]
            try:
                question = prepare(self.source, self.retriever, text, self.system, self.max_new_tokens, turns)
            except NoRoomError:
                if not turns:
                    raise
                continue
            self.turns = turns
            break
        return question

    def answer(self, question: Question, tell: Callable[[str], None] | None = None) -> Answer:
        """Answer, and remember question and answer."""
        self.question = question
        answer = self.pipeline.answer(question.request, self.config, self.max_new_tokens, tell=tell, cache=self.cache)
        self.turns.append(Turn(question.name, answer.text, question.documents))
        if "messages" in question.request and answer.cache is not None:  # other prompts do not begin as the last did
            self.cache = answer.cache
        return answer

    def heal_while(self, is_idle: Callable[[], bool]) -> None:
        """Heal the conversation step by step until a line is typed; what cannot be healed stays blended."""
        before = None
        while self.cache is not None and is_idle():
            try:
                left = self.cache.heal(HEALED_TOKENS)
            except HfBlendError as error:
                logger.warning("healing ended: %s", error)
                return
            if left in (0, before):
                return
            before = left

    def reset(self) -> None:
        """Forget the conversation."""
        self.turns.clear()
        self.cache = None

    def stats(self) -> str:
        """What the last answer cost, and how much of its prompt is exact by now."""
        if self.cache is None:
            return "Nothing was asked yet."
        report = self.cache.report
        tokens = self.cache.get_seq_length()
        exact = tokens - self.cache.heal(0)
        return f"{report}\n{report.healed_tokens} tokens were healed, {exact} of {tokens} are exact."
