# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`SequenceCache`: a cache for stock `generate` whose tokens can be removed, shared, moved and divided.

    cache = SequenceCache(model)
    output = model.generate(**inputs, **cache.keyword)
    model.generate(**cache.inputs(question_ids), **cache.keyword)  # continues it
    cache.copy(0, 1)                  # a second sequence over the same storage
    cache.remove(1, 100, 200)         # without the tokens at positions 100 … 199
    cache.shift(1, 200, None, -100)   # the rest closes up; its keys are rotated when they are next needed
    cache.use(1)                      # the next forward continues sequence 1

A key is stored as it was computed and rotated from there each time, so any number of moves costs the precision of one.
The semantics are those of llama.cpp's KV cache (llama.h), except that a shift moves a shared token for one sequence
only, and that one sequence at a time is continued.
"""

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from ..cache.guards import GuardedCache, check_length, refuse
from ..cache.layers import as_indices, check_negative
from ..cache.session import layer_of
from ..errors import ConfigError, PromptError, UnsupportedModelError
from ..model.anatomy import decoder_layers, input_device, is_extended, refuse_extended, text_config
from ..model.capture import layout_of
from ..model.checks import CheckedModel, Use, ensure_passed
from ..model.hooks import ForwardHooks
from ..model.identity import Author, author_of, refuse_other_author
from ..prompt.pieces import UNKNOWN
from .sequence_layer import SequenceLayer
from .sequence_state import check_state, sequences_of
from .tables import TableSource, counted_in_tokens, regime_tokens
from .token_table import EVERY, TokenTable

MOVE = Use(
    "move",
    "hf_blend.context.checks",
    "a sequence that {} computed cannot be moved",
    "Use a fresh prefill instead, or pass allow_unverified=True to use it all the same.",
)
Forward = tuple[Tensor, Tensor]  # positions and ids of new tokens, `[tokens]` each
OF_MODEL = ("model", "_source", "_device", "_hooks")  # what a copy of a cache shares, or has of its own
RESET = "Go back to what the model was, or reset() the cache and prefill again."
CONTINUE = (
    "Pass generate(**cache.inputs(new_ids)) without an assistant, call the model with the new tokens alone, without "
    "mask and positions, or reset() the cache."
)


class SequenceCache(GuardedCache):
    """A `transformers.Cache` of several sequences in one storage; one sequence is continued at a time.

    Works with greedy search, sampling, streaming and assisted decoding of one request. As long as the cache lives, a
    hook hands the model the cache's positions in every call with it.

    `generate` leaves out as many first tokens of a prompt as the cache holds, whatever they are. So a prompt behind
    held tokens is made by `inputs`, and others of several tokens are refused. A call of the model itself is given the
    new tokens alone, without mask and positions.

    All that is held belongs to the model as it was when it computed it: after a switch of adapters, weights, dtype or
    attention further prompts are refused.

    Attributes:
        active: the number of the sequence that the next forward continues.
        author: the model as it was when it computed what is held; None before anything is.
    """

    layers: list[SequenceLayer]  # type: ignore[assignment]

    def __init__(self, model: nn.Module, *, allow_unverified: bool = False) -> None:
        """Begin empty, with sequence 0 active.

        Args:
            model: a causal language model of transformers whose keys can be moved. The first cache of a model tests
                that, with some tens of tokens.
            allow_unverified: use a model that fails the self-test, with one warning.

        Raises:
            UnsupportedModelError: they cannot; the layer is named.
        """
        self.model = model
        self._source = TableSource.of(model, below_regime=True)
        self._position_limit = regime_tokens(model)
        ensure_passed(CheckedModel(model), MOVE, allow_unverified)
        self._device = input_device(model)
        super().__init__(layers=[*self._empty_layers()])
        self._begin()
        self._hooks = ForwardHooks(self, model)
        self._hooks.watch_model()

    def _begin(self) -> None:
        """Hold nothing."""
        self.active = 0
        self.author: Author | None = None
        self.layers = self._empty_layers()
        self._table = TokenTable()
        self._is_arranged = True  # the columns are those of the active sequence
        self._was_extended = False
        self.dropped = 0  # tokens that `make_room` has dropped
        self._expected: Tensor | None = None  # new ids of the prompt that `inputs` made, `[tokens]`
        self._forward: Forward | None = None  # that runs
        self._given: tuple[Tensor, Forward] | None = None  # the positions that the model was given last

    # What is held

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that the cache holds, spare room included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences that have tokens, in increasing order."""
        return self._table.sequences

    def tokens(self, sequence: int | None = None) -> list[int]:
        """The token ids of a sequence (None: the active one), in the order of attention; -1 where unknown."""
        cells, _ = self._table.row(self._number(sequence))
        return self._table.ids[cells].tolist()

    def positions(self, sequence: int | None = None) -> list[int]:
        """Their positions, in the order of `tokens`."""
        return self._table.row(self._number(sequence))[1].tolist()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the active sequence has."""
        return self._table.length(self.active)

    def __bool__(self) -> bool:
        """Whether there is anything in the cache."""
        return self.get_seq_length() > 0

    # Operations of llama.cpp: positions `start:stop`, where a `stop` of None or -1 is the end

    def remove(self, sequence: int = EVERY, start: int = 0, stop: int | None = None) -> None:
        """Forget the tokens of a sequence, or of every one (-1), at positions `start:stop`."""
        self._table.remove(whole("the number of a sequence", sequence, least=EVERY), *_range(start, stop))
        self._changed()

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Add the tokens of `source` at positions `start:stop` to `target`; the storage is shared."""
        self._table.copy(self._number(source), self._number(target), *_range(start, stop))
        self._changed()

    def keep(self, sequence: int) -> None:
        """Forget every sequence but one, and continue that."""
        self._table.keep(self._number(sequence))
        self.use(sequence)

    def shift(self, sequence: int, start: int, stop: int | None, delta: int) -> None:
        """Move the tokens at positions `start:stop` by `delta`; those that would go below 0 are forgotten."""
        self._table.shift(self._number(sequence), *_range(start, stop), whole("delta", delta))
        self._changed()

    def divide(self, sequence: int, start: int, stop: int | None, by: int) -> None:
        """Divide the positions `start:stop` by a whole number from 1 on, rounding down.

        Raises:
            ConfigError: the number is below 1, or no whole number.
        """
        self._table.divide(self._number(sequence), *_range(start, stop), whole("by", by, least=1))
        self._changed()

    def use(self, sequence: int) -> None:
        """Continue a sequence in the next forward. A new number is an empty sequence."""
        self.active = self._number(sequence)
        self._changed()

    def compact(self) -> list[SequenceLayer]:
        """Free the storage of forgotten tokens and rotate keys that moved, as the next forward would do.

        Returns:
            The layers, whose `keys` and `values` are those of the active sequence in the order of its tokens.
        """
        self._free_cells()
        self._is_arranged = False
        self._arrange()
        return self.layers

    # What `generate` and the model call

    def inputs(self, new_ids: Sequence[int]) -> BatchEncoding:
        """Build the prompt of the next `generate`: the tokens of the active sequence, and new ones behind them.

        Args:
            new_ids: token ids.

        Returns:
            `input_ids` and `attention_mask`, `[1, tokens]`, on the model's device.

        Raises:
            ConfigError: there are no new tokens.
        """
        new = torch.as_tensor(new_ids, dtype=torch.long)
        if not new.numel():
            raise ConfigError("no new tokens came, but one or more are expected behind what is held. Give some.")
        held = torch.tensor(self.tokens(), dtype=torch.long).clamp_min(0)  # generate leaves unknown ids out
        ids = torch.cat([held, new])[None].to(self._device)
        self._expected = new
        self._record_past(False)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def forward_begins(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Called by the hook on the model: returns its arguments with the positions of the active sequence."""
        if self._given is not None and arguments.get("position_ids") is self._given[0]:
            self._forward = self._given[1]  # a wrapper such as PEFT's hands its arguments on to the model inside
            return arguments
        new = self._check_turn(arguments)
        self._was_extended = self._was_extended or is_extended(self.model)
        tokens = new.shape[1]
        self.make_room(tokens)
        self._arrange()

        # New tokens come behind the last position of the sequence
        start = self._table.next_position(self.active)
        positions = torch.arange(start, start + tokens)
        self._refuse_other_frequencies(positions)
        ids = new[0].cpu() if new.dim() == 2 else torch.full((tokens,), UNKNOWN)
        given = positions[None].to(new.device)
        self._forward = positions, ids
        self._given = given, self._forward
        return {**arguments, "position_ids": given, "attention_mask": None}

    def forward_ends(self, failed: bool = False) -> None:
        """Called by the hook behind the model."""
        self._hooks.leave()
        forward, self._forward = self._forward, None
        if forward is not None and not failed:
            held = self.get_seq_length()
            check_length(self.model, held, held + len(forward[0]))

    def make_room(self, tokens: int) -> None:
        """Called before `tokens` new ones come; a subclass may drop old ones here."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new K and V, and return all K and V that the active sequence attends to.

        Shapes: `[1, kv_heads, tokens, head_dim]` → `[1, kv_heads, all tokens, head_dim]`.
        """
        if self._forward is None:
            raise ConfigError(
                f"K and V came to a cache of a {type(self.model).__name__} from a call that it did not see begin, but "
                "a call of this very object is expected. Call the model that the cache was made for, not a copy, or "
                "make a cache for the other."
            )
        columns = self.layers[layer_idx].write(self._table.count, key_states, value_states)
        if layer_idx == len(self.layers) - 1:
            self._commit()
        return columns

    def activate_past_recording(self) -> None:
        """Called by decoding whose steps bring several tokens, of which some are cropped again."""
        self._record_past(True)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the active sequence; their number is negative, and may be more than there are."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        check_negative(tokens_to_remove, self.get_seq_length())
        self._table.crop(self.active, -tokens_to_remove)
        held = self.get_seq_length()
        last = self._table.row(self.active)[0][-1:]
        is_at_end = bool((last + 1 == self._table.count).all())
        if is_at_end:
            self._show(held)
        else:
            self._changed()

    def reset(self) -> None:
        """Forget every sequence; sequence 0 is active then, as in a new cache."""
        self.forward_ends(failed=True)  # it was interrupted
        self._begin()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refuse beams; called by beam search."""
        _refuse_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Any) -> None:
        """Refuse any rows but the only one."""
        _refuse_rows(as_indices(indices).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse more rows than one."""
        _refuse_rows([0] * repeats)

    # Copies and sessions

    def __deepcopy__(self, memo: dict[int, Any]) -> "SequenceCache":
        """A cache for the same model with a copy of everything else."""
        twin = type(self).__new__(type(self))
        SequenceCache.__init__(twin, self.model, allow_unverified=True)  # the model was taken before
        for name, value in vars(self).items():
            if name not in OF_MODEL:
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: a cache belongs to a model object, and `copy.copy` would share its K and V."""
        raise ConfigError(
            f"a {type(self).__name__} of {self.get_seq_length()} tokens was to be pickled, or copied by copy.copy, "
            "but it belongs to a model object, and a copy would share its K and V. Use copy.deepcopy(cache), or "
            "save_session(cache, path) of hf_blend.context.session and load_session in another process."
        )

    def refuse_extended(self) -> None:
        """Refuse to be saved if the model is inside `self_extend`, or was when it computed some of the tokens."""
        refuse_extended(self.model)
        if self._was_extended:
            raise UnsupportedModelError(
                f"a cache of {type(self.model).__name__} holds {self.get_seq_length()} tokens, some of them computed "
                "inside self_extend, but what is stored is expected to be what the model computes alone. Fill a cache "
                "outside the block."
            )

    def state(self) -> dict[str, Tensor]:
        """The tensors of the cache, by the names in `sequence_state`."""
        self._free_cells()
        table = self._table
        state = {"ids": table.ids.clone(), "origins": table.origins.clone(), "active": torch.tensor(self.active)}
        for number in self.sequences:
            state[f"sequence.{number}"] = torch.stack(table.row(number))
        for index, layer in enumerate(self.layers if table.count else ()):
            for name, tensor in layer.parts(torch.arange(table.count)).items():
                state[f"layer.{index}.{name}"] = tensor
        return state

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise EntryFault for tensors that `state` of a cache of this model never gives."""
        check_state(state, layout_of(self.model))

    def restore(self, state: dict[str, Tensor]) -> None:
        """Replace all that is held by what `state` gave; the model as it is now, without autocast, computed it."""
        layers = self._empty_layers()
        for index, layer in enumerate(layers if len(state["ids"]) else ()):
            layer.add(0, {name: tensor.to(self._device) for name, tensor in layer_of(state, index).items()})
        self._begin()
        self.layers = layers
        self.active = int(state["active"])
        self.author = author_of(self.model)._replace(autocast="", is_training=False)
        self._table.insert(state["ids"], state["origins"])
        for number, (cells, positions) in sequences_of(state).items():
            self._table.set_row(number, cells.clone(), positions.clone())
        self._changed()

    # Inside

    def _empty_layers(self) -> list[SequenceLayer]:
        return [SequenceLayer() for _ in decoder_layers(self.model)]

    def _number(self, sequence: int | None) -> int:
        return self.active if sequence is None else whole("the number of a sequence", sequence, least=0)

    def _check_turn(self, arguments: dict[str, Any]) -> Tensor:
        """Refuse what every cache refuses, and another model than computed what is held.

        Returns the ids of the new tokens, `[1, tokens]`, or their embeddings, `[1, tokens, width]`.
        """
        new: Any = arguments.get("input_ids")
        if new is None:
            new = arguments.get("inputs_embeds")
        width = 0 if new is None else new.shape[1]
        held = self.get_seq_length()
        expected, self._expected = self._expected, None
        begins_turn, self.begins_turn = self.begins_turn, False
        is_expected = False
        if expected is not None and new is not None and new.shape == (1, width):
            is_expected = torch.equal(new[0].cpu(), expected[:width])
        is_recording = self.layers[0].record_past
        refuse(
            model=self.model,
            layers=decoder_layers(self.model),
            arguments=arguments,
            past=held,
            past_rows=int(held > 0),
            kv=self.layers,
            begins_turn=begins_turn,
            is_expected=is_expected,
            advice=CONTINUE,
            next_position=self._table.next_position(self.active),
            dropped=self.dropped,
        )
        if expected is not None and is_expected and width < len(expected):
            self._expected = expected[width:]  # the rest comes in further forwards (prefill_chunk_size)
        is_step = held > 0 and not is_expected and (width == 1 or is_recording)
        if not is_step:
            author = author_of(self.model)
            if self._table.count:
                refuse_other_author(self.author, author, self._table.count, RESET)
            self.author = author
        return new

    def _record_past(self, value: bool) -> None:
        for layer in self.layers:
            layer.record_past = value

    def _commit(self) -> None:
        """The new tokens of a forward are in every layer."""
        if self._forward is None:
            return
        positions, ids = self._forward
        self._forward = None
        self._table.write(self.active, positions, ids)
        self._show(self.get_seq_length())

    def _changed(self) -> None:
        """The active sequence is not what it was, for the columns and for the prompt that `inputs` made."""
        self._expected = None
        self._columns_changed()

    def _columns_changed(self) -> None:
        self._is_arranged = False
        for layer in self.layers:
            layer.length = self.get_seq_length()

    def _show(self, columns: int) -> None:
        for layer in self.layers:
            layer.show(columns)

    def _free_cells(self) -> None:
        """Free the cells of no sequence."""
        cells = self._table.compact()
        if cells is not None:
            for layer in self.layers:
                layer.keep(cells)
            self._columns_changed()

    def _arrange(self) -> None:
        """Prepare the columns of K and V that the next forward attends to: those of the active sequence."""
        if self._is_arranged:
            return
        positions = self._table.row(self.active)[1]
        self._refuse_gaps(positions)
        self._refuse_other_frequencies(positions)
        self._free_cells()
        cells, positions = self._table.row(self.active)
        rotations = self._source.rotations(self._table.origins[cells], positions)
        in_order = self._table.ends_with(self.active)
        for layer, style, by in zip(self.layers, self._source.styles, rotations, strict=True):
            layer.arrange(cells, in_order, style, by)
        self._show(len(cells))
        self._is_arranged = True

    def _refuse_other_frequencies(self, positions: Tensor) -> None:
        """Refuse positions from which on the rotary frequencies are others: cached keys would have the old ones."""
        limit = self._position_limit
        if limit is not None and positions.numel() and int(positions.max()) >= limit:
            raise PromptError(
                f"position {int(positions.max())} came to a cache of {type(self.model).__name__}, whose rotary "
                f"frequencies change with the length, but less than {limit} is expected, where they stay the same. "
                "Use a ShiftCache with a window of so many tokens, or a BlendCache."
            )

    def _refuse_gaps(self, positions: Tensor) -> None:
        """Refuse gaps between positions if the attention measures distances in tokens."""
        reason = counted_in_tokens(self.model, self._source)
        if reason and bool((positions.diff() != 1).any()):
            raise ConfigError(
                f"the active sequence has holes or repeats in its positions, but {reason}, not positions. Close the "
                "holes with shift()."
            )


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number of Python or numpy; raises ConfigError for anything else, and for less than `least`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if is_whole and (least is None or value >= least):
        return int(value)
    bound = "" if least is None else f" from {least} on"
    raise ConfigError(f"{name} is {value!r:.60}, expected a whole number{bound}.")


def _range(start: Any, stop: Any) -> tuple[int, int | None]:
    return whole("start", start), None if stop is None else whole("stop", stop)


def _refuse_rows(rows: Sequence[int]) -> None:
    """Refuse any rows of a batch but the only one."""
    if list(rows) != [0]:
        raise ConfigError(
            f"rows {list(rows)} of a batch were asked for, but a SequenceCache holds one request: [0] is expected. "
            "Use a BlendCache for a batch or beams."
        )


class ShiftCache(SequenceCache):
    """A `SequenceCache` with a context window that shifts, so that generation continues past it, as with llama.cpp.

    When the window is full, the first tokens are kept, the older half of the rest is dropped, and the remaining tokens
    move up: their keys are rotated to their new positions. They stay as they were computed, with the dropped tokens
    before them. A prompt longer than the window is read in parts: `generate(**cache.inputs(ids),
    prefill_chunk_size=…)`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window_tokens: int | None = None,
        keep_tokens: int = 4,
        allow_unverified: bool = False,
    ) -> None:
        """Begin empty.

        Args:
            model: a causal language model of transformers.
            window_tokens: most tokens that the cache holds; None is the model's `max_position_embeddings`, or just
                below the length at which its rotary frequencies change (longrope, dynamic).
            keep_tokens: how many of the first tokens are never dropped, such as BOS and a system prompt.
            allow_unverified: use a model that fails the self-test, with one warning.

        Raises:
            ConfigError: there is no room between what is kept and the window.
            UnsupportedModelError: the model's keys cannot be moved; the layer is named.
        """
        super().__init__(model, allow_unverified=allow_unverified)
        limit = self._position_limit
        if window_tokens is None:
            window_tokens = limit or getattr(text_config(model), "max_position_embeddings", None) or 0
        if limit is not None and window_tokens > limit:
            raise ConfigError(
                f"window_tokens is {window_tokens}, but {limit} at most is expected: the rotary frequencies of "
                f"{type(model).__name__} change with the length, and keys of both kinds cannot stand beside each "
                "other. Give a smaller window_tokens, or none."
            )
        if not 0 <= keep_tokens < window_tokens - 1:
            raise ConfigError(
                f"keep_tokens is {keep_tokens} and window_tokens {window_tokens}, but at least two tokens must fit "
                "behind those that are kept. Give a larger window_tokens."
            )
        self.window_tokens = window_tokens
        self.keep_tokens = keep_tokens
        self.shifts = 0

    def reset(self) -> None:
        """Forget every sequence, and that anything was shifted."""
        super().reset()
        self.shifts = 0

    def make_room(self, tokens: int) -> None:
        """Drop at least half of the tokens behind the kept ones, if new ones do not fit."""
        keep = self.keep_tokens
        held = self._table.next_position(self.active)
        excess = held + tokens - self.window_tokens
        behind_kept = max(0, held - keep)
        if excess > behind_kept:
            raise PromptError(
                f"{tokens} new tokens do not fit a window of {self.window_tokens}, of which {keep} are kept. Pass "
                "prefill_chunk_size to generate(**cache.inputs(ids)), or shorten the prompt."
            )
        if excess > 0:
            dropped = max(excess, behind_kept // 2)
            self._table.remove(self.active, keep, keep + dropped)
            self._table.shift(self.active, keep + dropped, None, -dropped)
            self._columns_changed()
            self.dropped += dropped
            self.shifts += 1
