# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`BlendCache`: a cache for stock `generate` that reuses stored chunks in its prefill.

    store = ChunkStore.open("kv-store")
    cache = BlendCache(model, store, recompute_ratio=0.15)
    inputs = cache.inputs_from_messages(tokenizer, messages, documents)
    output = model.generate(**inputs, **cache.keyword, max_new_tokens=64)
    print(cache.report)

`cache.keyword` is `past_key_values=cache`, and from transformers 5.24 on `cache=cache`.

One object carries a request. It knows a prompt either from `inputs` or from the ids that `generate` passes to the
model, enters the model's layers for the one forward that is the prefill, and behaves as any dynamic cache afterwards.
"""

import copy
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.tokenization_utils_base import BatchEncoding

from .. import plugins
from ..config import BlendConfig
from ..errors import ConfigError, PromptError
from ..model.anatomy import bos_prefix, cache_class_for, decoder_layers, input_device, is_extended
from ..model.capture import default_prefix
from ..model.identity import author_of, refuse_wrapper, structure_of
from ..model.question import question_ids
from ..prefill.report import IMAGES_AGAIN, BlendReport, other_author, warn_once
from ..prefill.request import NO_EDIT, Edit, PendingPrompt
from ..prompt.documents import is_document
from ..prompt.messages import build_messages
from ..prompt.pieces import SEPARATOR, Prompt, batch, build_all, check_lengths, shared_tokens, tokenizer_digest
from ..prompt.text import build_text
from ..store import ChunkStore
from .edits import edit_of
from .forwards import CacheForwards
from .guards import GuardedCache
from .healing import heal
from .session import load_cache, save_cache
from .state import BlendState, KVLayers, ModelInfo

NOT_A_CHAT = (
    "the tokenizer has a chat template, but inputs() joins plain texts, to which a chat model may answer nothing. "
    "BlendCache.inputs_from_messages(tokenizer, messages, documents) writes the prompt that the model was trained on."
)


def trial_cache(model: nn.Module, **settings: Any) -> "BlendCache":
    """A cache for a self-test of a model, with an empty store."""
    return BlendCache(model, ChunkStore.open("memory://"), **settings)


class BlendCache(GuardedCache):
    """A `transformers.Cache` that brings stored KV into the prefill and has the model recompute a share of it.

    Works with greedy search, sampling, beam search, assisted decoding and streaming, because `generate` sees a dynamic
    cache: empty before the prefill, full after it. `report` says what the last prefill cost.

    `model(**inputs, **cache.keyword, logits_to_keep=1)` is the same prefill without `generate`, for the logits of the
    last token or of as many as it says. Where outputs of every token are asked for (no `logits_to_keep`, `labels`,
    hidden states, attentions) nothing is reused; `report.fallback_reason` and one warning say why.
    With `kv_device_map`, `kv_memory` says where K and V are; what is on disk is deleted with the cache.

    A cache serves the model object that it was made for, also inside a wrapper that calls it, and refuses every other;
    only single tokens of a copy that `torch.compile` has compiled are appended unchecked. As long as the cache is
    alive, its one hook is on the model; calls with another cache pass it unchanged.

    Build a later prompt with `inputs`, `inputs_from_messages` or `inputs_from_text`: they keep the tokens that it
    shares with the cached ones. `generate` refuses a later prompt that was not built so. Under another adapter, other
    weights, another dtype, attention or mode of training all tokens are computed again, and `report.notice` says so;
    for steps of one token the model is not compared. They are, too, where a prompt's length has other rotary
    frequencies (longrope, dynamic) than the cached tokens.
    """

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> "BlendCache":
        """A cache of a class that the model accepts."""
        made: BlendCache = super().__new__(cache_class_for(cls, model))
        return made

    def __init__(
        self, model: nn.Module, store: ChunkStore, config: BlendConfig | None = None, **settings: Any
    ) -> None:
        """Prepare a request, and watch for the forwards of the model that carry this cache.

        Args:
            model: a causal language model of transformers.
            store: where chunks are kept.
            config: the settings; None: the recipe in the store for this model, else the defaults, see
                docs/choosing.md.
            **settings: fields of `BlendConfig` that differ from `config`, such as `recompute_ratio=0.15`.

        Raises:
            ConfigError: a setting is refused.
            UnsupportedModelError: the model cannot be blended exactly; `allow_unverified=True` uses it all the same.
            PromptError: `chunk_prefix_ids` holds a token that stands for an image.
            OffloadError: `offload_folder` cannot be written to.
        """
        # Settle the settings
        refuse_wrapper(model)
        source = "given by the caller"
        if config is None and "selector" not in settings:
            recipe = store.recipe(model)
            config = recipe.config()
            source = recipe.source
        config = BlendConfig.from_dict({**vars(config or BlendConfig()), **settings})
        self.config = config
        began_s = time.perf_counter()
        structure_of(model)  # drops what is remembered of the model if it is another at a glance
        config.refuse_depth(len(decoder_layers(model)))
        selector = plugins.load("selectors", config.selector)(config.selector_options, seed=config.seed)

        # Read the model
        prefix_ids = bos_prefix(model) if config.chunk_prefix_ids is None else tuple(config.chunk_prefix_ids)
        read_info = partial(ModelInfo, model, prefix_ids, trial_cache, config.allow_unverified, store.folder)
        info = read_info()
        check_ms = 1e3 * (time.perf_counter() - began_s)

        # Make empty layers, and wait for the model to be called
        kv = KVLayers.empty(model, len(info.layers), config)
        super().__init__(layers=kv.all)
        self.model, self.store = model, store
        self.state = BlendState(
            model,
            store,
            config,
            info,
            read_info,
            selector,
            source,
            prefix_ids,
            kv,
            BlendReport(config.recompute_ratio),
        )
        self.state.check_ms = check_ms
        self._forwards = CacheForwards(self, self.state)

    @property
    def report(self) -> BlendReport:
        """What the last prefill cost."""
        return self.state.report

    @property
    def kv_memory(self) -> Any:
        """Where K and V are with `kv_device_map`; None: all of them are on their devices."""
        return self.state.kv.memory

    def inputs(
        self,
        tokenizer: Any,
        *,
        prefix: Any = None,
        chunks: Sequence[Any],
        question: Any,
        separator: str = SEPARATOR,
    ) -> BatchEncoding:
        """Build the prompt of the next `generate` from chunks and a question. Missing chunks are computed then.

        The ids are joined, never the texts. For a tokenizer with a chat template `inputs_from_messages` is meant: the
        model was trained on such prompts, and one warning says so.

        Args:
            tokenizer: the model's tokenizer.
            prefix: system prompt, as text behind BOS if the tokenizer puts one there, or as token ids: those that
                `generate` returned continue a conversation.
            chunks: retrieved documents or token ids; none only behind a prefix. A document is a text, or a dict or an
                object with one as `text`, `content` or `page_content`. For a batch: a list for each request.
            question: what the model is asked. For a batch: a list.
            separator: is put between two texts without white space there, and computed in each request.

        Returns:
            `input_ids` and `attention_mask`, `[batch, tokens]`, padded on the left, on the model's device.

        Raises:
            PromptError: a piece is empty, the pieces of a batch differ in number, or a prompt does not fit the model.
        """
        prompts = build_all(tokenizer, prefix, chunks, question, separator)
        question_text = question if isinstance(question, str) else next(iter(question), None)
        if isinstance(question_text, str) and getattr(tokenizer, "chat_template", None):
            warn_once(NOT_A_CHAT)
        return self.expect(tokenizer, prompts)

    def inputs_from_messages(
        self,
        tokenizer: Any,
        messages: Sequence[Any],
        documents: Sequence[Any] | None = None,
        **template: Any,
    ) -> BatchEncoding:
        """Build the prompt of the next `generate` from messages, by the tokenizer's chat template.

        The template is rendered once and tokenised once: the ids are those of `apply_chat_template`. Documents are
        found in its text, and each is stored by its ids alone: it is reused in any message, in any order and beside
        any others. The few tokens that differ where documents are joined are computed (`report.seam_tokens`). Stored
        chunks that are not named, such as those of earlier turns, are found too.

        Of an earlier prompt the cache keeps the tokens that both begin with: pass all messages of a chat each time.
        Windows and states cannot be cut: where a template rewrites an answer of such a model, all is computed again.

        Args:
            tokenizer: the model's tokenizer, with a chat template.
            messages: dicts with a role and a content, as for `apply_chat_template`. For a batch: a list of
                conversations.
            documents: documents whose text is in the messages; a template gets dicts and objects, too. Missing ones
                are computed and stored. None: only what is stored is reused. For a batch: a list for each
                conversation.
            **template: further arguments of `apply_chat_template`, such as `tools`; `add_generation_prompt` is True by
                default.

        Returns:
            what `inputs` returns, `[batch, tokens]` each.

        Raises:
            PromptError: the tokenizer has no chat template or is another model's, the template refuses the messages,
                a document is empty or not in the prompt, or the prompt does not fit the model.
        """
        if len(messages) and isinstance(messages[0], list | tuple):
            pairs = zip(messages, _for_each(documents, len(messages)), strict=True)
            prompts = [build_messages(tokenizer, *pair, template) for pair in pairs]
        else:
            prompts = [build_messages(tokenizer, messages, documents, template)]
        return self.expect(tokenizer, prompts)

    def inputs_from_text(
        self,
        tokenizer: Any,
        text: str | Sequence[str],
        chunks: Sequence[Any] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> BatchEncoding:
        """Build the prompt of the next `generate` from a text, without a template; stored chunks are found in it.

        The ids are those of `tokenizer(text)`. Where texts are joined a few differ: they are computed
        (`report.seam_tokens`), and what is inside a chunk is reused.

        Args:
            tokenizer: the model's tokenizer.
            text: a prompt, or a list of prompts for a batch.
            chunks: documents whose text is in the prompt, as `documents` of `inputs_from_messages`.
            add_special_tokens: as for the tokenizer; False for text that a chat template made.

        Returns:
            what `inputs` returns, `[batch, tokens]` each.

        Raises:
            PromptError: the text is empty or would begin with two BOS, a chunk is empty or not in the text, the
                tokenizer is another model's, or the prompt does not fit the model.
        """
        texts = [text] if isinstance(text, str) else list(text)
        named = [chunks] if isinstance(text, str) else _for_each(chunks, len(texts))
        build = partial(build_text, tokenizer, special=add_special_tokens)
        prompts = [build(*pair) for pair in zip(texts, named, strict=True)]
        return self.expect(tokenizer, prompts)

    def expect(self, tokenizer: Any, prompts: Sequence[Prompt]) -> BatchEncoding:
        """Expect prompts in the next forwards. Of the cached tokens those stay that a single prompt begins with.

        Gives `input_ids` and `attention_mask`, `[batch, tokens]`, padded on the left, on the model's device. Raises
        PromptError where a prompt does not fit the model.
        """
        state = self.state
        check_lengths(prompts, state.info.config)
        self._forwards.settle()
        cached, notice, edit = self._keep_shared_tokens(prompts)
        if state.config.chunk_prefix_ids is None:
            state.chunk_prefix_ids = default_prefix(self.model, tokenizer)
        state.question_ids = question_ids(self.model, tokenizer)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        ids, mask = batch(prompts, 0 if pad_id is None else pad_id)
        digest = tokenizer_digest(tokenizer)
        state.pending = PendingPrompt(tuple(prompts), ids, cached, tokenizer=digest, notice=notice, edit=edit)
        device = input_device(self.model)
        return BatchEncoding({"input_ids": ids.to(device), "attention_mask": mask.to(device)})

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append a layer's new K and V, and return all of its K and V; refuse those of another model object.

        Shapes: both `[batch, kv_heads, rows, head_dim]`, K rotated for the rows' positions → `[batch, kv_heads,
        tokens, head_dim]`.
        """
        prefill = self._forwards.prefill
        if prefill is not None:
            return prefill.update(layer_idx, key_states, value_states)
        self._forwards.refuse_unannounced()
        state = self.state
        if getattr(state.kv.all[layer_idx], "visible", None) is not None:
            make_loader = self.store.part_loader
            if state.loader is None and make_loader is not None:
                state.loader = make_loader(state)
            if state.loader is not None:
                state.loader.begin_layer(layer_idx)
                keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
                return state.loader.mark_keys(layer_idx, keys), values
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store the last inputs of a layer's convolution; refuse those of another model object."""
        self._forwards.refuse_unannounced()
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Store the state of a layer behind its last token; refuse one of another model object."""
        self._forwards.refuse_unannounced()
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Append a layer's new indexer keys, rotated for their positions, and return those of all tokens.

        Shapes: `[batch, rows, width]` → `[batch, tokens, width]`.
        """
        prefill = self._forwards.prefill
        if prefill is not None:
            return prefill.update_indexer(layer_idx, indexer_key_states)
        self._forwards.refuse_unannounced()
        return super().update_indexer(indexer_key_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens are in a layer, without those of a forward that has not gone through all layers."""
        length = super().get_seq_length(layer_idx)
        if torch.compiler.is_compiling():
            return length
        prefill = self._forwards.prefill
        if prefill is not None:
            return prefill.past
        return min(length, self.state.kv.length)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that new tokens will see. Models ask this before their first layer."""
        layer = self.state.kv.all[layer_idx]
        if torch.compiler.is_compiling() or not hasattr(layer, "sizes_behind"):
            return super().get_mask_sizes(query_length, layer_idx)
        prefill = self._forwards.prefill
        past = self.state.kv.length if prefill is None else prefill.request.past
        sizes: tuple[int, int] = layer.sizes_behind(past, query_length)
        return sizes

    def activate_past_recording(self) -> None:
        """Called first by assisted decoding: from now on windows wait for `crop` before they forget."""
        super().activate_past_recording()
        self.state.is_recording, self.state.healing = True, None

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-n)` forgets the last n tokens; if n is more than are cached, it empties the cache.

        Raises ConfigError, and changes no layer, where a window or a state has forgotten the tokens that would be its
        last.
        """
        state = self.state
        self._forwards.settle()
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        for layer in state.kv.of_tokens:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        state.crop_tokens(state.kv.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every beam the past of the beam that it continues; `beam_idx` is `[batch]`."""
        self._forwards.settle()
        super().reorder_cache(beam_idx)
        self.state.tokens.select_rows(beam_idx)
        self.state.healing = None

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only some batch entries; `indices` is `[kept]`, or a boolean for each."""
        self._forwards.settle()
        super().batch_select_indices(indices)
        self.state.tokens.select_rows(indices)
        self.state.healing = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""
        self._forwards.settle()
        super().batch_repeat_interleave(repeats)
        self.state.tokens.repeat_rows(repeats)
        self.state.healing = None

    def heal(self, tokens: int | None = None) -> int:
        """Compute blended K and V again, as a full prefill computes them.

        Call it between two turns, or when a server is idle. Each token costs what it costs in a prefill in blocks of
        256. Between two calls the cache may decode, be cropped and prefill further turns. Where every layer
        keeps all tokens as they came, it is exact on the left and blended on the right; with windows, states, an
        indexer or `kv_bits` it is blended until all is computed. A call that fails leaves every byte as it was. When
        nothing is left, later tokens and turns are those of a full prefill. `report.healed_tokens` counts.

        Until nothing is left, K and V are in memory twice.

        Args:
            tokens: how many more are computed; None for all, 0 only counts.

        Returns:
            How many tokens are still to be computed. 0: all are exact, as far as a codec with losses lets them.

        Raises:
            ConfigError: `tokens` is negative; the tokens have padding between them, or rotary frequencies that depend
                on the length; a layer is on another device or loaded in part; there is no memory for a second cache;
                or another model or adapter computed the cached tokens, or was set while a block was computed.
            UnsupportedModelError: the model is inside `self_extend`.
        """
        if tokens is not None and tokens < 0:
            raise ConfigError(f"heal({tokens}) was called, but a number of tokens from 0 on, or None, is expected.")
        self._forwards.settle()
        return heal(self.state, tokens)

    def save(self, path: str | Path) -> int:
        """Write the conversation to a file. An existing file is replaced atomically, and stays if writing fails.

        The file has K, V and states, the ids as far as they are known, and how far healing has come; not the messages,
        and no chunks of the store. After a switch of adapters it is of the model that computed the tokens.

        Args:
            path: the file.

        Returns:
            The size of the file in bytes.

        Raises:
            StoreError: the file cannot be written.
            ConfigError: the cache holds several requests, padding, or K and V that are on other devices or were loaded
                in part.
            UnsupportedModelError: tokens were computed inside `self_extend`.
        """
        self._forwards.settle()
        return save_cache(self.state, path)

    @classmethod
    def load(
        cls,
        model: nn.Module,
        store: ChunkStore,
        path: str | Path,
        config: BlendConfig | None = None,
        **settings: Any,
    ) -> "BlendCache":
        """Make a cache with what `save` wrote; it continues as the saved one would.

        Args:
            model: the model that the file was saved of, with the same adapter and weights.
            store: as for a new cache, and so are `config` and `**settings`.
            path: the file.
            config: see `store`; `kv_bits` is that of the file.
            **settings: see `store`.

        Raises:
            StoreError: the file is no session of this model, or not what was saved.
        """
        cache = cls(model, store, config, **settings)
        load_cache(cache, cache.state, path)
        return cache

    def reset(self) -> None:
        """Forget all tokens, and expect no prompt."""
        self._forwards.stop()
        super().reset()
        self.state.forget()

    @property
    def is_compileable(self) -> bool:
        """True while decoding grouped heads on a CPU, where `generate` compiles nothing.

        transformers makes a mask for one token at a time only for such a cache. Without a mask the stock sdpa function
        leaves grouped heads to torch's `enable_gqa`, which on a CPU takes 1.6 times as long over 16,000 keys
        (benchmarks/LOG.md).
        """
        if self.model.device.type != "cpu" or self.state.pending.prompts or not self.state.kv.length:
            return False
        config = self.state.info.config
        is_sdpa = getattr(config, "_attn_implementation", None) == "sdpa"
        if not is_sdpa or getattr(config, "attention_chunk_size", None) is not None:
            return False  # generate fails with masks of flex, and in transformers 5.17 with those of chunks
        heads = getattr(config, "num_attention_heads", None)
        return heads != getattr(config, "num_key_value_heads", heads)

    @property
    def is_linear(self) -> list[bool]:
        """For each layer whether it keeps a state and no K and V; models choose by this which mask to make."""
        return [getattr(layer, "has_only_state", False) for layer in self.layers]

    @property
    def batch_size(self) -> int:
        """How many requests the cache holds; -1 while it is empty."""
        return super().batch_size or -1

    @property
    def is_prompt(self) -> bool:
        """Whether the forward that runs, or ran last, brings a prompt, and not the tokens of a decoding step."""
        return self._forwards.is_prompt

    def __bool__(self) -> bool:
        """Whether there is anything in the cache; some models drop a cache that is true too early."""
        return super().get_seq_length() > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlendCache":
        """A cache with a copy of K and V, for the same model and store, that expects the same prompts."""
        self._forwards.settle()
        twin = BlendCache(self.model, self.store, self.config)
        twin.state.kv = copy.deepcopy(self.state.kv, memo)
        twin.layers = twin.state.kv.all
        for name in ("report", "tokens", "regimes"):
            setattr(twin.state, name, copy.deepcopy(getattr(self.state, name), memo))
        flags = ("inexact_from", "is_recording", "is_inference")
        for name in ("pending", "author", *flags, "chunk_prefix_ids", "question_ids"):
            setattr(twin.state, name, getattr(self.state, name))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a cache belongs to a model object and an open store, and `copy.copy` would share its K and V."""
        raise ConfigError(
            f"a BlendCache of {super().get_seq_length()} tokens was to be pickled, or copied by copy.copy, but it "
            "belongs to a model object and an open store, and a copy would share its K and V. Use "
            "copy.deepcopy(cache). In another process make one, BlendCache(model, ChunkStore.open(path)): the chunks "
            "are in the store. To keep a conversation use cache.save(path) and BlendCache.load(model, store, path)."
        )

    def _keep_shared_tokens(self, prompts: Sequence[Prompt]) -> tuple[int, str, Edit]:
        """Crop the cache to the tokens that it and a prompt begin with.

        Returns how many these are, a notice if another author had computed them, and what is moved of the others.
        """
        state = self.state
        cached = state.kv.length
        if not cached:
            return 0, "", NO_EDIT

        # Drop what another model has computed
        is_other = state.author not in (None, author_of(self.model))
        if is_other:
            self.reset()

        # Count the tokens that the cache and a single prompt begin with
        shared = 0
        has_images = any(not state.info.placeholders.isdisjoint(prompt.ids) for prompt in prompts)
        is_single = len(prompts) == state.kv.batch_size == 1 and not state.tokens.is_padded()
        is_other_way = state.tokens.is_extended and not is_extended(self.model)
        is_kept = is_single and not has_images and not is_other_way and not state.info.ignores_states
        if is_kept and state.has_one_regime(len(prompts[0].ids)):
            shared = shared_tokens(prompts[0].ids[:-1], *state.tokens.rows())

        # Keep them, and copy what is moved of those behind them
        edit = NO_EDIT if has_images else edit_of(state, prompts, shared)
        held = state.kv.length
        if shared < held:
            try:
                self.crop(shared - held)
            except ConfigError:  # a window or a state cannot be cropped so far
                shared = 0
        if not shared:
            self.reset()
        if has_images:
            return shared, IMAGES_AGAIN, edit
        return shared, other_author(cached, cached - shared) if is_other else "", edit


def _for_each(documents: Sequence[Any] | None, count: int) -> Sequence[Any]:
    """The documents of each prompt of a batch."""
    if documents is None or not len(documents):
        return [()] * count
    if len(documents) != count or any(map(is_document, documents)):
        raise PromptError(
            f"a batch of {count} prompts came with {len(documents)} documents, expected a list of documents for each "
            "prompt. Write [[…], […]]."
        )
    return documents
