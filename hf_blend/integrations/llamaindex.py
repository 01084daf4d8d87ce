# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""LlamaIndex: a language model that reuses the KV of retrieved nodes.

    llm = BlendLLM(model=model, tokenizer=tokenizer, store=ChunkStore.open("kv-store"))
    engine = index.as_query_engine(llm=llm, node_postprocessors=[StoreNodes(llm=llm)], streaming=True)

LlamaIndex passes text to a model, not nodes: stored nodes are found in that text.
"""

from collections.abc import Sequence
from typing import Any

from ..config import BlendConfig
from ..errors import import_extra
from ..prompt.documents import leave_out_empty
from .answering import Answer, Answerer

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        ChatResponseGen,
        CompletionResponse,
        CompletionResponseGen,
        LLMMetadata,
        MessageRole,
    )
    from llama_index.core.llms import CustomLLM
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
    from pydantic import ConfigDict, Field
except ModuleNotFoundError:
    import_extra("llama_index.core", extra="llamaindex", needed_by="BlendLLM")
    raise

__all__ = ["BlendLLM", "StoreNodes"]

TEXTS = ("TextBlock", "ThinkingBlock", "CachePoint")  # what is a text, or says nothing to a model
TOOLS = ("name", "tool_calls", "tool_call_id")
CONTEXT_TOKENS = 4096  # of a model whose config does not say it


class BlendLLM(CustomLLM):
    """A language model for LlamaIndex on a model of transformers and a `BlendCache`.

    Stored nodes are found in any prompt that LlamaIndex writes: `StoreNodes` stores what was retrieved, `add_nodes`
    does it ahead of time. `complete`, `chat` and their streaming forms also take `documents`, a list of documents of
    any kind; `template`, arguments of the chat template; `stop`, texts that end the answer; all other keywords of a
    call, and `settings`, are those of `generate`, and `max_tokens` is `max_new_tokens`. `raw` of a response says what
    the prefill cost. With a chat template, query engines use `chat`, without one `complete`. A `temperature` of 0 is
    greedy; None is as the generation config says.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: Any
    tokenizer: Any
    store: Any
    blend: BlendConfig | None = None
    max_new_tokens: int = 256
    temperature: float | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def class_name(cls) -> str:
        """Name of the class in what LlamaIndex writes down."""
        return "hf_blend"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex plans prompts by."""
        positions = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return LLMMetadata(
            context_window=positions or CONTEXT_TOKENS,
            num_output=self.max_new_tokens,
            is_chat_model=bool(getattr(self.tokenizer, "chat_template", None)),
            model_name=self.model.config.name_or_path or type(self.model).__name__,
        )

    def add_nodes(self, nodes: Sequence[BaseNode]) -> None:
        """Compute and store the KV of nodes that are not stored yet. Their text is the one that prompts have.

        Empty nodes are left out with a warning.
        """
        self.store.add(self.model, self.tokenizer, leave_out_empty(nodes, least=0)[0])

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text."""
        answer = self._complete(prompt, **kwargs).whole()
        return CompletionResponse(text=answer.text, raw=answer.meta)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Continue a text, and give what there is of it each time that there is more."""
        answer = self._complete(prompt, **kwargs)
        return (CompletionResponse(text=answer.text, delta=text) for text in answer)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages by the model's own chat template."""
        answer = self._chat(messages, **kwargs).whole()
        return ChatResponse(message=_message(answer), raw=answer.meta)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages, and give what there is of the answer each time that there is more."""
        answer = self._chat(messages, **kwargs)
        return (ChatResponse(message=_message(answer), delta=text) for text in answer)

    def _answerer(self) -> Answerer:
        settings = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, **self.settings}
        return Answerer(self.model, self.tokenizer, self.store, self.blend, settings)

    def _complete(self, prompt: str, documents: Any = None, stop: Any = None, **settings: Any) -> Answer:
        return self._answerer().complete(prompt, documents, stop, **settings)

    def _chat(
        self, messages: Sequence[ChatMessage], documents: Any = None, template: Any = None, stop: Any = None,
        **settings: Any,
    ) -> Answer:  # fmt: skip
        converted = [_as_dict(message) for message in messages]
        return self._answerer().chat(converted, documents, template, stop, **settings)


class StoreNodes(BaseNodePostprocessor):
    """Stores the KV of retrieved nodes that the store lacks, and passes the nodes on as they are."""

    llm: BlendLLM

    @classmethod
    def class_name(cls) -> str:
        """Name of the class in what LlamaIndex writes down."""
        return "hf_blend_store_nodes"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self.llm.add_nodes([row.node for row in nodes])
        return nodes


def _as_dict(message: ChatMessage) -> dict[str, Any]:
    """A message as a dict for chat templates; parts that are no text are left as they are, and refused by `chat`."""
    tools = {name: message.additional_kwargs[name] for name in TOOLS if name in message.additional_kwargs}
    others = [block for block in message.blocks if type(block).__name__ not in TEXTS]
    return {"role": message.role.value, "content": others or message.content or "", **tools}


def _message(answer: Answer) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=answer.text)
