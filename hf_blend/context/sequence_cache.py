# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`SequenceCache`: a cache for stock `generate` whose tokens can be removed, shared, moved and divided.

    cache = SequenceCache(model)
    output = model.generate(**inputs, past_key_values=cache)  # cache=cache from transformers 5.24 on
    model.generate(**cache.inputs(question_ids), past_key_values=cache)  # continues it
    cache.copy(0, 1)                  # a second sequence over the same storage
    cache.remove(1, 100, 200)         # without the tokens at positions 100 … 199
    cache.shift(1, 200, None, -100)   # the rest closes up; its keys are rotated when they are next needed
    cache.use(1)                      # the next forward continues sequence 1
    cache.fork(8)                     # the next forward continues eight sequences, a batch over the same storage

A key is stored as it was computed and rotated from there each time, so any number of moves costs the precision of one.
The semantics are those of llama.cpp's KV cache, except that a shift moves a shared token for one sequence only. As in
its unified cache, active sequences attend to the storage as it is, and a mask hides the tokens of other sequences.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BatchEncoding, Cache

from ..cache.layers import ROOM_TOKENS, SPARE_SHARE, as_indices, check_negative
from ..cache.session import layer_of
from ..errors import ConfigError, PromptError, UnsupportedModelError
from ..model.anatomy import decoder_layers, is_extended, refuse_extended, text_config
from ..model.attention import ROWS, STOCK, layers_handing_on, register_attention
from ..model.author import Author, author_of, refuse_other_author
from ..model.checks import CheckedModel, Use, ensure_passed
from ..model.hooks import ForwardHooks
from ..model.modality import other_inputs
from ..model.placement import input_device
from ..model.row_masks import MadeLines
from ..prefill.layout import layout_of
from ..prompt.history import UNKNOWN
from .sequence_layer import SequenceLayer
from .sequence_state import check_state, sequences_of
from .tables import TableSource, counted_in_tokens, regime_tokens
from .token_table import TokenTable, grown, mask_of

MASKED = ("eager", STOCK)  # attention implementations that take any mask
CHECKS = "hf_blend.context.checks"
MOVE = Use(
    "move",
    CHECKS,
    "a sequence that {} computed cannot be moved",
    "Use a fresh prefill instead, or pass allow_unverified=True to use it all the same.",
)
SHARE = Use("share", CHECKS, "several sequences of {} cannot share cells", "Continue one at a time with use().")
Forward = tuple[Tensor, Tensor, Tensor]  # positions and ids of new tokens, and which of them are no padding
RESET = "Go back to what the model was, or reset() the cache and prefill again."


