# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""LangChain: a chat model that reuses the KV of retrieved documents.

    llm = ChatBlend(model=model, tokenizer=tokenizer, store=ChunkStore.open("kv-store"))
    llm.invoke("Who keeps the light?", documents=retriever.invoke("Who keeps the light?"))

Its messages are rendered by the model's own chat template.
"""

from collections.abc import Iterator
from typing import Any

from ..config import BlendConfig
from ..errors import import_extra
from .answering import Answer, Answerer

try:
    from langchain_core.callbacks import CallbackManagerForLLMRun
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from pydantic import Field
except ModuleNotFoundError:
    import_extra("langchain_core", extra="langchain", wanted_by="ChatBlend")
    raise

__all__ = ["ChatBlend"]


class ChatBlend(BaseChatModel):
    """A chat model for LangChain on a model of transformers and a `BlendCache`.

    `invoke`, `stream`, `batch` and their asynchronous forms take `documents`: what a retriever gave. Those that are in
    no message are put before the last question, or passed to a chat template that takes documents. Without them,
    stored chunks are found in the messages. `template` has arguments of the chat template, such as `tools`; all other
    keywords are those of `generate`. `response_metadata["hf_blend"]` says what the prefill cost, and `usage_metadata`
    counts the reused tokens as `cache_read`. A `temperature` of 0 is greedy; None is as the generation config says.
    """

    model: Any
    tokenizer: Any
    store: Any
    blend: BlendConfig = Field(default_factory=BlendConfig)
    max_new_tokens: int = 256
    temperature: float | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "hf-blend"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        answer = self._answer(messages, stop, kwargs).whole()
        message = AIMessage(content=answer.text, usage_metadata=_usage(answer), response_metadata=_metadata(answer))
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        answer = self._answer(messages, stop, kwargs)
        for text in answer:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
            if run_manager:
                run_manager.on_llm_new_token(text, chunk=chunk)
            yield chunk
        last = AIMessageChunk(content="", usage_metadata=_usage(answer), response_metadata=_metadata(answer))
        yield ChatGenerationChunk(message=last)

    def _answer(self, messages: list[BaseMessage], stop: list[str] | None, given: dict[str, Any]) -> Answer:
        own = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, **self.settings}
        documents = given.pop("documents", None)
        answerer = Answerer(self.model, self.tokenizer, self.store, self.blend, own)
        converted = convert_to_openai_messages(messages, text_format="string")
        return answerer.chat(converted, documents, given.pop("template", None), stop or (), **given)


def _usage(answer: Answer) -> Any:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": len(answer.tokens),
        "total_tokens": answer.prompt_tokens + len(answer.tokens),
        "input_token_details": {"cache_read": answer.reused_tokens},
    }


def _metadata(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.reason, "hf_blend": answer.report}
