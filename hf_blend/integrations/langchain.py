# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""LangChain: a chat model that reuses the KV of retrieved documents.

    llm = ChatBlend(model=model, tokenizer=tokenizer, store=ChunkStore.open("kv-store"))
    llm.invoke("Who keeps the light?", documents=retriever.invoke("Who keeps the light?"))

Its messages are rendered by the model's own chat template.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from ..errors import ConfigError, import_extra
from .answering import NO_CALLS, Answer

try:
    from langchain_core.callbacks import CallbackManagerForLLMRun
    from langchain_core.language_models.chat_models import BaseChatModel
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

    from .pydantic_fields import AnswererFields
except ModuleNotFoundError:
    import_extra("langchain_core", extra="langchain", wanted_by="ChatBlend")
    raise

__all__ = ["ChatBlend"]


class ChatBlend(AnswererFields, BaseChatModel):
    """A chat model for LangChain on a model of transformers and a `BlendCache`.

    `invoke`, `stream`, `batch` and their asynchronous forms take `documents`: what a retriever gave. Those that are in
    no message are put before the last question, or passed to a chat template that takes documents. Without them,
    stored chunks are found in the messages. `template` has arguments of the chat template, such as `tools`; all other
    keywords, here and when the model is made, are those of `generate`; `max_tokens` is `max_new_tokens`, and `stop`
    has texts that end an answer. `response_metadata["hf_blend"]` says what the prefill cost, and `usage_metadata`
    counts the reused tokens as `cache_read`. A `temperature` of 0 is greedy; None is as the generation config says.
    It calls no tools.
    """

    streaming: bool = False

    @property
    def _llm_type(self) -> str:
        return "hf-blend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What tells its answers from those of another, in a cache of answers."""
        config = self.model.config.to_json_string(use_diff=False).encode()
        own = {name: getattr(self, name) for name in ("max_new_tokens", "temperature", "settings", "blend")}
        return {"model": self.model.config.name_or_path, "config": hashlib.sha256(config).hexdigest(), **own}

    def get_token_ids(self, text: str) -> list[int]:
        """The ids of a text by the model's own tokenizer, by which LangChain counts."""
        count = self.custom_get_token_ids
        return count(text) if count is not None else list(self.tokenizer.encode(text, add_special_tokens=False))

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> NoReturn:
        """Refuse tools."""
        raise ConfigError(f"{len(tools)} tools came for {type(self).__name__}, but {NO_CALLS}")

    def with_structured_output(self, schema: Any, **kwargs: Any) -> NoReturn:
        """Refuse a schema."""
        raise ConfigError(f"the schema {schema!r:.60} came for {type(self).__name__}, but {NO_CALLS}")

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

    def _answer(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Answer:
        documents, template, _ = (options.pop(name, None) for name in ("documents", "template", "stream"))
        converted = convert_to_openai_messages(messages, text_format="string")
        stops = self.settings.get("stop", ()) if stop is None else stop
        return self._answerer().chat(converted, documents, template, stops, **options)


def _usage(answer: Answer) -> Any:
    return {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": len(answer.tokens),
        "total_tokens": answer.prompt_tokens + len(answer.tokens),
        "input_token_details": {"cache_read": answer.reused_tokens},
    }


def _metadata(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.reason, "hf_blend": answer.report}
