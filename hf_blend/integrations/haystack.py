# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Haystack: a chat generator that reuses the KV of retrieved documents.

    pipeline.add_component("llm", BlendChatGenerator(model, tokenizer, ChunkStore.open("kv-store")))
    pipeline.connect("retriever.documents", "llm.documents")

Haystack sends telemetry unless the environment has HAYSTACK_TELEMETRY_ENABLED=False.
"""

from typing import Any

from torch import nn

from ..config import BlendConfig
from ..errors import import_extra
from ..store import ChunkStore
from .answering import Answerer

try:
    from haystack import Document, component
    from haystack.dataclasses import ChatMessage, StreamingChunk
    from haystack.dataclasses.streaming_chunk import StreamingCallbackT, select_streaming_callback
except ModuleNotFoundError:
    import_extra("haystack", extra="haystack", needed_by="BlendChatGenerator")
    raise

__all__ = ["BlendChatGenerator"]


@component
class BlendChatGenerator:
    """A chat generator for Haystack on a model of transformers and a `BlendCache`.

    Connect a retriever's `documents` to it: those that are in no message are put before the last question. Without
    them, stored chunks are found in the messages. `meta["hf_blend"]`
    of a reply says what the prefill cost.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        store: ChunkStore,
        blend: BlendConfig | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> None:
        """Prepare to answer.

        `generation_kwargs` are arguments of `generate`, such as `max_new_tokens`: `temperature` 0 is greedy; `stop`
        has texts that end the answer; `template` has arguments of the chat template.
        """
        self._answerer = Answerer(model, tokenizer, store, blend, {"max_new_tokens": 256})
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback = streaming_callback

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage],
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """Answer messages; arguments are added to those of the component, a callback takes the place of its own."""
        tell = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=False)
        settings = {**self.generation_kwargs, **(generation_kwargs or {})}
        template = settings.pop("template", None)
        stops = settings.pop("stop", None)
        converted = [message.to_openai_dict_format(require_tool_call_ids=False) for message in messages]
        answer = self._answerer.chat(converted, documents, template, stops, **settings)
        for number, text in enumerate(answer):
            if tell:
                tell(StreamingChunk(text, index=0, start=number == 0))
        return {"replies": [ChatMessage.from_assistant(answer.text, meta=answer.meta)]}
