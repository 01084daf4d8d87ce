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
    from pydantic import ConfigDict, Field
except ModuleNotFoundError:
    import_extra("langchain_core", extra="langchain", needed_by="ChatBlend")
    raise

__all__ = ["ChatBlend"]


class ChatBlend(BaseChatModel):
    """A chat model for LangChain on a model of transformers and a `BlendCache`.

    `invoke`, `stream`, `batch` and their asynchronous forms take `documents`: what a retriever gave. Those that are in
    no message are put before the last question. Without them, stored chunks are found in the messages. `template` has
    arguments of the chat template, such as `tools`; all other keywords of a call, and `settings`, are those of
    `generate`; `max_tokens` is `max_new_tokens`, and `stop` has texts that end an answer.
    `response_metadata["hf_blend"]` says what the prefill cost, and `usage_metadata` counts the reused tokens as
    `cache_read`. A `temperature` of 0 is greedy; None is as the generation config says. It calls no tools.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: Any
    tokenizer: Any
    store: Any
    blend: BlendConfig | None = None
    max_new_tokens: int = 256
    temperature: float | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @property
    def _llm_type(self) -> str:
        return "hf-blend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What tells its answers from those of another, in a cache of answers."""
        return {"model": self.model.config.name_or_path, "identity": self._answerer().identity}

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of a text by the model's own tokenizer, by which LangChain counts."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

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

    def _answerer(self) -> Answerer:
        settings = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, **self.settings}
        return Answerer(self.model, self.tokenizer, self.store, self.blend, settings)

    def _answer(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Answer:
        documents = options.pop("documents", None)
        template = options.pop("template", None)
        options.pop("stream", None)
        converted = convert_to_openai_messages(messages, text_format="string")
        return self._answerer().chat(converted, documents, template, stop, **options)


def _usage(answer: Answer) -> Any:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": len(answer.tokens),
        "total_tokens": answer.prompt_tokens + len(answer.tokens),
        "input_token_details": {"cache_read": answer.reused_tokens},
    }


def _metadata(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.reason, "hf_blend": answer.report}
