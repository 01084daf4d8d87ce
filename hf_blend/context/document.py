# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Long documents: computed once in chunks, then asked over all of them, or over those that a retriever picks.

    document = Document(model, tokenizer, store, text)
    document.precompute(progress=tqdm)
    document.ask("Who signed it?", retrieve=retriever, max_new_tokens=32)
    document.ask("Who signed it?", retrieve=lambda *_: range(8, 16))

Later questions find the chunks in the store, whatever else stands in their prompts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from ..cache.blend_cache import BlendCache
from ..errors import ConfigError
from ..prompt.pieces import tokenize
from ..store import ChunkStore

Retriever = Callable[[str, Sequence[str]], Sequence[int]]  # question and chunk texts → indices of the chunks to read
Progress = Callable[[Iterable[Any]], Iterable[Any]]  # such as tqdm


class Document:
    """A text cut into chunks whose KV is stored once and blended for every question."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        store: ChunkStore,
        text: str,
        *,
        chunk_tokens: int = 512,
        prefix: str | None = None,
        **settings: Any,
    ) -> None:
        """Cut the text. Nothing is computed yet."""
        if not text or chunk_tokens < 1:
            raise ConfigError(f"{len(text)} letters in chunks of {chunk_tokens} tokens: both must be above 0.")
        self.model, self.tokenizer, self.store = model, tokenizer, store
        self.prefix, self._settings = prefix, settings
        self.chunks = list(_cut(tokenizer, text, chunk_tokens))
        self._texts = [tokenizer.decode(ids) for ids in self.chunks]

    def precompute(self, progress: Progress = iter) -> int:
        """Compute and store every chunk that is not stored yet."""
        for ids in progress(self.chunks):
            self.store.add(self.model, self.tokenizer, [ids], chunk_prefix_ids=self._settings.get("chunk_prefix_ids"))
        return len(self.chunks)

    def ask(self, question: str, *, retrieve: Retriever | None = None, **options: Any) -> str:
        """Answer from the chunks that a retriever picks, in the order in which it gives them."""
        chosen = range(len(self.chunks)) if retrieve is None else retrieve(question, self._texts)
        indices = [int(index) for index in chosen]
        if not indices or not all(0 <= index < len(self.chunks) for index in indices):
            raise ConfigError(f"the retriever picked {indices}, expected indices from 0 to {len(self.chunks) - 1}.")
        cache, chunks = BlendCache(self.model, self.store, **self._settings), [self.chunks[index] for index in indices]
        inputs = cache.inputs(self.tokenizer, prefix=self.prefix, chunks=chunks, question=question)
        output = self.model.generate(**inputs, past_key_values=cache, **options)
        return str(self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def _cut(tokenizer: Any, text: str, most_tokens: int) -> Iterator[tuple[int, ...]]:
    """Whole lines as long as they fit; a line that is too long alone is cut anywhere."""
    chunk: tuple[int, ...] = ()
    for line in text.splitlines(keepends=True):
        ids = tuple(tokenize(tokenizer, line))
        if chunk and len(chunk) + len(ids) > most_tokens:
            yield chunk
            chunk = ()
        for start in range(0, max(1, len(ids)), most_tokens):
            part = ids[start : start + most_tokens]
            if len(chunk) + len(part) > most_tokens:
                yield chunk
                chunk = ()
            chunk += part
    if chunk:
        yield chunk
