# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`StateCache`: prefixes and conversations of models whose states cannot be moved or cut (linear attention, SSMs).

    cache = StateCache(model)
    cache.prefill(prefix_ids)                           # documents that many prompts begin with
    save_session(cache, "prefix.session", tokenizer)    # of hf_blend.context.session; load_session takes it up
    answer_ids = cache.generate(prompt_ids, max_new_tokens=64)   # computes only what is behind them

The state of a layer depends on every token before it, so a prompt can be continued only where states were saved: at
the end of the cached tokens, at the end of a prefix, or where the last two prompts parted.

Each turn continues a copy of the stock cache, so that a turn that fails is forgotten. When the window is full, the
tokens that stay are prefilled again, which is exact. So are tokens behind the point where a prompt parts from the
cached ones; states are saved at that point. So where a chat template rewrites the last turn each time, each turn
computes at most two turns.
"""

import copy
import logging
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ..cache.cache_layers import cache_layers
from ..cache.quantised_layer import QuantisedLayer
from ..config import BlendConfig
from ..errors import ConfigError, PromptError
from ..model.anatomy import refuse_extended, stock_cache, text_config
from ..model.author import Author, author_of
from ..model.cache_keyword import cache_argument
from ..model.fingerprint import fingerprint
from ..model.modality import refuse_placeholders
from ..model.placement import input_device
from ..prompt.pieces import shared_tokens
from ..store.tiers.base import EntryFault
from .continuing import Parts, continuing
from .sequence_cache import check_window, dropped_tokens
from .tables import regime_tokens

logger = logging.getLogger(__name__)
END = 1 << 31  # of ids
_OWN = ("attention_mask", "cache", "input_ids", "inputs", "inputs_embeds", "past_key_values", "position_ids",
        "return_dict_in_generate")  # fmt: skip
_SEVERAL = ("num_beams", "num_return_sequences")
_NOTHING: tuple[Author | None, list[int], Any] = None, [], None


class StateCache:
    """Token ids and the stock cache of them, which later prompts with the same beginning continue.

    Works for any model whose cache is stock. A `Conversation` uses it where a `ShiftCache` cannot be used, and
    `save_session` saves both in the same kind of file. `shifts` counts how often tokens left a full window.
    """

    state_version = transformers.__version__  # states are saved in the form of this version

    def __init__(
        self,
        model: nn.Module,
        window_tokens: int | None = None,
        keep_tokens: int = 1,
        kv_bits: int | None = None,
    ) -> None:
        """Begin empty.

        Args:
            model: a causal language model of transformers.
            window_tokens: most tokens that are cached; None is as in `ShiftCache`.
            keep_tokens: how many first tokens stay when a prompt is cut to fit the window.
            kv_bits: 8 or 4 packs K and V of full attention layers so; a session file holds them unpacked.

        Raises:
            ConfigError: the window has no room behind the tokens that stay.
            UnsupportedModelError: the model's states cannot be continued.
        """
        self.model, self._way, self.kv_bits = model, continuing(model, fingerprint(model)), kv_bits
        longest = getattr(text_config(model), "max_position_embeddings", None)
        most = min(longest or END, regime_tokens(model) or END)  # behind them rotary frequencies are others
        self.window_tokens, self.keep_tokens, self.shifts = min(int(window_tokens or most), most), keep_tokens, 0
        check_window(self.window_tokens, keep_tokens)
        self._dtype = model.dtype
        self._ids: list[int] = []
        self._cache = self._packed(stock_cache(model))
        self._author: Author | None = None  # of what is held
        self._aside = _NOTHING  # author, ids and cache of when the model was another one
        self._saved: tuple[int, Parts] = (0, {})  # of how many of the first tokens, and the states behind them
        self._has_said = False  # that a prompt parted from what is held

    def tokens(self) -> list[int]:
        """The cached token ids."""
        return [*self._ids]

    def get_seq_length(self) -> int:
        """How many tokens are cached."""
        return len(self._ids)

    def prefill(self, token_ids: Sequence[int]) -> int:
        """Cache these tokens, and save the states behind them, which any prompt that begins so continues.

        Returns:
            how many tokens were computed; the others were cached.

        Raises:
            PromptError: they do not fit the window, are not the ids of one text, or one is of an image.
            ConfigError: the model is in training mode.
        """
        token_ids = self._checked(token_ids)
        self.recompute()
        ids = self._fitting(token_ids, len(token_ids), 0)
        cache, start, again = self._begun([*ids, 0], is_whole=True)
        self._way.advance(self.model, cache, torch.tensor(ids[start:], dtype=torch.long))
        self._cache, self._ids = cache, ids
        self._save_states(self._cache, len(self._ids))
        return again + len(ids) - start

    def generate(self, token_ids: Sequence[int], question_tokens: int | None = None, **options: Any) -> list[int]:
        """Answer a prompt as `generate` of transformers does, without computing the cached tokens again.

        Args:
            token_ids: of the whole prompt. If it does not fit the window with its answer, tokens between the first
                `keep_tokens` and the question are dropped, the earliest first.
            question_tokens: how many tokens at the end are the question; None: nothing is dropped.
            **options: of `generate`, for one answer as ids.

        Returns:
            the ids of the answer. The prompt and all of the answer but its last token are cached then.

        Raises:
            PromptError: as in `prefill`, of the question and its answer.
            ConfigError: as in `prefill`; or an option brings tokens, masks or a cache, or asks for several answers.
        """
        token_ids = self._checked(token_ids)
        self._refuse(options)
        self.recompute()
        new = options.get("max_new_tokens") or self.model.generation_config.max_new_tokens or 1
        question_tokens = len(token_ids) if question_tokens is None else question_tokens
        ids = self._fitting(token_ids, min(question_tokens, len(token_ids)), new)
        cache, cached, _ = self._begun(ids, is_whole=len(ids) == len(token_ids))
        size = options.get("prefill_chunk_size") or len(ids)
        if cached and (len(ids) - cached > size or not self._way.at_once):  # generate of 5.17 cannot continue in parts
            for piece in torch.tensor(ids[cached:-1]).split(size):
                self._way.advance(self.model, cache, piece)
            options["prefill_chunk_size"] = None
        prompt = torch.tensor([ids], device=input_device(self.model))
        inputs = {"attention_mask": torch.ones_like(prompt), **options}
        output: list[int] = self.model.generate(prompt, **cache_argument(self.model, cache), **inputs)[0].tolist()
        self.shifts += len(ids) < len(token_ids)
        self._cache, self._ids = cache, output[: cache.get_seq_length()]
        return output[len(ids) :]

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        """The ids of one text; others are refused, and so is a model in training mode."""
        try:
            ids = list(map(operator.index, token_ids))
        except (TypeError, ValueError, RuntimeError) as error:
            raise PromptError(f"{token_ids!r:.60} came, expected the token ids of one text. Pass a list.") from error
        if not ids:
            raise PromptError("the prompt has no token, but at least one is expected. Send some text.")
        refuse_placeholders(self.model, ids, "a prompt")
        if self.model.training:
            raise ConfigError(
                f"{type(self.model).__name__} is in training mode, in which dropout makes other states each time, but "
                "evaluation mode is expected. Call model.eval()."
            )
        return ids

    def _refuse(self, options: Mapping[str, Any]) -> None:
        """Refuse options with which the cache would not hold the states of the ids alone."""
        config = options.get("generation_config") or self.model.generation_config
        several = [name for name in _SEVERAL if (options.get(name, getattr(config, name, None)) or 1) > 1]
        if names := several + [name for name in _OWN if options.get(name) is not None]:
            raise ConfigError(
                f"{names[0]} came for a prompt of which the states are held, but one answer to its ids alone is "
                "expected. Leave it out."
            )

    def recompute(self) -> int:
        """See `SequenceCache.recompute`."""
        author = author_of(self.model)
        if self._author in (None, author):
            self._author = author
            return 0
        (of_author, cached, cache), self._aside = self._aside, _NOTHING
        if self.model.dtype != self._dtype:  # which the form of what is saved has
            self._way, self._dtype = continuing(self.model, author.fingerprint), self.model.dtype
        if of_author != author or self._ids[: len(cached)] != cached:
            cached, cache = [], self._packed(stock_cache(self.model))
        self._way.advance(self.model, cache, torch.tensor(self._ids[len(cached) :]))
        self._aside = self._author, self._ids, self._cache
        self._author, self._cache, self._saved = author, cache, (0, {})
        return len(self._ids) - len(cached)

    def computed_by(self, sequence: int | None = None) -> Author | None:
        """The author of the cached tokens; None where there are none."""
        return self._author if self._ids else None

    def refuse_extended(self) -> None:
        """Refuse to be saved if the model is inside `self_extend`."""
        refuse_extended(self.model)

    def state(self, sequence: int | None = None) -> dict[str, Tensor]:
        """The tensors of the stock cache, by name, and `ids`."""
        ids = torch.tensor(self._ids, dtype=torch.long)
        return {"ids": ids, **(self._way.form.take(self._cache, 0, len(ids)) if self._ids else {})}

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise EntryFault for tensors that `state` never gives."""
        ids, parts = state["ids"], {name: tensor for name, tensor in state.items() if name != "ids"}
        is_row = ids.dim() == 1 and ids.dtype == torch.int64
        if not (is_row and all(0 <= value < END for value in ids.tolist())):
            raise EntryFault("values", f"its ids are {tuple(ids.shape)} of {ids.dtype}, or no ids")
        if parts or len(ids):
            self._way.form.check(parts, 0, len(ids))

    def restore(self, state: dict[str, Tensor], author: Author | None = None, sequence: int | None = None) -> None:
        """See `SequenceCache.restore`; the cache has one sequence, whatever `sequence` is."""
        self._author = author or author_of(self.model)
        self._ids = state["ids"].tolist()
        filled = self._way.form.fill([state], len(self._ids)) if self._ids else stock_cache(self.model)
        self._cache = self._packed(filled)
        self._save_states(self._cache, len(self._ids))

    def _save_states(self, cache: Any, tokens: int) -> None:
        """Keep a copy of the states of a cache that holds so many tokens."""
        taken = self._way.form.take(cache, tokens, tokens) if tokens else {}
        self._saved = tokens, {name: tensor.clone() for name, tensor in taken.items()}

    def _fitting(self, ids: list[int], question: int, new: int) -> list[int]:
        """The ids that fit the window with an answer: all, or the kept ones and at most half of the others."""
        way_out = f"The answer is up to {new} of them: shorten the question, or pass a smaller max_new_tokens."
        earlier = len(ids) - question
        dropped = dropped_tokens(earlier, question + new, self.window_tokens, self.keep_tokens, way_out)
        return [*ids[: self.keep_tokens], *ids[self.keep_tokens + dropped :]]

    def _begun(self, ids: list[int], is_whole: bool) -> tuple[Any, int, int]:
        """A cache of the first tokens of a prompt that are cached, how many it has, and how many were computed again.

        They are computed again from the saved states on if these are not all cached tokens.
        """
        same = shared_tokens(ids[:-1], self._ids)
        if same == len(self._ids) and same:
            return copy.deepcopy(self._cache), same, 0
        cache, start = self._resumed(same)
        self._saved = self._saved if start else (0, {})
        if same > start:
            self._way.advance(self.model, cache, torch.tensor(ids[start:same]))
            self._save_states(cache, same)
        if is_whole and same > start and not self._has_said:
            self._has_said = True
            logger.warning(
                "earlier turns are written otherwise than they were computed, from token %s of %s on, and states "
                "cannot be cut: %s tokens are computed again. So it is with later turns, from where the last parted.",
                same, len(self._ids), same - start,
            )  # fmt: skip
        return cache, same, same - start

    def _resumed(self, most: int) -> tuple[Any, int]:
        """A cache of the tokens up to the saved states, and how many these are; an empty one if more than `most`."""
        tokens, states = self._saved
        if not 0 < tokens <= most:
            return self._packed(stock_cache(self.model)), 0
        prefix = self._way.form.take(self._cache, 0, tokens)
        states = {name: tensor.clone() for name, tensor in states.items()}
        return self._packed(self._way.form.fill([prefix, states], tokens)), tokens

    def _packed(self, cache: Any) -> Any:
        """The same cache, with K and V quantised if `kv_bits` is set."""
        config = BlendConfig(kv_bits=self.kv_bits)
        for index, layer in enumerate(cache_layers(self.model, len(cache.layers), config) if self.kv_bits else ()):
            if isinstance(layer, QuantisedLayer):
                if (filled := cache.layers[index]).is_initialized:
                    layer.update(filled.keys, filled.values)
                    vars(layer).update({name: vars(filled)[name] for name in vars(filled) if "indexer_" in name})
                cache.layers[index] = layer
        return cache