class SequenceCache(Cache):
    """A `transformers.Cache` of several sequences over one storage, which are continued alone or as a batch.

    Works with greedy search, sampling, streaming and assisted decoding of one request, and with a batch of sequences
    that share what they have in common: sampling several answers, beams, many questions behind one prefix. As long as
    the cache lives, a hook hands the model the cache's positions and mask in every call with it.

    `generate` leaves out as many first tokens of a prompt as the cache holds, whatever they are. So a prompt behind
    held tokens is made by `inputs`, and others of several tokens are refused. A call of the model itself is given the
    new tokens alone, without mask and positions.

    All that is held belongs to the model as it was when it computed it: after a switch of adapters, weights, dtype or
    attention further prompts are refused.

    Attributes:
        batch: the sequences that the next forward continues, by row.
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
        self._allow_unverified = allow_unverified
        self._source = TableSource.of(model, below_regime=True)
        self._position_limit = regime_tokens(model)
        ensure_passed(CheckedModel(model), MOVE, allow_unverified)
        self._device = input_device(model)
        super().__init__(layers=[*self._empty_layers()])
        self._begin()
        self._hooks = ForwardHooks(self, model)
        self._hooks.watch_model(stay=True)

    def _begin(self) -> None:
        """Hold nothing."""
        self.batch: tuple[int, ...] = (0,)
        self.author: Author | None = None
        self.layers = self._empty_layers()
        self._table = TokenTable()
        self._is_arranged = True  # the columns are those of the active sequences
        self._visible: Tensor | None = None  # columns that each active sequence sees; None: all
        self._was_extended = False
        self._expected: Tensor | None = None  # new ids of the prompts that `inputs` made, `[sequences, tokens]`
        self._forward: Forward | None = None  # that runs
        self._given: tuple[Tensor, Forward] | None = None  # the positions that the model was given last

    # What is held

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that the cache holds, spare room included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def active(self) -> int:
        """The first of the sequences that the next forward continues."""
        return self.batch[0]

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences that were written to and not forgotten, in increasing order."""
        return self._table.sequences

    def tokens(self, sequence: int | None = None) -> list[int]:
        """The token ids of a sequence (None: the active one), in the order of attention; -1 where unknown."""
        cells, _ = self._table.row(self._number(sequence))
        return self._table.ids[cells].tolist()

    def positions(self, sequence: int | None = None) -> list[int]:
        """Their positions, in the order of `tokens`."""
        return self._table.row(self._number(sequence))[1].tolist()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the active sequence has; of a batch, the longest one."""
        return max(map(self._table.length, self.batch))

    def __bool__(self) -> bool:
        """Whether there is anything in the cache."""
        return self.get_seq_length() > 0

    # Operations of llama.cpp

    def remove(self, sequence: int | None = None, start: int = 0, stop: int | None = None) -> None:
        """Forget the tokens of a sequence, or of every one (None), at positions `start:stop`."""
        self._table.remove(sequence, start, stop)
        self._changed()

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Add the tokens of `source` at positions `start:stop` to `target`; the storage is shared."""
        self._table.copy(self._number(source), self._number(target), start, stop)
        self._changed()

    def keep(self, sequence: int) -> None:
        """Forget every sequence but one, and continue that."""
        self._table.keep(self._number(sequence))
        self.use(sequence)

    def shift(self, sequence: int, start: int, stop: int | None, delta: int) -> None:
        """Move the tokens at positions `start:stop` by `delta`; those that would go below 0 are forgotten."""
        self._table.shift(self._number(sequence), start, stop, delta)
        self._changed()

    def divide(self, sequence: int, start: int, stop: int | None, by: int) -> None:
        """Divide the positions `start:stop` by a whole number from 1 on, rounding down.

        Raises:
            ConfigError: the number is below 1.
        """
        self._table.divide(self._number(sequence), start, stop, by)
        self._changed()

    def use(self, *sequences: int) -> None:
        """Continue a sequence in the next forward, or a batch of several. A new number is an empty sequence."""
        numbers = tuple(map(self._number, sequences))
        if not numbers or len(set(numbers)) < len(numbers):
            raise ConfigError(f"use{sequences} names {len(numbers)} sequences, expected one or more, each once.")
        if len(numbers) > 1:
            self._ensure_shareable()
        self.batch = numbers
        self._changed()

    def fork(self, sequences: int) -> list[int]:
        """Continue the active sequence in the next forward as a batch of so many, which share its tokens.

        Returns:
            Their numbers: the active one first, then new ones.
        """
        if sequences < 1 or len(self.batch) > 1:
            raise ConfigError(
                f"fork({sequences}) was asked with {len(self.batch)} active sequences, but a number from 1 on is "
                "expected, and one active sequence. Call use() with the sequence to fork."
            )
        self._select_rows([0] * sequences)
        return [*self.batch]

    def compact(self) -> None:
        """Free the storage of forgotten tokens and rotate keys that moved, as the next forward would do."""
        self._free_cells(allowed=0)
        self._arrange_active()

    def materialize(self) -> list[SequenceLayer]:
        """The layers, with `keys` and `values` of the first active sequence alone, in the order of its tokens."""
        self._refuse_gaps(self._table.row(self.active)[1])
        self._free_cells(allowed=0)
        self._arrange([self.active], may_hide=False)
        self._is_arranged = self._visible is None and len(self.batch) == 1
        return self.layers

    # What `generate` and the model call

    def inputs(self, *new_ids: Sequence[int]) -> BatchEncoding:
        """Build the prompts of the next `generate`: the tokens that are held, and new ones behind them.

        Args:
            *new_ids: token ids for each active sequence. With fewer lists each is for as many neighbours that hold
                the same: `num_beams` and `num_return_sequences` make so many rows of a prompt.

        Returns:
            `input_ids` and `attention_mask`, `[prompts, tokens]`, with padding before what a row holds and before its
            new tokens, on the model's device.

        Raises:
            ConfigError: there are more lists than active sequences, or a list is empty.
        """
        copies, odd = divmod(len(self.batch), max(1, len(new_ids)))
        numbers = self.batch[:: max(1, copies)]
        if not new_ids or odd or not copies or not all(map(len, new_ids)):
            raise ConfigError(
                f"{len(new_ids)} lists of {[*map(len, new_ids)]} new tokens came for {len(self.batch)} active "
                "sequences, but one for each is expected, or fewer of which each is for as many. Call use() or fork()."
            )
        for row, number in enumerate(self.batch):
            if self.tokens(number) != self.tokens(numbers[row // copies]):
                raise ConfigError(
                    f"sequence {number} holds other tokens than sequence {numbers[row // copies]}, but the same are "
                    f"expected to be continued by one prompt. Give {len(self.batch)} lists."
                )
        held = self.get_seq_length()
        ids = torch.zeros((len(new_ids), held + max(map(len, new_ids))), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (number, new) in enumerate(zip(numbers, new_ids, strict=True)):
            known = torch.tensor(self.tokens(number), dtype=torch.long)
            for end, tokens in ((held, known), (ids.shape[1], torch.as_tensor(new))):
                ids[row, end - len(tokens) : end] = tokens.clamp_min(0)  # generate leaves unknown ids out
                mask[row, end - len(tokens) : end] = 1
        self._expected = ids[:, held:].repeat_interleave(copies, 0)
        self._record_past(False)
        return BatchEncoding({"input_ids": ids.to(self._device), "attention_mask": mask.to(self._device)})

    def forward_begins(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Called by the hook on the model: returns its arguments with positions and mask of the active sequences."""
        if others := other_inputs(self.model, arguments):
            raise PromptError(
                f"{', '.join(others)} came with a SequenceCache, but text alone is expected: it "
                "gives a token the position behind the last, and images have positions of their own. Use DynamicCache."
            )
        if self._given is not None and arguments.get("position_ids") is self._given[0]:
            self._forward = self._given[1]  # a wrapper such as PEFT's hands its arguments on to the model inside
            return arguments
        new, real = self._new_tokens(arguments)
        self._check_turn(new, arguments)
        self._was_extended = self._was_extended or is_extended(self.model)
        self.make_room(real.shape[1])
        self._arrange_active()

        # New tokens come behind the last position of their sequence; padding takes none
        starts = torch.tensor([[self._table.next_position(number)] for number in self.batch])
        positions = (starts + real.long().cumsum(1) - 1).clamp_min(0)
        self._refuse_other_frequencies(positions)
        ids = new.cpu() if new.dim() == 2 else torch.full(real.shape, UNKNOWN)
        given = positions.to(new.device)
        self._forward = positions, ids, real
        self._given = given, self._forward
        changed = {**arguments, "position_ids": given, "attention_mask": None}
        if self._visible is not None:
            changed |= self._mask_arguments(mask_of(self._visible, real))
        return changed

    def forward_ends(self, failed: bool = False) -> None:
        """Called by the hook behind the model."""
        self._hooks.leave()
        self._forward = None

    def make_room(self, tokens: int) -> None:
        """Called before `tokens` new ones come; a subclass may drop old ones here."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new K and V, and return all K and V that the active sequences attend to.

        Shapes: `[sequences, kv_heads, tokens, head_dim]` → `[sequences, kv_heads, all tokens, head_dim]`.
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
        """Forget the last tokens of each active sequence; their number is negative, and may be more than there are."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        check_negative(tokens_to_remove, self.get_seq_length())
        for number in reversed(self.batch):  # the last has the last cells
            self._table.crop(number, -tokens_to_remove)
        last = self._table.row(self.active)[0][-1:]
        has_others_behind = bool((last + 1 != self._table.count).any())
        if self._visible is not None or has_others_behind:
            self._changed()
        else:
            self._show(self.get_seq_length())

    def reset(self) -> None:
        """Forget every sequence; sequence 0 is active then, as in a new cache."""
        self.forward_ends()  # it was interrupted
        self._begin()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each active sequence by the one at an index of the batch; called by beam search."""
        self._select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Any) -> None:
        """Continue only some of the active sequences, `[kept]` indices of `batch`, and forget the others."""
        self._select_rows(as_indices(indices).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue each active sequence `repeats` times, side by side, sharing what they hold."""
        self._select_rows([index for index in range(len(self.batch)) for _ in range(repeats)])

    # Sessions

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
        self._free_cells(allowed=0)
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
        self.batch = (int(state["active"]),)
        self.author = author_of(self.model)._replace(autocast="")
        self._table.insert(0, state["ids"], state["origins"])
        for number, (cells, positions) in sequences_of(state).items():
            self._table.set_row(number, cells.clone(), positions.clone())
        self._changed()

    # Inside

    def _empty_layers(self) -> list[SequenceLayer]:
        return [SequenceLayer() for _ in decoder_layers(self.model)]

    def _number(self, sequence: int | None) -> int:
        if sequence is None:
            return self.active
        if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
            raise ConfigError(f"a sequence is named {sequence!r}, expected a number from 0 on.")
        return sequence

    def _new_tokens(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The new tokens, and which of them are no padding, `[sequences, tokens]`."""
        new, mask, rows = arguments.get("input_ids"), arguments.get("attention_mask"), len(self.batch)
        if new is None:
            new = arguments.get("inputs_embeds")
        if new is None or new.shape[0] != rows or (mask is not None and mask.dim() != 2):
            count = 0 if new is None else new.shape[0]
            raise PromptError(
                f"{count or 'nothing'} came for {rows} active sequences, but one request without padding is expected "
                "for one, and a row for each of several. With num_beams or num_return_sequences generate makes so "
                f"many rows of each prompt: call fork({max(2, count)}) first, or use() with sequences of their own."
            )
        width = new.shape[1]
        if mask is None:
            return new, torch.ones((rows, width), dtype=torch.bool)
        mask = mask.cpu().bool()
        held = torch.tensor([self._table.length(number) for number in self.batch])
        more = mask[:, :-width].sum(1) - held  # all ones may also count what a window has dropped, of all alike
        is_whole = bool(mask.all()) and (rows == 1 or bool((more == more[0].clamp_min(0)).all()))
        if not is_whole and (rows == 1 or more.any()):
            raise PromptError(
                f"the attention mask counts {mask.sum(1).tolist()} tokens, but one request without padding is "
                f"expected, or a batch whose rows count the {held.tolist()} tokens that are held and the new ones."
            )
        return new, mask[:, -width:]

    def _check_turn(self, new: Tensor, arguments: dict[str, Any]) -> None:
        """Refuse prompts that may begin otherwise than what is held, and another model than computed it."""
        held, width = self.get_seq_length(), new.shape[1]
        expected, self._expected = self._expected, None
        is_expected = expected is not None and new.dim() == 2 and torch.equal(new.cpu(), expected[:, :width])
        if expected is not None and is_expected and width < expected.shape[1]:
            self._expected = expected[:, width:]  # the rest comes in further forwards (prefill_chunk_size)
        is_step = held > 0 and not is_expected and (width == 1 or self.layers[0].record_past)
        positions = arguments.get("position_ids")
        is_from_start = width > held > 0 and isinstance(positions, Tensor) and int(positions.max()) + 1 == width
        is_generating = positions is not None or arguments.get("attention_mask") is not None
        is_unknown = held > 0 and is_generating and not is_expected and not is_step
        if is_from_start or is_unknown:
            raise PromptError(
                f"{width} tokens came behind {held} that are held, but a prompt that begins with these is expected: "
                "generate leaves out the first tokens without comparing them, and assisted decoding passes them "
                "again. Pass generate(**cache.inputs(new_ids)) without an assistant, call the model with the new "
                "tokens alone, without mask and positions, or reset() the cache."
            )
        if not is_step:
            author = author_of(self.model)
            if self._table.count:
                refuse_other_author(self.author, author, self._table.count, RESET)
            self.author = author

    def _record_past(self, value: bool) -> None:
        for layer in self.layers:
            layer.record_past = value

    def _commit(self) -> None:
        """The new tokens of a forward are in every layer."""
        if self._forward is None:
            return
        positions, ids, real = self._forward
        self._forward = None
        self._table.write(self.batch, positions, ids, real)
        if self._visible is not None:
            self._visible = grown(self._visible, real)
        self._show(self.layers[0].length + real.numel())

    def _select_rows(self, indices: list[int]) -> None:
        """Replace the active sequences by copies of those at some indices of the batch."""
        numbers = [*self.batch[: len(indices)]]
        taken = {*self.sequences, *self.batch}
        number = 0
        while len(numbers) < len(indices):
            if number not in taken:
                numbers.append(number)
            number += 1
        rows = [self._table.row(self.batch[index]) for index in indices]
        gone = self.batch[len(indices) :]
        self.use(*numbers)
        for number, row in zip(numbers, rows, strict=True):
            self._table.set_row(number, *row)
        self._table.forget(gone)
        self._changed()

    def _changed(self) -> None:
        """The active sequences are not what they were, for the columns and for the prompts that `inputs` made."""
        self._expected = None
        self._columns_changed()

    def _columns_changed(self) -> None:
        self._is_arranged = False
        for layer in self.layers:
            layer.length = self.get_seq_length()

    def _show(self, columns: int) -> None:
        for layer in self.layers:
            layer.show(columns)

    def _free_cells(self, allowed: int) -> None:
        """Free the cells of no sequence, if there are more than `allowed`."""
        if self._table.count - len(self._table.used_cells()) <= allowed:
            return
        cells = self._table.compact()
        for layer in self.layers:
            layer.keep(cells)
        self._columns_changed()

    def _arrange_active(self) -> None:
        """Prepare the columns of K and V that the next forward attends to."""
        if self._is_arranged:
            return
        for number in self.batch:
            positions = self._table.row(number)[1]
            self._refuse_gaps(positions)
            self._refuse_other_frequencies(positions)
        self._free_cells(0 if len(self.batch) == 1 else max(ROOM_TOKENS, self._table.count // SPARE_SHARE))
        is_all = len(self.batch) == 1 and self._table.length(self.active) == self._table.count
        self._arrange(self.batch, may_hide=not is_all and self._may_hide())
        self._is_arranged = True

    def _arrange(self, sequences: Sequence[int], may_hide: bool) -> None:
        """Make the columns those of some sequences."""
        view = self._table.view(sequences, may_hide)
        rotations = self._source.rotations(self._table.origins[view.cells], view.positions)
        for layer, style, by in zip(self.layers, self._source.styles, rotations, strict=True):
            layer.arrange(view.cells, view.in_order, style, by)
        self._visible = None if view.visible is None else view.visible.to(self._device)
        self._show(len(view.cells))

    def _mask_arguments(self, mask: Tensor) -> dict[str, Any]:
        """A mask, `[sequences, 1, tokens, columns]`, in the form that the model's attention takes."""
        if self._attention != STOCK:
            hidden = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
            return {"attention_mask": hidden.masked_fill_(~mask, float("-inf"))}
        if len(layers_handing_on(self.model)) < len(self.layers):
            return {"attention_mask": mask}
        register_attention(STOCK)  # which reads shared columns once, where stock sdpa copies them for every head
        return {"attention_mask": mask, ROWS: MadeLines(mask)}

    @property
    def _attention(self) -> str:
        return getattr(text_config(self.model), "_attn_implementation", None) or ""

    def _ensure_shareable(self) -> None:
        """Refuse a model whose attention does not take a mask that hides cells."""
        reason = counted_in_tokens(self.model, self._source)
        if not reason and self._attention not in MASKED:
            reason = f"its attention is {self._attention!r}, and one of {', '.join(MASKED)} is expected"
        if reason:
            raise UnsupportedModelError(
                f"several sequences of {type(self.model).__name__} cannot be continued at once over shared cells: "
                f"{reason}. Continue one at a time with use(), or use a DynamicCache for each."
            )
        ensure_passed(CheckedModel(self.model), SHARE, self._allow_unverified)

    def _may_hide(self) -> bool:
        """Whether a mask can hide the tokens of other sequences; else a copy without them is needed."""
        try:
            self._ensure_shareable()
        except UnsupportedModelError:
            return False
        return True

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
        """Drop at least half of the tokens behind the kept ones of each active sequence, if new ones do not fit."""
        keep = self.keep_tokens
        for number in self.batch:
            held = self._table.next_position(number)
            excess = held + tokens - self.window_tokens
            behind_kept = max(0, held - keep)
            if excess > behind_kept:
                raise PromptError(
                    f"{tokens} new tokens do not fit a window of {self.window_tokens}, of which {keep} are kept. Pass "
                    "prefill_chunk_size to generate(**cache.inputs(ids)), or shorten the prompt."
                )
            if excess > 0:
                dropped = max(excess, behind_kept // 2)
                self._table.remove(number, keep, keep + dropped)
                self._table.shift(number, keep + dropped, None, -dropped)
                self._columns_changed()
                self.shifts += 1
