# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Answers that follow a JSON schema, by llguidance.

Its work is bounded for any schema. Other libraries take seconds, in a thread that cannot be stopped, for an enum of
20,000 words or a text of up to 10^9 characters.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from ..errors import PromptError, import_extra

__all__ = ["Follows", "Grammars"]

COMBINED = {"allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties"}
WHITE_SPACE = r"[ \n]{0,8}"  # a small model may else write nothing but spaces for ever


class Grammars:
    """Compiles JSON schemas for one tokenizer."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, list(end_tokens)
        self._table: Any = None
        self._making = threading.RLock()

    def compiled(self, schema: dict[str, Any]) -> Any:
        """Return the matcher of a schema; the first call takes seconds."""
        guidance = import_extra(
            "llguidance", extra="structured", wanted_by="response_format, or a tool that is to be called,"
        )
        with self._making:
            if self._table is None:
                self._table = self._tokens()
        try:
            grammar = guidance.LLMatcher.grammar_from_json_schema(
                json.dumps(_closed(schema)), overrides={"whitespace_pattern": WHITE_SPACE}
            )
            matcher = guidance.LLMatcher(self._table, grammar, log_level=0)
        except ValueError as error:
            raise PromptError(f"the JSON schema cannot be followed: {error}. Send a simpler one.") from error
        if matcher.get_error():
            raise PromptError(f"the JSON schema cannot be followed: {matcher.get_error()}. Send a simpler one.")
        return matcher

    def _tokens(self) -> Any:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._end_tokens)
        except ValueError as error:
            raise PromptError(
                f"{type(self._tokenizer).__name__} cannot follow a JSON schema ({error}), but a tokenizer of the "
                "tokenizers library can. Leave response_format out, or serve the model with one."
            ) from error


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow the named keys alone where a schema says nothing of others, which the library would allow twice.

    Where objects are put together of several schemas, all are left as they are.
    """
    closed: dict[str, Any] = json.loads(json.dumps(schema))
    rows = [row for row in _subschemas(closed) if "properties" in row or "allOf" in row]
    if not any(row.keys() & COMBINED for row in rows):
        for row in rows:
            names, required = row["properties"], row.get("required", [])
            if isinstance(names, dict) and isinstance(required, list) and all(name in [*names] for name in required):
                row.setdefault("additionalProperties", False)
    return closed


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a schema and those in it."""
    if not isinstance(schema, dict):
        return
    yield schema
    lists = [schema.get(name) for name in ("anyOf", "oneOf", "allOf", "prefixItems")]
    named = [schema.get(name) for name in ("properties", "$defs", "definitions")]
    inner = [row for rows in lists if isinstance(rows, list) for row in rows]
    inner += [row for rows in named if isinstance(rows, dict) for row in rows.values()]
    for row in (schema.get("items"), schema.get("additionalProperties"), *inner):
        yield from _subschemas(row)


class Follows(LogitsProcessor):
    """A logits processor that leaves the tokens which a grammar allows next."""

    def __init__(self, matcher: Any, prompt_tokens: int, end_tokens: Sequence[int]) -> None:
        self._matcher, self._read, self._end_tokens = matcher.deep_copy(), prompt_tokens, list(end_tokens)
        self.error = ""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`[1, tokens]` ids of prompt and answer, `[1, vocabulary]` logits."""
        new = input_ids[0, self._read :].tolist()
        self._read += len(new)
        self._matcher.consume_tokens(new)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little", count=scores.shape[1]).astype(bool))
        self.error = self._matcher.get_error()
        if self.error or not allowed.any():  # too complex from here on: the answer ends
            allowed[self._end_tokens] = True
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)
