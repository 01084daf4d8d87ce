# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`BlendCache`: a cache for stock `generate` that brings stored chunks with it.

    store = ChunkStore.open("kv-store")
    cache = BlendCache(model, store, recompute_ratio=0.15)
    inputs = cache.inputs(tokenizer, prefix=system, chunks=documents, question=question)
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=64)
    print(cache.report)

One object carries a request. It knows a prompt either from `inputs` or from the ids that `generate` passes to the
model, enters the model's layers for the one forward that is the prefill, and behaves as any dynamic cache afterwards.
"""

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache
from transformers.tokenization_utils_base import BatchEncoding

from .. import plugins
from ..config import BlendConfig
from ..errors import ConfigError, HfBlendError, PromptError
from ..model.anatomy import EXTENDED, decoder_layers, default_sink, refuse_extended, text_config
from ..model.author import Author, author_of, refuse_other_author
from ..model.calibrate import ensure_trusted, ignores_states
from ..model.extras import extras_of
from ..model.fingerprint import structure_digest
from ..model.flops import layer_costs
from ..model.hooks import ForwardHooks, asking_generate, is_assisting
from ..model.identity.canonical import refuse_request_state, refuse_wrapper
from ..model.modality import placeholders_of, refuse_placeholders
from ..model.own_cache import fitted
from ..model.placement import input_device
from ..model.quantised import silence_casts
from ..prefill.blend import Prefill
from ..prefill.context import PrefillContext
from ..prefill.notices import OTHER_IDS, UNEVEN, other_tokenizers, too_small, why_nothing_found
from ..prefill.observing import AttentionObserver, run_probe
from ..prefill.plan import ChunkOrigin, Plan, Planner
from ..prefill.realign import Realigner
from ..prefill.report import Advice, BlendReport
from ..prefill.request import PendingPrompt, Request
from ..prompt.documents import is_document
from ..prompt.messages import build_messages
from ..prompt.pieces import (
    SEPARATOR,
    History,
    Prompt,
    TextPrompt,
    batch,
    build_all,
    check_lengths,
    tokenizer_digest,
)
from ..prompt.text import build_text
from ..recipes import Recipe
from ..selectors.base import Hear
from ..store import ChunkStore
from .cache_layers import cache_layers
from .healing import Frontier, heal
from .layers import as_indices
from .static_copy import static_copy
from .turns import ASK_AGAIN, SetAside, begin_turn, ids_behind, ids_to_heal, keep_beginning, keep_history

logger = logging.getLogger(__name__)
NOT_A_CHAT = (
    "the tokenizer has a chat template, but inputs() joins plain texts, to which a chat model may answer nothing. "
    "BlendCache.inputs_from_messages(tokenizer, messages, documents) writes the prompt that the model was trained on."
)


@cache
def _warn_once(reason: str, what: str = "no stored chunk is reused: ") -> None:
    logger.warning("%s%s", what, reason)


@dataclass
class KnownPrompts:
    """What a cache knows of the prompts that it holds or expects."""

    pending: PendingPrompt = field(default_factory=PendingPrompt)
    history: History = field(default_factory=History)
    beginnings: tuple[tuple[int, ...], ...] = ()  # ids that each row begins with, held or expected, where known
    tokenizer: str = ""  # digest of the one that made the prompt
    images: Any = None  # of the prompt that is expected, by their names; see `hf_blend.images`
    notice: str = ""  # for the report of the prompt that is expected


@dataclass
class BeforeBlending:
    """What is needed to undo a blended prefill after a failure."""

    snapshots: list[Any]
    pending: PendingPrompt
    report: BlendReport


def trial_cache(model: nn.Module, **settings: Any) -> "BlendCache":
    """A cache for a self-test of a model, with an empty store."""
    return BlendCache(model, ChunkStore.open("memory://"), **settings)


class BlendCache(Cache):
    """A `transformers.Cache` that brings stored KV into the prefill and has the model recompute a share of it.

    Works with greedy search, sampling, beam search, assisted decoding and streaming, because `generate` sees a dynamic
    cache: empty before the prefill, full after it. `report` says what the last prefill cost.

    `model(**inputs, past_key_values=cache, logits_to_keep=1)` is the same prefill without `generate`, and gives the
    logits of the last token; a larger number gives those of so many last tokens. Where outputs of every token are
    asked for (no `logits_to_keep`, a tensor of places, `labels`, hidden states, attentions) all tokens are computed,
    as without this cache: nothing is reused then, and `report.fallback_reason` and one warning say why.

    With `kv_device_map`, `kv_memory` says which layers' K and V are where, how many bytes were on the device at most,
    and how many are on disk; what is on disk is deleted with the cache.

    A cache serves the model object that it was made for, also inside a wrapper that calls the same layers, and refuses
    every other, copies included; a copy that `torch.compile` has compiled is not noticed. K and V belong to the model
    as it was when it computed them. Where a turn begins under another adapter, other weights, another dtype or
    attention, prompts of `inputs` and its like are computed again, and `report.notice` says so; others are refused.
    What was held is set aside, so that two adapters may alternate, and only new tokens are computed; that takes memory
    for both, which `reset` frees. Steps of one token are not looked at, but in the first of a `generate`.
    """

    def __new__(cls, model: nn.Module, *_: Any, **__: Any) -> "BlendCache":
        """A cache of a class that the model takes."""
        made: BlendCache = super().__new__(fitted(cls, model))
        return made

    def __init__(
        self, model: nn.Module, store: ChunkStore, config: BlendConfig | None = None, **settings: Any
    ) -> None:
        """Prepare a request. The model is not touched before its next forward with this cache.

        Args:
            model: a causal language model of transformers.
            store: where chunks are kept.
            config: the settings; where left out what `hf-blend tune` or `calibrate` kept in the store for this model,
                or else what was measured for its family, or the defaults.
            **settings: fields of `BlendConfig` that differ from `config`, such as `recompute_ratio=0.15`.

        Raises:
            ConfigError: a setting is refused.
            UnsupportedModelError: the model cannot be blended exactly; `allow_unverified=True` uses it all the same.
            PromptError: `chunk_prefix_ids` holds a token that stands for an image.
            OffloadError: `offload_folder` cannot be written to.
        """
        refuse_wrapper(model)
        is_given = config is not None or "selector" in settings
        recipe = Recipe({}, "given by the caller") if is_given else store.recipe(model)
        self._recipe = recipe.source
        config = config or recipe.config(is_blind=store.loads_in_part)
        self.config = BlendConfig.from_dict({**config.to_dict(), **settings})
        began_s = time.perf_counter()
        layers, digest = decoder_layers(model), structure_digest(model)
        self.config.ratios(len(layers))
        self._selector = plugins.load("selectors", self.config.selector)(
            self.config.selector_options, seed=self.config.seed
        )
        self._corrector = plugins.load("correctors", self.config.corrector)(self.config.corrector_options)
        self.model, self.store, self._decoder_layers, self._text_config = model, store, layers, text_config(model)
        self.chunk_prefix_ids = (
            default_sink(model) if self.config.chunk_prefix_ids is None else self.config.chunk_prefix_ids
        )
        self._placeholders = placeholders_of(model, digest)
        refuse_placeholders(model, self.chunk_prefix_ids, "chunk_prefix_ids", self._placeholders)
        self.report = BlendReport(self.config.recompute_ratio)
        silence_casts(model, self, digest)
        self._styles = ensure_trusted(model, trial_cache, self.config.allow_unverified, digest)
        self._extras, self._ignores_states = extras_of(model, len(layers), digest), ignores_states(model, digest)
        self._check_ms = 1e3 * (time.perf_counter() - began_s)  # until a report says it
        self._hooks = ForwardHooks(self, model, layers)
        self.observer: AttentionObserver | None = None  # is given every layer's attention in a blended forward
        self._prompts = KnownPrompts()
        self.prefill: Prefill | None = None  # of the forward that runs, if it is blended
        self._before: Any = None  # a `BeforeBlending` where one is
        self._advised: tuple[Advice, float] | None = None  # by the store's controller, and when the forward began
        self._is_seen = False  # the hook on the model was called for this forward
        self._layer = len(self._styles)  # the last one that was updated
        self._masked_before = 0  # tokens for which transformers made a mask before it called the model
        self.author: Author | None = None  # of the cached tokens; None while unknown
        self.aside: SetAside | None = None
        self.is_new_turn = False  # `generate` has begun, and its first forward has not come
        self._part: Any = None  # loads chunks in part, where the store does
        super().__init__(layers=[])
        self.hold(*self.empty_layers(digest))

    def empty_layers(self, digest: str = "") -> tuple[list[Any], Any]:
        """Layers that hold nothing; and where their K and V are, if not all on their devices (`kv_device_map`)."""
        layers = cache_layers(self.model, len(self._styles), self.config, digest)
        if self.config.kv_device_map is None:
            return layers, None
        return layers, plugins.room("offload.layer").offload(layers, self.config)

    def hold(self, layers: list[Any], kv_memory: Any, frontier: Frontier | None = None) -> None:
        """Hold K and V in these layers, which are exact up to a frontier; None: all of them are."""
        self._own_layers, self.kv_memory, self.frontier = layers, kv_memory, frontier or Frontier()
        self._token_layers = [layer for layer in layers if hasattr(layer, "prefill_kind")]  # keep tokens
        self.layers = [*layers]

    def inputs(
        self,
        tokenizer: Any,
        *,
        prefix: Any = None,
        chunks: Sequence[Any],
        question: Any,
        history: Tensor | Sequence[int] | None = None,
        separator: str = SEPARATOR,
    ) -> BatchEncoding:
        """Build the prompt of the next `generate` from its pieces. Chunks that the store lacks are computed then.

        The ids are joined, never the texts. For a tokenizer with a chat template `inputs_from_messages` is meant: the
        model was trained on such prompts, and one warning says so. The model is watched from here until it is called
        with this cache, so that a direct call is seen too.

        Args:
            tokenizer: the model's tokenizer.
            prefix: system prompt; BOS is put before it if the tokenizer puts one before a text. None is BOS alone, or
                nothing; token ids are taken as they are.
            chunks: retrieved documents or token ids, at least one. A document is a text, or a dict or an object that
                has one as `text`, `content` or `page_content`, such as those of LangChain, LlamaIndex and Haystack.
                For a batch: one such list per request.
            question: what the model is asked. For a batch: a list of questions, one per request.
            history: to go on with a conversation in this cache, what the last `generate` returned,
                `[batch, tokens]`. Its K and V stay, the new pieces come behind it; no BOS, and there may be no chunk.
            separator: stands between two texts where neither has white space: prefix, chunks and question. It is
                computed in each request and is no part of a stored chunk. Beside token ids there is none.

        Returns:
            `input_ids` and `attention_mask`, `[batch, tokens]`, padded on the left, on the model's device; the whole
            conversation with `history`, as `generate` wants it.

        Raises:
            PromptError: a piece is empty, the pieces of a batch differ in number, or a prompt does not fit the model.
        """
        pad_id = getattr(tokenizer, "pad_token_id", None)
        conversation = self._prompts.history.extended(history, pad_id, self.model.generation_config.eos_token_id)
        prompts = build_all(tokenizer, prefix, chunks, question, conversation.rows(), separator)
        question_text = question if isinstance(question, str) else next(iter(question), None)
        if isinstance(question_text, str) and not conversation and getattr(tokenizer, "chat_template", None):
            _warn_once(NOT_A_CHAT, "")
        cached, notice = super().get_seq_length(), ""
        if cached or self.aside is not None:
            self._check_fit(prompts, 0 if conversation else cached)
            notice = keep_history(self, conversation)
        return self._await_prompts(tokenizer, prompts, 0 if conversation else cached, conversation, notice)

    def inputs_from_messages(
        self,
        tokenizer: Any,
        messages: Sequence[Any],
        documents: Sequence[Any] | None = None,
        **template: Any,
    ) -> BatchEncoding:
        """Build the prompt of the next `generate` from messages, by the tokenizer's own chat template.

        The template is rendered once and tokenised once: the ids are those of `apply_chat_template`. Documents are
        found in its text and stored under ids of their own, so that they are reused in any message, order and company;
        the few tokens that differ where they are joined are computed (`report.seam_tokens`). Stored chunks that are
        not named, such as those of earlier turns, are found too.

        A cache that holds an earlier prompt keeps what both begin with: a chat passes all of its messages each time.

        Args:
            tokenizer: the model's tokenizer, with a chat template.
            messages: as for `apply_chat_template`: dicts with a role and a content, of one conversation. For a batch:
                a list of conversations.
            documents: documents whose text is in the messages; dicts and objects are passed to the template, too, for
                one that takes documents. Accents may be encoded otherwise there: the prompt stays as it is. None: only
                what is stored is reused. For a batch: a list for each conversation.
            **template: further arguments of `apply_chat_template`: `tools`, `enable_thinking`, `chat_template`,
                `continue_final_message`; `add_generation_prompt` is True where it is left out.

        Returns:
            `input_ids` and `attention_mask`, `[batch, tokens]`, padded on the left, on the model's device.

        Raises:
            PromptError: the tokenizer has no chat template or is another model's, the template refuses the messages,
                a document is empty or not in the prompt, or the prompt does not fit the model.
        """
        if len(messages) and isinstance(messages[0], list | tuple):
            named = _for_each(documents, len(messages))
            pairs = zip(messages, named, strict=True)
            return self._expect_texts(tokenizer, [build_messages(tokenizer, *pair, template) for pair in pairs])
        return self._expect_texts(tokenizer, [build_messages(tokenizer, messages, documents, template)])

    def inputs_from_text(
        self,
        tokenizer: Any,
        text: str | Sequence[str],
        chunks: Sequence[Any] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> BatchEncoding:
        """Build the prompt of the next `generate` from text as it is, with stored chunks wherever they are in it.

        The ids are those of `tokenizer(text)`: the text is tokenised as a whole. A tokenizer makes other tokens where
        texts are joined; these few are computed, and what is inside a chunk is reused (`report.seam_tokens`).

        Args:
            tokenizer: the model's tokenizer.
            text: the prompt, or a list of prompts for a batch.
            chunks: documents whose text is in the prompt; those that are not stored are computed and stored. None:
                only what is stored is reused. For a batch: a list for each prompt.
            add_special_tokens: as for the tokenizer; False for text that a chat template made.

        Returns:
            `input_ids` and `attention_mask`, `[batch, tokens]`, padded on the left, on the model's device.

        Raises:
            PromptError: the text is empty or would begin with two BOS, a chunk is empty or not in the text, the
                tokenizer is another model's, or the prompt does not fit the model.
        """
        texts = [text] if isinstance(text, str) else list(text)
        named = [chunks] if isinstance(text, str) else _for_each(chunks, len(texts))
        build = partial(build_text, tokenizer, special=add_special_tokens)
        return self._expect_texts(tokenizer, [build(*pair) for pair in zip(texts, named, strict=True)])

    def inputs_with_images(self, **inputs: Any) -> dict[str, Any]:
        """Make chunks of a prompt's images: each is stored once, by what is in it, and reused at any place.

        The vision tower runs for images whose features are not stored, each alone; at the first prompt of its kind
        once more for all of them, to see that this gives the same. Text chunks that `inputs` and its like have named
        are reused beside the images, as are others that are stored.

        Args:
            **inputs: what the model's processor made, or `inputs` with the processor's arguments for the images:
                `input_ids` and `attention_mask` `[batch, tokens]`, padded on the left; `pixel_values` and what comes
                with them.

        Returns:
            The arguments of the next `generate`, encoded images in the place of pixels. Without an image the same.

        Raises:
            UnsupportedModelError: the model cannot take images that were encoded ahead, or one by one.
            PromptError: the images do not fit the prompt, came with a video, or behind a prompt that is in the cache
                without `inputs(history=…)`.
        """
        arguments: dict[str, Any] = plugins.room("images.prompts").expect_images(self, inputs)
        return arguments

    def _expect_texts(self, tokenizer: Any, prompts: Sequence[TextPrompt]) -> BatchEncoding:
        """Expect prompts that begin at position 0; what the cache holds of the same beginning stays."""
        self._check_fit(prompts, 0)
        kept, notice = keep_beginning(self, prompts)
        if not kept:
            return self._await_prompts(tokenizer, prompts, notice=notice)
        ids = torch.tensor([prompts[0].ids[:kept]])
        history = History(ids, torch.ones_like(ids))
        return self._await_prompts(tokenizer, [prompts[0].behind(kept)], history=history, notice=notice)

    def _check_fit(self, prompts: Sequence[Prompt | TextPrompt], cached: int) -> None:
        """Refuse prompts that do not fit the model, or the buffers, behind so many tokens."""
        check_lengths(prompts, cached, self._text_config)
        self._refuse_tokens(cached + max(len(prompt.ids) for prompt in prompts), 0)

    def _await_prompts(
        self,
        tokenizer: Any,
        prompts: Sequence[Prompt | TextPrompt],
        cached: int = 0,
        history: History | None = None,
        notice: str = "",
    ) -> BatchEncoding:
        """Put prompts side by side and wait for them."""
        self._check_fit(prompts, cached)
        if self.config.chunk_prefix_ids is None:
            self.chunk_prefix_ids = self.store.default_prefix(self.model, tokenizer)
        pad_id = getattr(tokenizer, "pad_token_id", None)
        made = batch(prompts, 0 if pad_id is None else pad_id, history)
        self._prompts = KnownPrompts(
            PendingPrompt(made, cached),
            History(made.input_ids, made.attention_mask),
            () if cached else tuple(tuple(prompt.ids) for prompt in prompts),
            tokenizer_digest(tokenizer),
            notice=notice,
        )
        self._hooks.watch_model()
        device = input_device(self.model)
        return BatchEncoding(
            {"input_ids": made.input_ids.to(device), "attention_mask": made.attention_mask.to(device)}
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new K and V and give back all of its K and V; refuse those of another model object.

        Shapes: both `[batch, kv_heads, rows, head_dim]`, K rotated for the rows' positions → `[batch, kv_heads,
        tokens, head_dim]`.
        """
        if self.prefill is not None:
            return self.prefill.update(layer_idx, key_states, value_states)
        if not torch.compiler.is_compiling():
            is_first, self._layer = layer_idx <= self._layer, layer_idx
            if is_first:
                self._check_forward(key_states)
        if getattr(self._own_layers[layer_idx], "visible", None) is not None:
            self._part = self._part or self.store.loader(self)
            if self._part is not None:
                self._part.begin_layer(layer_idx)
                keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
                return self._part.taken(layer_idx, keys), values
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Take a layer's new indexer keys, rotated for their positions, and give back those of all tokens.

        Shapes: `[batch, rows, width]` → `[batch, tokens, width]`.
        """
        if self.prefill is not None:
            return self.prefill.update_indexer(layer_idx, indexer_key_states)
        return super().update_indexer(indexer_key_states, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens a layer holds. `generate` asks just before the prefill: the model is watched from here."""
        if torch.compiler.is_compiling():
            return super().get_seq_length(layer_idx)
        if self.prefill is not None:
            return self.prefill.past
        length = super().get_seq_length(layer_idx)
        if length == 0 or self.is_expecting:
            self._hooks.watch_model()
        if length and (call := asking_generate()) is not None:
            begin_turn(self, call, length)
        return length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that new tokens will see. Models ask this before their first layer."""
        if self.prefill is not None and isinstance(self._own_layers[layer_idx], CacheLayerMixin):
            return self._own_layers[layer_idx].sizes_behind(self.prefill.context.request.past, query_length)
        if not torch.compiler.is_compiling():
            self._masked_before = 0 if self._is_seen else query_length
        return super().get_mask_sizes(query_length, layer_idx)

    def activate_past_recording(self) -> None:
        """Called first by assisted decoding: from now on windows wait for `crop` before they forget."""
        super().activate_past_recording()
        self._hooks.watch_model()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, in every layer or in none: a negative number; more than the cache holds empties it.

        Refuses, by a ConfigError, what a window or a state that has forgotten what stood before cannot do.
        """
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        for layer in self._token_layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        self.frontier.crop(super().get_seq_length())

    def heal(self, tokens: int | None = None, history: Tensor | Sequence[int] | None = None) -> int:
        """Compute blended K and V again behind the exact ones, from left to right, as a full prefill computes them.

        Call it while nobody waits: between two turns, or when a server is idle. Each token costs what it costs in a
        prefill in blocks of 256. Between two calls the cache is whole: it decodes, is cropped and takes turns, exact
        on the left and blended on the right. A call that fails leaves its block as it was. When nothing is left,
        later tokens and turns are those of a full prefill. `report.healed_tokens` counts.

        Args:
            tokens: how many more are to be exact; None for all, 0 only counts. In 8 and 4 bits whole groups of 32 are.
            history: what the last `generate` returned, `[batch, tokens]`. Without it the prompt alone can be healed:
                nobody has told the cache which tokens the answer has.

        Returns:
            How many of the cached tokens are not exact. 0: all are.

        Raises:
            ConfigError: padding is between the tokens, a layer is on another device or loaded in part, or another
                model or adapter computed what the cache holds.
            PromptError: `history` is not what the cache holds, or has a token that stands for an image.
        """
        length = super().get_seq_length()
        if tokens == 0 or not self.frontier.left(length):
            return self.frontier.left(length)
        refuse_other_author(self.author, author_of(self.model), length, ASK_AGAIN)
        refuse_request_state(self.model, self._decoder_layers)
        self._refuse_tokens(2, length)  # a block continues the states of tokens before it
        ids = ids_to_heal(self, history, length)
        self.report.healed_tokens += heal(self, ids, tokens)
        return self.frontier.left(length)

    def to_static(self, max_cache_len: int) -> StaticCache:
        """Copy what the cache holds into transformers' `StaticCache`, with which a decoding step is compiled once.

        Two calls make an answer: `first = generate(**inputs, past_key_values=cache, max_new_tokens=1)` blends the
        prompt, and `generate(first, past_key_values=cache.to_static(4096), …)` continues with compiled steps. For a
        padded batch pass its `attention_mask` and a column of ones. This cache stays as it is.

        Args:
            max_cache_len: how many tokens there is to be room for, the prompt and all new ones but the last.

        Returns:
            A stock cache of the same tokens, in the model's dtype also where this one holds few bits.

        Raises:
            ConfigError: the cache is empty or has a part of its prompt only, another model or adapter computed what it
                holds, `max_cache_len` is not above that, or a layer keeps what `StaticCache` cannot continue: an
                indexer, attention in chunks.
        """
        refuse_other_author(self.author, author_of(self.model), super().get_seq_length(), ASK_AGAIN)
        return static_copy(self.model, self._own_layers, max_cache_len)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only some requests; `indices` is `[kept]`, or a boolean for each."""
        super().batch_select_indices(as_indices(indices))

    def reset(self) -> None:
        """Forget all tokens, and watch the model no more until `generate` or `inputs` is called."""
        self.forget()
        self.author = self.aside = None

    def forget(self) -> None:
        """Forget the cached tokens."""
        if self.prefill is not None:
            self.forward_ends(failed=True)  # it was interrupted
        super().reset()
        self.frontier = Frontier()
        self._hooks.leave()

    @property
    def is_compileable(self) -> bool:
        """True while decoding grouped heads on a CPU, where `generate` compiles nothing.

        transformers makes a mask for one token at a time only for such a cache. Without a mask the stock sdpa function
        leaves grouped heads to torch's `enable_gqa`, which on a CPU takes 1.6 times as long over 16,000 keys
        (benchmarks/LOG.md).
        """
        if self.model.device.type != "cpu" or self.is_expecting or not super().get_seq_length():
            return False
        config = self._text_config
        if getattr(config, "attention_chunk_size", None) is not None:
            return False  # transformers 5.17 fails to make masks of chunks
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
    def is_expecting(self) -> bool:
        """Whether the next forward is known to bring stored chunks."""
        return self._prompts.pending.batch is not None

    def __bool__(self) -> bool:
        """Whether there is anything in the cache; some models drop a cache that is true too early."""
        return super().get_seq_length() > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlendCache":
        """A cache with its own K and V, for the same model and store, that continues and expects the same prompts."""
        twin = BlendCache(self.model, self.store, self.config)
        frontier = Frontier(self.frontier.column, self.frontier.is_padded)
        twin.hold(copy.deepcopy(self._own_layers, memo), copy.deepcopy(self.kv_memory, memo), frontier)
        twin.author = self.author
        twin.report = copy.deepcopy(self.report, memo)
        twin._prompts = replace(self._prompts, images=None)
        return twin

    def __copy__(self) -> "BlendCache":
        """Refused: what one of the two adds would show in the other."""
        raise ConfigError(
            f"copy.copy was asked of a BlendCache of {super().get_seq_length()} tokens, but the copy would share its "
            "K and V, and grow with it. Use copy.deepcopy(cache)."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a cache belongs to a model object and an open store."""
        raise ConfigError(
            f"a BlendCache of {super().get_seq_length()} tokens was to be pickled, but it belongs to a model object "
            "and an open store. Make one where it is needed, BlendCache(model, ChunkStore.open(path)): the chunks are "
            "in the store. To keep a conversation use SequenceCache and save_session of hf_blend.context; in this "
            "process use copy.deepcopy(cache)."
        )

    def forward_begins(self, arguments: dict[str, Any]) -> None:
        """Called by the hook on the model, with the arguments of its forward."""
        began_s, past, prompts = time.perf_counter(), super().get_seq_length(), self._prompts
        self._is_seen = True
        request = Request.parse(arguments, self._text_config, past, prompts.pending, self._masked_before)
        self._masked_before = 0
        self._refuse_tokens(request.width, past)
        rooms = plugins.extensions("extra_inputs") if request.others else []
        if request.others and not rooms:
            names = ", ".join(request.others)
            reason = f"{names} came with the prompt, but only text is known without hf_blend.images."
            request = replace(request, rows=[], fallback_reason=reason)
        if not request.rows:
            self._fall_back(request)
            return
        self._advised = None
        if request.others and prompts.images is not None:
            request = prompts.images.name(request)
        before = prompts.pending, self.report
        plan = self._plan(request) if all(room.can_blend(self, request) for room in rooms) else None
        if prompts.pending.is_other or plan is None:
            prompts.beginnings = ids_behind(prompts.beginnings, request)
        if plan is None:
            self._claim(request.past)
        if plan is None or not plan.chunks:
            prompts.pending = prompts.pending if plan is not None else PendingPrompt()
            self._hooks.leave(watching=prompts.pending.is_begun)
            return
        for room in rooms:  # these know what is no text
            room.ensure_tested(self, plan, request)
        self._enter(plan, request, *before)
        self._advised = None if plan.advice is None or plan.computed else (plan.advice, began_s)

    def forward_ends(self, failed: bool = False) -> None:
        """Called by the hook behind the model; after a failure the cache is as it was before."""
        before, prompts = self._before, self._prompts
        if failed:
            self._advised = None
        if self.prefill is not None:
            self.prefill.end()
            if self._part is not None:
                self.report.partial = vars(self._part.report)
            if failed:
                for layer, snapshot in zip(self._token_layers, before.snapshots, strict=True):
                    layer.restore(snapshot)
                prompts.pending, self.report = before.pending, before.report
                self.frontier.crop(super().get_seq_length())
        self.prefill, self._before, self._is_seen = None, None, False
        prompts.images = prompts.images if prompts.pending.batch else None
        self._hooks.leave(watching=prompts.pending.is_begun and not failed)

    def _check_forward(self, keys: Tensor) -> None:
        """At the first layer of a forward that is not blended: is it of this model, and was its beginning seen?"""
        try:
            is_own = self._is_seen or self._hooks.check_caller()
            if is_own and not self._is_seen:
                past = super().get_seq_length()
                self._refuse_tokens(keys.shape[2], past)
                self._fall_back(Request.unseen(keys, past))
        except HfBlendError:
            self._hooks.leave(watching=self.is_expecting)
            raise
        if self._advised is not None:  # the next step: a device has answered by now
            self.store.controller.observe(self._advised[0], time.perf_counter() - self._advised[1])
            self._advised = None
        if is_own:
            self._is_seen = False
            self._hooks.leave(watching=self._prompts.pending.is_begun)  # the model has asked for the length once more

    def _refuse_tokens(self, width: int, past: int) -> None:
        """Refuse tokens that the model would compute as if the cache were empty."""
        if self._ignores_states and width > 1 and past:
            raise ConfigError(
                f"{width} tokens came behind the {past} that the cache holds, but the code of "
                f"{self._text_config.model_type} models takes the states of tokens before into account only "
                "where one token comes at a time. reset() the cache and pass the whole conversation in one prompt, "
                "without prefill_chunk_size."
            )

    def _fall_back(self, request: Request) -> None:
        """Compute every token of this forward, and report why if chunks might have been reused."""
        prompts, reason = self._prompts, request.fallback_reason
        is_begun, is_told = prompts.pending.is_begun, bool(reason and (prompts.pending.batch or not request.past))
        if self.is_new_turn or not request.past or (request.width > 1 and not is_assisting()):
            self._claim(request.past)
        if request.width > 1 or not request.past:
            prompts.beginnings = ids_behind(prompts.beginnings, request)
        if is_told and not is_begun:
            notice = prompts.notice if prompts.pending.batch else ""
            self.report = BlendReport(self.config.recompute_ratio, past_tokens=request.past, notice=notice)
        if is_told:
            self.report.fallback_reason = reason
            _warn_once(reason)
        if is_told or is_begun:
            self.report.prompt_tokens += request.real_tokens()
        prompts.pending = PendingPrompt()
        self._hooks.leave()

    def _enter(self, plan: Plan, request: Request, pending: PendingPrompt, report: BlendReport) -> None:
        """Take over the layers for one forward, by a plan with stored chunks."""
        layers = self._token_layers
        if any(getattr(layer, "visible", None) is not None for layer in layers):
            raise ConfigError(
                f"a prompt came behind {request.past} tokens of which some layers loaded a part only, but it would "
                "attend to all of them. reset() the cache and pass the whole conversation, or open the store without "
                "partial."
            )
        realigner = Realigner(self._styles, self.report, plan.chunks)
        self._part = self.store.loader(self)
        if self._part is not None:
            self._part.realigner = realigner
        context = PrefillContext(
            self.model,
            self._own_layers,
            request,
            plan,
            self.report,
            realigner,
            self._selector,
            self._corrector,
            self._probe,
            self._extras,
            self.observer,
            self._part,
        )
        self._before = BeforeBlending([layer.snapshot() for layer in layers], pending, report)
        blended = [placed.start for placed in plan.chunks if not placed.exact]
        if blended:
            is_padded = plan.has_padding or any(before != request.past for before in request.before)
            self.frontier.blend(request.past + min(blended), is_padded)
        self.prefill = Prefill(context)
        self._hooks.enter_layers(request.width, between=bool(request.others))

    def _plan(self, request: Request) -> Plan:
        """Plan which columns have stored KV; the report is new, or continues if a prompt comes in parts."""
        began_s, prompts = time.perf_counter(), self._prompts
        refuse_request_state(self.model, self._decoder_layers)
        if EXTENDED.get():  # some model is inside `self_extend`
            refuse_extended(self.model)
        identity = self._claim(request.past).fingerprint
        self._check_ms += 1e3 * (time.perf_counter() - began_s)
        expected = prompts.pending
        if not expected.batch:
            prompts.tokenizer = ""
            if prompts.images is None and self.config.chunk_prefix_ids is None:
                self.chunk_prefix_ids = self.store.stored_prefix(self.model, identity)
        if expected.is_begun:
            report = copy.copy(self.report)  # the old one comes back after a failure
        else:
            report = BlendReport(past_tokens=request.past, _costs=layer_costs(self.model))
        images = {} if prompts.images is None else prompts.images.alone
        origin = ChunkOrigin(tuple(self.chunk_prefix_ids), prompts.tokenizer, self._placeholders, images)
        planner = Planner(self.model, self.store, identity, origin, self.config, report)
        rows, pending = expected.rows(request)
        plan = planner.plan(rows, request.width, request.logits_rows, request.length)
        self.report, prompts.pending = report, pending
        prompts.beginnings = tuple(ids[: plan.in_order] for ids in prompts.beginnings)
        if not expected.is_begun:
            self.report.recipe = self._recipe
            self.report.nominal_ratio = plan.config.nominal_ratio(len(self._own_layers))
            self.report.encoded_images = 0 if prompts.images is None else prompts.images.encoded
        self.report.check_ms += self._check_ms
        self._check_ms = 0.0
        if plan.advice is not None:
            self.report.advice = asdict(plan.advice)
        notices = [OTHER_IDS] if expected.batch and prompts.pending.is_other else []
        if prompts.notice and expected.batch and not expected.is_begun:
            notices.append(prompts.notice)
        self._notice(plan, identity, notices)
        return plan

    def _claim(self, past: int) -> Author:
        """Note who computes K and V, and refuse to compute behind those of another author."""
        author, self.is_new_turn = author_of(self.model), False
        if past:
            refuse_other_author(self.author, author, past, ASK_AGAIN)
        self.author = author
        return author

    def _notice(self, plan: Plan, identity: str, notices: list[str]) -> None:
        """Warn, once of each kind, where the prompt does not fit the store or the expected prompt."""
        tokenizer = self._prompts.tokenizer
        if tokenizer and (others := plan.tokenizers - {tokenizer}):
            notices.append(other_tokenizers(others, tokenizer))
        if plan.kept_ratio < 1:
            notices.append(too_small(plan.kept_ratio))
        if plan.uneven_chunks:
            notices.append(UNEVEN)
        for notice in notices:
            self.report.notice = " ".join(filter(None, (self.report.notice, notice)))
            _warn_once(notice, "")
        is_complete, used = not self._prompts.pending.is_begun, self.report.reusable_tokens + self.report.exact_tokens
        if is_complete and not used and not self.report.past_tokens:
            reason = UNEVEN if plan.uneven_chunks else ""
            reason = reason or why_nothing_found(self.store, identity, tuple(self.chunk_prefix_ids), tokenizer)
            self.report.fallback_reason = reason
            if reason:
                _warn_once(reason)

    def _probe(
        self, hear: Hear, layers: Sequence[int], anchors: Tensor | None = None, rows: int | None = None
    ) -> None:
        """Run the question alone, in the middle of a forward."""
        prefill: Any = self.prefill
        request, own, snapshots = prefill.context.request, self._token_layers, self._before.snapshots
        suspended = [layer.suspend(snapshot, request.past) for layer, snapshot in zip(own, snapshots, strict=True)]
        self.prefill = probe = prefill.probe(AttentionObserver(hear, layers, anchors, rows), self._spare_layers)
        try:
            with self._hooks.inside():
                plan = probe.context.plan
                is_plain = len(plan.counts) == 1 and not plan.has_padding and not request.past
                run_probe(self.model, self, request, is_plain)
        finally:
            self.prefill = prefill
            prefill.take_over(probe)
            for layer, states in zip(own, suspended, strict=True):
                layer.resume(states)

    def _spare_layers(self) -> list[Any]:
        """Copies of the layers as they were before the forward."""
        spare: list[Any] = copy.deepcopy(self._own_layers)
        token_layers: list[Any] = [layer for layer in spare if hasattr(layer, "prefill_kind")]
        for layer, snapshot in zip(token_layers, self._before.snapshots, strict=True):
            layer.restore(copy.deepcopy(snapshot))
        return spare


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
