# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a request says of its documents, and the salt that keeps its blocks from requests with others.

vLLM shares a block by a hash of all tokens up to its last and of the request's `cache_salt`. The K and V of a blended
block depend on more: which documents the prompt has, also behind the block, and how much of them is recomputed. The
salt names these things. It is made with the tenant's secret, so that nobody else can make it.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ...config import BlendConfig
from ...errors import PromptError
from ...prompt.documents import forms_of
from ...prompt.messages import build_messages, with_documents
from ...prompt.pieces import NamedPrompt, Span, tokenize
from ...prompt.text import aligned

__all__ = ["NamedPrompt", "Reuse", "plan_salt", "read_params", "request_fields"]


@dataclass(frozen=True)
class Reuse:
    """The documents of a prompt, from left to right, and whose they are."""

    spans: tuple[Span, ...]
    tenant: str = ""


def request_fields(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    documents: Any,
    config: BlendConfig,
    *,
    tenant: str = "",
    secret: bytes | None = None,
    **template: Any,
) -> dict[str, Any]:
    """Return what goes into `extra_body` of OpenAI's client, so that vLLM reuses the documents of a chat.

        client.chat.completions.create(model=name, messages=messages, extra_body=request_fields(…))

    Documents that are in no message are put before the first message of the user, in `messages` of these fields, which
    the client sends instead of its own.

    Args:
        tokenizer: the tokenizer of the model, with the chat template that vLLM uses.
        messages: dicts with a role and a content of text.
        documents: texts, or dicts or objects with one; empty ones are left out with a warning.
        config: the settings of the connector: its salts depend on them.
        tenant: whose namespace of the store it is; one must be known to the connector.
        secret: that of the tenant in the connector's file, if it has one.
        **template: arguments of the chat template; send them as `chat_template_kwargs` too.

    Returns:
        `messages`, `kv_transfer_params` with the places of the documents in the prompt, and `cache_salt`.

    Raises:
        PromptError: the tokenizer has no chat template, the template refuses the messages, or no message is a user's.
    """
    placed, texts = with_documents(messages, documents)
    prompt = build_messages(tokenizer, placed, texts, template)
    spans = [[span.start, list(span.token_ids), span.first, span.tokens] for span in prompt.spans()]
    salt = plan_salt(prompt.ids if spans else (), spans, config, tenant=tenant, secret=secret)
    fields: dict[str, Any] = {"messages": placed}
    if spans:
        fields["kv_transfer_params"] = {"documents": spans, "tenant": tenant}
    if spans or tenant:
        fields["cache_salt"] = salt  # no blended block has the salt of an empty plan
    return fields


def plan_salt(
    token_ids: Sequence[int],
    documents: Sequence[Sequence[Any]],
    config: BlendConfig,
    *,
    tenant: str = "",
    secret: bytes | None = None,
) -> str:
    """Make the `cache_salt` that a request with documents needs while vLLM caches prefixes: 64 hex digits.

    `token_ids` are those of the whole prompt, documents are as in `kv_transfer_params`, without texts.
    """
    spans = _spans(documents, token_ids, None)
    about = {
        "tenant": tenant,
        "config": config.to_dict(),
        "documents": [[span.start, span.first, span.tokens, list(span.token_ids)] for span in spans],
        "token_ids": list(map(int, token_ids)),  # a selector may look at the question
    }
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32, key=(secret or b"")[:64]).hexdigest()


def read_params(
    params: Mapping[str, Any] | None, token_ids: Sequence[int], tokenizer: Callable[[], Any] | None
) -> Reuse:
    """What a request says in its `kv_transfer_params`; without spans if it names no documents."""
    fields = params or {}
    documents, tenant = fields.get("documents") or (), fields.get("tenant") or ""
    if not isinstance(tenant, str):
        raise PromptError(f"tenant is {tenant!r:.60}, expected a name. Leave it out where there are no tenants.")
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise PromptError(f"documents is {documents!r:.60}, expected a list of texts or of [start, stop].")
    return Reuse(tuple(_spans(documents, token_ids, tokenizer)), tenant)


def _spans(documents: Sequence[Any], token_ids: Sequence[int], tokenizer: Callable[[], Any] | None) -> list[Span]:
    spans = sorted((_span(row, token_ids, tokenizer) for row in documents), key=lambda row: row.start)
    for left, right in pairwise(spans):
        if left.overlaps(right):
            raise PromptError(
                f"documents at {left.start} and {right.start} of the prompt overlap. Name each token once."
            )
    return spans


def _span(text: Any, token_ids: Sequence[int], tokenizer: Callable[[], Any] | None) -> Span:
    """A document: its text; [start, stop]; or the fields of a `Span`, for one of which the prompt has a part."""
    size = len(token_ids)
    match text:
        case str() | Mapping() if tokenizer is not None:
            packed, forms = array("i", token_ids).tobytes(), (tokenize(tokenizer(), form) for form in forms_of(text))
            span = next(filter(None, (aligned(packed, 0, size, 0, ids) for ids in forms if ids)), None)
        case [int(start), int(stop)] if 0 <= start < stop <= size:
            span = Span.whole(start, tuple(map(int, token_ids[start:stop])))
        case [int(start), [*ids], int(first), int(tokens)] if min(start, first) >= 0 < tokens:
            span = Span(start, tuple(ids), first, tokens)
            here = tuple(token_ids[start : start + tokens])
            span = span if here == span.token_ids[first : first + tokens] and len(here) == tokens else None
        case _:
            span = None
    if span is None or not span.tokens:
        raise PromptError(
            f"the document {text!r:.60} is not in the prompt of {size} tokens. Give [start, stop], or its text as it "
            "is in the prompt."
        )
    return span
