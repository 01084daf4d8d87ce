# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a proxy in front of vLLM takes: the server's fields, and those of vLLM's that one tenant may set for itself.

A field that names a template, a file, a processor's sizes, another request or its own rank is none of them.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from ...errors import PromptError
from ...serving.wire import (
    MOST_LOGPROBS,
    ChatRequest,
    CompletionRequest,
    Count,
    Generation,
    Ignored,
    Limits,
    Rows,
    StreamOptions,
    TokenId,
    check_chars,
    check_count,
)

__all__ = ["UpstreamChat", "UpstreamCompletion"]

NOT_BESIDE_DOCUMENTS = ("add_generation_prompt", "add_special_tokens", "continue_final_message")  # made into ids here


class UpstreamStreamOptions(StreamOptions):
    """How an answer is streamed."""

    continuous_usage_stats: bool = False


class UpstreamFields(Generation):
    """What both kinds of requests may say to vLLM."""

    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop_token_ids: Rows[TokenId] = Field([])
    allowed_token_ids: Rows[TokenId] = Field([])
    logprob_token_ids: Rows[TokenId] = Field([])
    bad_words: Rows[str] = Field([])
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    return_tokens_as_token_ids: bool = False
    return_token_ids: bool = False
    stream_interval: Count | None = None
    thinking_token_budget: int | None = None
    structured_outputs: dict[str, Any] = Field({})
    stream_options: UpstreamStreamOptions = UpstreamStreamOptions()
    add_special_tokens: bool | None = None
    cache_salt: Ignored = None  # the proxy's own
    kv_transfer_params: Ignored = None

    def bound(self, limits: Limits) -> None:
        """As above, and what vLLM compiles or looks for."""
        super().bound(limits)
        check_chars("structured_outputs", self.structured_outputs, limits)
        check_chars("bad_words", self.bad_words, limits)
        for name in ("stop_token_ids", "logprob_token_ids"):
            check_count(name, len(getattr(self, name)), limits.documents)
        fields = [name for name in NOT_BESIDE_DOCUMENTS if getattr(self, name, None) is not None]
        if self.documents and fields:
            raise PromptError(f"{fields[0]} came with documents, whose prompt is made here. Leave one of both out.")


class UpstreamChat(UpstreamFields, ChatRequest):
    """`/v1/chat/completions` of vLLM."""

    include_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None  # type: ignore[assignment]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool = False


class UpstreamCompletion(UpstreamFields, CompletionRequest):
    """`/v1/completions` of vLLM."""

    chunk_separator: Literal[""] = ""
    echo: bool = False  # type: ignore[assignment]
