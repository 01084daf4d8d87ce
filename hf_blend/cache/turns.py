# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a blend cache keeps when another turn begins: the tokens that both prompts begin with.

K and V belong to their author, the model as it was when it computed them. If the model has changed since, they are
dropped and the whole prompt is computed.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import ConfigError, PromptError
from ..model.author import Author, author_of, refuse_other_author
from ..model.hooks import GenerateCall
from ..prefill.notices import other_author
from ..prefill.request import PendingPrompt, Request
from ..prompt.history import History, refuse_other_prompt, shared_tokens
from ..prompt.pieces import TextPrompt, check_lengths
from .cache_layers import KVLayers
from .layers import as_indices

ASK_AGAIN = (
    "Pass the whole conversation by inputs(history=…), inputs_from_messages or inputs_from_text: what the cache "
    "cannot keep of it is computed again. Or reset() the cache."
)
Rows = tuple[tuple[int, ...], ...]


@dataclass
class KnownPrompts:
    """The prompts that a cache expects in the next forwards, and what is known of the tokens that it holds."""

    pending: PendingPrompt = field(default_factory=PendingPrompt)
    history: History = field(default_factory=History)  # to which `generate` adds an answer
    beginnings: Rows = ()  # of each row the ids of its first tokens, cached or expected, as far as they are known
    tokenizer: str = ""  # digest of the one that made the prompts
    notice: str = ""  # for the report of the prompts that are expected

    def note_unexpected(self, request: Request) -> None:
        """Update `beginnings` for a forward that brought other tokens than the expected prompts.

        They end before the first token that is not at the position of its number: 0, 1, 2 …
        """
        most, beginnings = request.in_order(), self.beginnings
        if not request.past:
            self.beginnings = tuple(tuple(row[:most]) for row in request.rows)
        elif len(request.rows) == len(beginnings):
            rows = zip(beginnings, request.rows, request.before, strict=True)
            self.beginnings = tuple(
                (*ids[:before], *(row if len(ids) >= before else ()))[:most] for ids, row, before in rows
            )
        elif len(beginnings) == 1:
            self.beginnings = (beginnings[0][: min(request.past, most)],)
        else:
            self.beginnings = ()

    def note_step(self, request: Request) -> None:
        """Update `beginnings` for one token that came while prompts were expected: what has not come is not known."""
        batch, columns = self.pending.batch, request.past
        if batch is None:
            return
        if self.pending.cached or len(self.beginnings) != len(batch.input_ids):
            self.beginnings = ()
            return
        if request.ids is not None and torch.equal(request.ids.cpu(), batch.input_ids[:, columns : columns + 1]):
            columns += 1
        tokens = batch.attention_mask[:, :columns].sum(dim=1).tolist()
        self.beginnings = tuple(row[:count] for row, count in zip(self.beginnings, tokens, strict=True))

    def select_rows(self, indices: Any, batch_size: int) -> None:
        """Note that of the rows of a cache these are kept, in this order; see `batch_select_indices`."""
        if len(self.beginnings) < 2:  # all rows begin so
            return
        repeats, odd = divmod(batch_size, len(self.beginnings))
        rows = as_indices(indices).tolist()
        self.beginnings = () if odd else tuple(self.beginnings[row // repeats] for row in rows)

    def crop(self, before: int, tokens: int, is_padded: bool) -> None:
        """Note that of `before` columns the first `tokens` stay; with padding a row may have fewer tokens there."""
        removed = before - tokens
        self.beginnings = tuple(row[: max(0, len(row) - removed) if is_padded else tokens] for row in self.beginnings)

    def ids_to_heal(self, history: Any, tokens: int, placeholders: Container[int]) -> Tensor:
        """The ids of a cache's first columns, `[batch, columns]`, up to the first that is unknown or a placeholder.

        `history` has the ids of all `tokens` columns; None: those of the prompt are taken. Raises PromptError if it is
        not what the cache holds, or has a placeholder.
        """
        rows = self.beginnings
        if history is None:
            known = [takewhile(lambda token: token not in placeholders, row[:tokens]) for row in rows]
            texts = [tuple(row) for row in known]
            columns = min(map(len, texts), default=0)
            return torch.tensor([row[:columns] for row in texts], dtype=torch.long)
        ids = torch.as_tensor(history).cpu()
        ids = (ids[None] if ids.dim() == 1 else ids)[:, :tokens]
        given = ids.tolist()
        pairs = [*zip(given, rows, strict=True)] if len(given) == len(rows) else []
        if (rows and not pairs) or any(shared_tokens(*pair) < min(map(len, pair)) for pair in pairs):
            raise PromptError(
                f"a history of {tuple(ids.shape)} tokens came to heal a cache that holds {tokens}, but it does not "
                "begin as the cache does. Pass what generate returned with this cache."
            )
        if any(token in placeholders for row in given for token in row):
            raise PromptError(
                f"a history of {tuple(ids.shape)} tokens, some of which stand for images, came to heal a cache, but "
                "features do not come with it. Only prompts of text can be healed."
            )
        return ids

    def set_known_ids(self, history: Any, tokens: int, placeholders: Container[int]) -> None:
        """Note the ids of all `tokens` that the cache holds; see `ids_to_heal`."""
        rows = self.ids_to_heal(history, tokens, placeholders).tolist()
        self.beginnings = tuple(map(tuple, rows))

    def extend(self, ids: Tensor, compared: int) -> None:
        """Note that the cache holds these tokens, `[batch, columns]`: from column `compared` on it was compared."""
        if len(ids) == len(self.beginnings):
            pairs = zip(self.beginnings, ids.tolist(), strict=True)
            self.beginnings = tuple(
                tuple(healed) if compared <= len(row) < len(healed) else row for row, healed in pairs
            )


@dataclass
class Turns:
    """Who computed the K and V of a cache, and which of them stay when a turn begins."""

    author: Author | None = None  # of the cached tokens; None while unknown
    is_new: bool = False  # `generate` has begun, and its first forward has not come

    def begin(self, call: GenerateCall, cached: int, prompts: KnownPrompts) -> None:
        """Note that a further `generate` begins; refuse a prompt that does not begin with the cached tokens."""
        self.is_new = True
        if call.ids is None:
            return
        if prompts.pending.cached and prompts.pending.is_of(call.ids):
            raise PromptError(
                f"a prompt that inputs() built to come behind the {cached} tokens of this cache was passed to "
                "generate, but the whole conversation is expected there: generate would leave out its beginning. "
                f"{ASK_AGAIN}"
            )
        refuse_other_prompt(call.ids, call.mask, cached, prompts.beginnings, ASK_AGAIN)

    def claim(self, model: nn.Module, past: int) -> Author:
        """Make the model as it is now the author of new K and V; ConfigError if another computed the `past` tokens."""
        author, self.is_new = author_of(model), False
        if past:
            refuse_other_author(self.author, author, past, ASK_AGAIN)
        self.author = author
        return author

    def keep_beginning(
        self, cache: Any, prompts: Sequence[TextPrompt], history: Any = None
    ) -> tuple[Sequence[TextPrompt], History, str]:
        """Crop a cache to the tokens that it and some prompts begin with; `history` has the ids of all that it holds.

        Returns the prompts without these tokens, these tokens as a history, and a notice of another author.
        """
        check_lengths(prompts, 0, cache.traits.config)
        cache.watch.take_back()
        cached = Cache.get_seq_length(cache)
        if not cached:
            return prompts, History(), ""
        if history is not None:
            cache.prompts.set_known_ids(history, cached, cache.traits.placeholders)
        is_other, ids, common = self._forget_other(cache, author_of(cache.model)), prompts[0].ids, 0
        first: Any = next(layer for layer in cache.kv.of_tokens if isinstance(layer, CacheLayerMixin))
        if len(prompts) == 1 and first.batch_size == 1:
            common = shared_tokens(ids[:-1], cache.prompts.beginnings[0] if cache.prompts.beginnings else ())
            marks = (at for at, token in enumerate(ids[:common]) if token in cache.traits.placeholders)
            common = next(marks, common)  # another image may stand behind the same id
        if cache.traits.ignores_states:  # several tokens cannot come behind a state
            common = 0
        common = _keep(cache, common)
        notice = other_author(cached, cached - common) if is_other else ""
        if not common:
            return prompts, History(), notice
        kept_ids = torch.tensor([ids[:common]])
        return [prompts[0].behind(common)], History(kept_ids, torch.ones_like(kept_ids)), notice

    def keep_history(self, cache: Any, history: History) -> str:
        """Crop a cache to the tokens that a history has and this author computed; returns a notice of another."""
        cached, author = Cache.get_seq_length(cache), author_of(cache.model)
        if history.input_ids is None:
            refuse_other_author(self.author if cached else None, author, cached, ASK_AGAIN)
            return ""
        is_other, ids = self.author not in (None, author), history.input_ids
        common = 0 if is_other else history.columns_of(cache.prompts.beginnings, cached)
        again = ids[:, common:cached].flatten().tolist()
        if not cache.traits.placeholders.isdisjoint(again):
            raise PromptError(
                f"{len(again)} tokens that the cache holds would be computed again from a history, but some stand for "
                "images, which do not come with it. reset() the cache and pass the whole conversation with its images."
            )
        self._forget_other(cache, author)
        common = _keep(cache, common)
        return other_author(cached, cached - common) if is_other else ""

    def _forget_other(self, cache: Any, author: Author) -> bool:
        """Return True if another author computed the cached K and V, which are dropped."""
        if self.author in (None, author):
            return False
        cache.hold(KVLayers.empty(cache.model, len(cache.kv.all), cache.config))
        cache.prompts.beginnings = ()
        self.author = author
        return True


def _keep(cache: Any, columns: int) -> int:
    """Crop a cache to its first columns, to none if a layer cannot be cropped so far; returns how many stay."""
    cached = Cache.get_seq_length(cache)
    if columns < cached:
        try:
            cache.crop(columns - cached)
        except ConfigError:
            columns = 0
    if not columns:
        cache.watch.stop()
        Cache.reset(cache)
        cache.kv.frontier.crop(0)
    return min(columns, cached)
