# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fields that the classes for LangChain and LlamaIndex have in common: both are models of pydantic."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from ..config import BlendConfig
from ..errors import ConfigError
from .answering import Answerer

__all__ = ["AnswererFields"]


class AnswererFields(BaseModel):
    """What an `Answerer` is made of; keywords that are no fields are settings of `generate`."""

    model: Any
    tokenizer: Any
    store: Any
    blend: BlendConfig = Field(default_factory=BlendConfig)
    max_new_tokens: int = 256
    temperature: float | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    def __init__(self, **arguments: Any) -> None:
        """Take the fields, and settings of `generate`; what is neither is refused by a ConfigError."""
        fields = {name: value for name, value in arguments.items() if name in type(self).model_fields}
        settings = fields.get("settings", {})
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings is {settings!r:.60}, expected a dict of arguments of generate. Pass one.")
        more = {name: value for name, value in arguments.items() if name not in fields}
        try:
            super().__init__(**{**fields, "settings": {**settings, **more}} if more else fields)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            came = "missing" if first["type"] == "missing" else f"{first['input']!r:.60}"
            raise ConfigError(
                f"{type(self).__name__} cannot be made: {name} is {came}: {first['msg']}. Correct it."
            ) from error
        self._answerer()

    def _answerer(self) -> Answerer:
        own = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature, **self.settings}
        own.pop("stop", None)
        return Answerer(self.model, self.tokenizer, self.store, self.blend, own)
