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
from ...prompt.pieces import Span, tokenize
from ...prompt.text import aligned

__all__ = ["NamedDocuments", "plan_salt", "read_params", "request_fields"]

LoadTokenizer = Callable[[], Any]


@dataclass(frozen=True)
class NamedDocuments:
    """The documents that a request names, from left to right, and whose they are."""

    spans: tuple[Span, ...] = ()
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
        `messages`, `kv_transfer_params` with the spans of the documents in the prompt, and `cache_salt`.

    Raises:
        PromptError: the tokenizer has no chat template, the template refuses the messages, or no message is a user's.
    """
    filled, texts = with_documents(messages, documents)
    prompt = build_messages(tokenizer, filled, texts, template)
    spans = [_as_list(span) for span in prompt.spans]
    fields: dict[str, Any] = {"messages": filled}
    if spans:
        fields["kv_transfer_params"] = {"documents": spans, "tenant": tenant}
        fields["cache_salt"] = plan_salt(prompt.ids, spans, config, tenant=tenant, secret=secret)
    elif tenant:
        # Nothing is blended, and no blended block has the salt of an empty plan
        fields["cache_salt"] = plan_salt((), (), config, tenant=tenant, secret=secret)
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
    plan = {
        "tenant": tenant,
        "config": config.to_dict(),
        "documents": [[span.start, span.first, span.tokens, list(span.token_ids)] for span in spans],
        "token_ids": [int(token) for token in token_ids],  # a selector may look at the question
    }
    text = json.dumps(plan, sort_keys=True, separators=(",", ":"))
    key = (secret or b"")[: hashlib.blake2b.MAX_KEY_SIZE]
    return hashlib.blake2b(text.encode(), digest_size=32, key=key).hexdigest()


def read_params(
    params: Mapping[str, Any] | None, token_ids: Sequence[int], load_tokenizer: LoadTokenizer | None
) -> NamedDocuments:
    """Read what a request says in its `kv_transfer_params`; gives no spans if it names no documents.

    Raises PromptError where a document is not in the prompt, or the fields are of other types.
    """
    fields = params or {}
    documents = fields.get("documents") or ()
    tenant = fields.get("tenant") or ""
    if not isinstance(tenant, str):
        raise PromptError(f"tenant is {tenant!r:.60}, expected a name. Leave it out where there are no tenants.")
    if isinstance(documents, str) or not isinstance(documents, Sequence):
        raise PromptError(
            f"documents is {documents!r:.60}, expected a list of texts or of [start, stop]. Send a list, also of one."
        )
    return NamedDocuments(tuple(_spans(documents, token_ids, load_tokenizer)), tenant)


def _as_list(span: Span) -> list[Any]:
    """Write a span as JSON has it; the opposite of `_listed_span`."""
    return [span.start, list(span.token_ids), span.first, span.tokens]


def _spans(documents: Sequence[Any], token_ids: Sequence[int], load_tokenizer: LoadTokenizer | None) -> list[Span]:
    spans = []
    for document in documents:
        spans.append(_span(document, token_ids, load_tokenizer))
    spans.sort(key=lambda span: span.start)
    for left, right in pairwise(spans):
        if left.overlaps(right):
            raise PromptError(
                f"documents at {left.start} and {right.start} of the prompt overlap. Name each token once."
            )
    return spans


def _span(document: Any, token_ids: Sequence[int], load_tokenizer: LoadTokenizer | None) -> Span:
    """Find a document: its text; [start, stop]; or the fields of a `Span`, for one of which the prompt has a part."""
    span = None
    match document:
        case str() | Mapping() if load_tokenizer is not None:
            span = _text_span(document, token_ids, load_tokenizer())
        case [int(start), int(stop)] if 0 <= start < stop <= len(token_ids):
            span = Span.whole(start, [int(token) for token in token_ids[start:stop]])
        case [int(start), [*ids], int(first), int(tokens)]:
            span = _listed_span(Span(start, tuple(ids), first, tokens), token_ids)
    if span is None or not span.tokens:
        raise PromptError(
            f"the document {document!r:.60} is not in the prompt of {len(token_ids)} tokens. Give [start, stop], or "
            "its text as it is in the prompt."
        )
    return span


def _text_span(document: Any, token_ids: Sequence[int], tokenizer: Any) -> Span | None:
    """Find a text, tokenised alone, in the prompt; its first tokens may differ there."""
    packed = array("i", token_ids).tobytes()
    for form in forms_of(document):
        ids = tokenize(tokenizer, form)
        span = aligned(packed, 0, len(token_ids), 0, ids) if ids else None
        if span is not None:
            return span
    return None


def _listed_span(span: Span, token_ids: Sequence[int]) -> Span | None:
    """Give a span that a request has written out, if the prompt has its tokens there."""
    if span.start < 0 or span.first < 0 or span.tokens <= 0:
        return None
    in_prompt = tuple(token_ids[span.start : span.stop])
    in_chunk = span.token_ids[span.first : span.first + span.tokens]
    is_there = in_prompt == in_chunk and len(in_prompt) == span.tokens
    return span if is_there else None
