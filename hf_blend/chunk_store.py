# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chunk store that users open: a store, and what computes its chunks with a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import nn

from . import plugins
from .errors import ConfigError, suggest
from .recipes import DEFAULT, Recipe, Recipes
from .store.chunk import ChunkKey
from .store.memory import MemoryCache, default_memory_bytes
from .store.opening import check_caps, is_remote, open_tiers
from .store.store import Store

__all__ = ["ChunkStore"]

_DURABILITIES = ("full", "none")


class ChunkStore(Store):
    """KV of chunks, keyed by what it was computed from. Open one with `ChunkStore.open`; threads may share it.

    A forked process must open its own: locks, threads and connections stay with the process that opened a store.
    """

    recipes = Recipes()  # of a store that was not opened: none
    controller: Any = None  # a `LoadingController` decides for each request what is worth loading
    part_loader: Callable[[Any], Any] | None = None  # makes what loads chunks in part for a request, from its cache

    @classmethod
    def open(
        cls,
        location: str | Path | None = None,
        *,
        memory_bytes: int | None = None,
        disk_bytes: int | None = None,
        remote: str | None = None,
        namespace: str = "",
        durability: str = "full",
        codec: str = "raw",
        partial: float | Mapping[str, float] | None = None,
    ) -> Self:
        """Open a store, making it if it does not exist.

        Args:
            location: a directory; "memory://"; a URL of fsspec, such as "s3://bucket/folder"; None is
                `$HF_BLEND_HOME`, else the assets folder of the Hugging Face cache.
            memory_bytes: cap of the memory tier; None is a quarter of what is available. If it is full, what was
                used least recently leaves.
            disk_bytes: cap of the directory, all namespaces together; None is what it holds now plus half of what is
                free.
            remote: URL of a tier behind the disk, shared with other machines; `put` waits for it; an error there
                is a miss.
            namespace: keeps tenants apart: no chunk is seen from another namespace.
            durability: "full" makes a stored chunk survive a power loss; "none" is for scratch. Neither ever gives
                wrong KV.
            codec: "raw" keeps K and V bit for bit; "int8" takes half the bytes of bfloat16. Both are read.
            partial: share of the chunks' blocks that a request loads (its question chooses them), or a
                mapping of settings, see docs/holding_less.md; None loads chunks whole.

        Raises:
            ConfigError: an argument is out of range, or the location is of a kind that does not exist.
            StoreError: nothing can be kept at the location.
        """
        check_caps(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        if durability not in _DURABILITIES:
            raise ConfigError(f"no durability named {durability!r}. {suggest(str(durability), _DURABILITIES)}")
        plugins.load("store.codecs", codec)
        parts = None if partial is None else plugins.extension("sparse.partial.loading").PartialConfig.of(partial)
        if parts is not None and is_remote(location):
            raise ConfigError(
                f"partial={partial!r} came with a location that is a URL, expected a directory: blocks are read from "
                "a disk. Give a directory, and remote=URL."
            )
        tiers = open_tiers(location, remote, durable=durability == "full")
        memory_bytes = default_memory_bytes() if memory_bytes is None else memory_bytes
        cap_bytes = disk_bytes
        if parts is not None and not any(tier.is_local for tier in tiers):  # blocks are bytes, in memory too
            memory_bytes, cap_bytes = 0, memory_bytes
            tiers = [plugins.load("store.tiers", "memory")()]
        opened = cls(MemoryCache(memory_bytes), tiers, namespace=namespace, cap_bytes=cap_bytes, codec=codec)
        root = opened.folder
        opened.recipes = Recipes(root / "recipes" if root else None)
        if parts is not None:
            parts.apply(opened)
        return opened

    @property
    def loads_in_part(self) -> bool:
        """True where each request loads only those blocks of a chunk that matter to it."""
        return self.part_loader is not None

    def recipe(self, model: nn.Module) -> Recipe:
        """Give the settings that a model is blended with where a caller says nothing, and where they are from.

        Over a store that loads in part, a rule that looks at all chunks is left out: it would load them whole.
        """
        from .model.anatomy import decoder_layers
        from .model.identity import fingerprint

        found = self.recipes.get(fingerprint(model), len(decoder_layers(model))) if self.recipes else None
        if found is None or (self.loads_in_part and found.needs_question()):
            return DEFAULT
        return found

    def default_prefix(self, model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
        """Give the tokens that chunks are computed behind where nothing else is said.

        They are the model's BOS, if any, and a short text. BOS alone without a tokenizer, and for models that the text
        does not suit: few positions, the state of a mixer, or a tokenizer without its words.
        """
        from .model.capture import default_prefix

        return default_prefix(model, tokenizer)

    def stored_prefix(self, model: nn.Module, fingerprint: str) -> tuple[int, ...]:
        """Give the tokens that stored chunks of a model are behind, for prompts that no tokenizer is known of.

        The most tokens where there are several such; the model's BOS, if any, where nothing is stored.
        """
        from .model.anatomy import bos_prefix

        return self.longest_prefix(fingerprint) or bos_prefix(model)

    def order(self, model: nn.Module, tokenizer: Any, documents: Sequence[Any]) -> list[Any]:
        """Put documents first that continue the longest stored chain; the others stay in their order behind them.

        Chains are stored by `BlendCache.heal` with `chains=True`. A model may answer otherwise where its documents are
        in another order.

        Args:
            model: a causal language model of transformers.
            tokenizer: the model's.
            documents: as for `BlendCache.inputs`, the best first.

        Returns:
            The same documents.

        Raises:
            PromptError: `documents` is not a list, or a document is empty.
        """
        from .model.identity import fingerprint
        from .prompt.pieces import list_chunks, tokenize_chunks

        ids = tokenize_chunks(tokenizer, list_chunks(documents))
        return [documents[number] for number in self.order_of(fingerprint(model), ids)]

    def add(
        self,
        model: nn.Module,
        tokenizer: Any,
        chunks: Sequence[Any],
        *,
        chunk_prefix_ids: Sequence[int] | None = None,
    ) -> list[ChunkKey]:
        """Compute and store chunks ahead of time; those that are stored already cost nothing.

        Args:
            model: a causal language model of transformers.
            tokenizer: the model's; None for token ids, which are then computed behind BOS alone.
            chunks: documents or token ids, none empty, as for `BlendCache.inputs`.
            chunk_prefix_ids: as in `BlendConfig`.

        Returns:
            The keys of the chunks, in their order.

        Raises:
            PromptError: `chunks` is not a list, or a chunk is empty, too long for the model, or holds a token that
                stands for an image.
            StoreError: a chunk's KV holds NaN or infinity.
            UnsupportedModelError: the model has hooks of others, is wrapped, or changes while it is used.
        """
        from .model.capture import check_chunk, compute_chunks
        from .model.question import question_ids
        from .prompt.pieces import list_chunks, tokenizer_digest

        chunks = list_chunks(chunks)
        keys = self.keys(model, tokenizer, chunks, chunk_prefix_ids=chunk_prefix_ids)
        for number, key in enumerate(keys):
            check_chunk(model, key.token_ids, key.chunk_prefix_ids, f"chunk {number}")
        texts = {key for key, chunk in zip(keys, chunks, strict=True) if isinstance(chunk, str)}
        # Asked before each, as another process may have been faster
        missing = (key for key in dict.fromkeys(keys) if not self.contains(key))
        for chunk in compute_chunks(model, missing, question_ids=question_ids(model, tokenizer)):
            digest = tokenizer_digest(tokenizer) if chunk.key in texts else ""
            self.put(replace(chunk, tokenizer=digest))
        return keys

    def keys(
        self,
        model: nn.Module,
        tokenizer: Any,
        chunks: Sequence[Any],
        *,
        chunk_prefix_ids: Sequence[int] | None = None,
    ) -> list[ChunkKey]:
        """Give the keys under which `add` would store chunks, in their order; arguments are as there.

        Nothing is computed. Raises PromptError if `chunks` is not a list, or a chunk is empty.
        """
        from .model.identity import fingerprint
        from .prompt.pieces import list_chunks, tokenize_chunks

        identity = fingerprint(model)
        prefix_ids = self.default_prefix(model, tokenizer) if chunk_prefix_ids is None else tuple(chunk_prefix_ids)
        listed = list_chunks(chunks)
        return [ChunkKey(identity, prefix_ids, ids, self.namespace) for ids in tokenize_chunks(tokenizer, listed)]
