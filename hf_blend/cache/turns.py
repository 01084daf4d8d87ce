# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What stays of a blend cache when a further turn begins: the first tokens of its prompt, if this model computed them.

K and V belong to their author. Where the model is another one by now, cached K and V are set aside, and what this one
held before comes back; the rest of the prompt is computed again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import ConfigError, PromptError
from ..model.author import Author, author_of, refuse_other_author
from ..model.hooks import GenerateCall
from ..prefill.notices import other_author
from ..prefill.request import Request
from ..prompt.history import History, refuse_other_prompt, shared_tokens
from ..prompt.pieces import TextPrompt
from .healing import Frontier

ASK_AGAIN = (
    "Pass the whole conversation by inputs(history=…), inputs_from_messages or inputs_from_text: what the cache "
    "cannot keep of it is computed again. Or reset() the cache."
)

Rows = tuple[tuple[int, ...], ...]


@dataclass
class SetAside:
    """K and V of another author, kept until the model is that author again."""

    author: Author | None
    layers: list[Any]
    kv_memory: Any
    beginnings: Rows
    frontier: Frontier


def begin_turn(cache: Any, call: GenerateCall, cached: int) -> None:
    """Note that a further `generate` begins; refuse a prompt that does not begin with the cached tokens."""
    cache.is_new_turn, prompts = True, cache._prompts
    if call.ids is None:
        return
    if prompts.pending.cached and prompts.pending.is_of(call.ids):
        raise PromptError(
            f"a prompt that inputs() built to come behind the {cached} tokens of this cache was passed to generate, "
            f"but the whole conversation is expected there: generate would leave out its beginning. {ASK_AGAIN}"
        )
    refuse_other_prompt(call.ids, call.mask, cached, prompts.beginnings, ASK_AGAIN)


def keep_beginning(cache: Any, prompts: Sequence[TextPrompt]) -> tuple[int, str]:
    """Keep the tokens of a cache that a prompt begins with; gives how many stay, and a notice."""
    cached = Cache.get_seq_length(cache)
    if not cached and cache.aside is None:
        return 0, ""
    is_other, ids, common = _recall(cache, author_of(cache.model)), prompts[0].ids, 0
    first: Any = next(layer for layer in cache._token_layers if isinstance(layer, CacheLayerMixin))
    if len(prompts) == 1 and first.batch_size == 1:
        common = shared_tokens(ids[:-1], cache._prompts.beginnings[0] if cache._prompts.beginnings else ())
        marks = (at for at, token in enumerate(ids[:common]) if token in cache._placeholders)
        common = next(marks, common)  # another image may stand behind the same id
    common = _keep(cache, common)
    return common, other_author(cached, cached - common) if is_other else ""


def keep_history(cache: Any, history: History) -> str:
    """Keep the tokens of a cache that a history has and this author computed; gives a notice of other authors."""
    cached, author = Cache.get_seq_length(cache), author_of(cache.model)
    if history.input_ids is None:
        refuse_other_author(cache.author if cached else None, author, cached, ASK_AGAIN)
        return ""
    is_other, begun, ids = cache.author not in (None, author), cache._prompts.beginnings, history.input_ids
    if is_other:
        begun = cache.aside.beginnings if cache.aside is not None and cache.aside.author == author else ()
    common = history.columns_of(begun, len(ids[0]) if is_other else cached, is_known=is_other)
    again = ids[:, common:cached].flatten().tolist()
    if not cache._placeholders.isdisjoint(again):
        raise PromptError(
            f"{len(again)} tokens that the cache holds would be computed again from a history, but some stand for "
            "images, which do not come with it. reset() the cache and pass the whole conversation with its images."
        )
    _recall(cache, author)
    common = _keep(cache, common)
    return other_author(cached, cached - common) if is_other else ""


def ids_to_heal(cache: Any, history: Any, tokens: int) -> Tensor:
    """The ids of a cache's first columns, `[batch, columns]`, as far as they are known and stand for text."""
    rows = cache._prompts.beginnings
    if history is not None:
        ids = torch.as_tensor(history).cpu()
        ids = (ids[None] if ids.dim() == 1 else ids)[:, :tokens]
        if len(rows) not in (0, len(ids)) or any(
            shared_tokens(row.tolist(), begun) < min(len(row), len(begun))
            for row, begun in zip(ids, rows, strict=False)
        ):
            raise PromptError(
                f"a history of {tuple(ids.shape)} tokens came to heal a cache that holds {tokens}, but it does not "
                "begin as the cache does. Pass what generate returned with this cache."
            )
        if not cache._placeholders.isdisjoint(ids.flatten().tolist()):
            raise PromptError(
                "a history with tokens that stand for images came to heal a cache, but their features do not come "
                "with it. Only prompts of text can be healed."
            )
        return ids
    known = min(
        (next((at for at, token in enumerate(row) if token in cache._placeholders), len(row)) for row in rows),
        default=0,
    )
    return torch.tensor([row[: min(known, tokens)] for row in rows], dtype=torch.long)


def ids_behind(beginnings: Rows, request: Request) -> Rows:
    """What each row of a cache begins with behind a forward that the expected prompt did not come in, where known.

    No more than what is at the positions 0, 1, 2 …
    """
    if request.others:
        return ()
    most = request.in_order()
    if not request.past:
        return tuple(tuple(row[:most]) for row in request.rows)
    if len(request.rows) != len(beginnings):
        return tuple(ids[: min(request.past, most)] for ids in beginnings) if len(beginnings) == 1 else ()
    pairs = zip(beginnings, request.rows, request.before, strict=True)
    return tuple((*ids[:before], *(row if len(ids) >= before else ()))[:most] for ids, row, before in pairs)


def _recall(cache: Any, author: Author) -> bool:
    """Set K and V of another author aside, and hold what this author computed; gives whether there were any."""
    if cache.author in (None, author):
        return False
    aside, cache.aside = cache.aside, None
    if not any(getattr(layer, "visible", None) is not None for layer in cache._own_layers):  # they hold all
        kept = cache._own_layers, cache.kv_memory, cache._prompts.beginnings, cache.frontier
        cache.aside = SetAside(cache.author, *kept)
    if aside is not None and aside.author == author:
        cache.hold(aside.layers, aside.kv_memory, aside.frontier)
        cache._prompts.beginnings = aside.beginnings
    else:
        cache.hold(*cache.empty_layers())
        cache._prompts.beginnings = ()
    cache.author = author
    return True


def _keep(cache: Any, columns: int) -> int:
    """Keep the first columns, or none if a window has forgotten what was before them. Gives how many stay."""
    cached = Cache.get_seq_length(cache)
    if columns < cached:
        try:
            cache.crop(columns - cached)
        except ConfigError:
            columns = 0
    if not columns:
        cache.forget()
    return min(columns, cached)
