# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`SequenceCache`: a cache for stock `generate` whose tokens can be removed, shared, moved and divided.

    cache = SequenceCache(model)
    model.generate(**inputs, past_key_values=cache)
    cache.copy(0, 1)                  # a second sequence over the same storage
    cache.remove(1, 100, 200)         # without the tokens at positions 100 … 199
    cache.shift(1, 200, None, -100)   # the rest closes up; its keys are turned when they are next needed
    cache.use(1)                      # the next forward continues sequence 1

A key is stored as it was computed and turned from there each time, so any number of moves costs the precision of one.
The semantics are those of llama.cpp's KV cache, except that a shift moves a shared token for one sequence only.
"""

from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Cache

from ..errors import ConfigError, PromptError, UnsupportedModelError
from ..model.anatomy import decoder_layers, is_extended, refuse_extended
from ..model.modality import has_features, other_inputs
from ..model.placement import input_device
from ..rotary.base import compose
from .cells import Cells
from .self_test import ensure_movable
from .sequence_layer import SequenceLayer
from .steering import Steering
from .tables import TableSource, counted_in_tokens

UNKNOWN = -1  # id of a token that came as an embedding, or in a forward that no hook saw
_NOTHING = (torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long))


class SequenceCache(Cache):
    """A `transformers.Cache` of several sequences over one storage; one of them at a time is continued.

    Works with greedy search, sampling, streaming and assisted decoding of one request. `generate` needs nothing
    more; around calls of the model itself write `with cache:`, which lets the cache hand the model its positions.
    """

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
        self._source = TableSource.of(model)
        ensure_movable(model, partial(SequenceCache, model), allow_unverified)
        self._device = input_device(model)
        self.active = 0
        self._cells = Cells()
        self._ids = torch.empty(0, dtype=torch.long)  # by cell
        self._origins = torch.empty(0, dtype=torch.long)  # by cell: the position that its key is rotated for
        self._is_laid, self._pending = True, _NOTHING
        self._was_extended = False
        self._steering = Steering(self, model)
        self._sequence_layers = [SequenceLayer() for _ in decoder_layers(model)]
        Cache.__init__(self, layers=[*self._sequence_layers])

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that the cache holds, spare room included."""
        return sum(layer.nbytes for layer in self._sequence_layers)

    @property
    def is_compileable(self) -> bool:
        """False. `generate` asks before each forward: the model is watched from here."""
        self._steering.watch()
        return False

    def __enter__(self) -> Self:
        """Hand the model its positions in every call with this cache, until the block ends."""
        self._steering.watch(stay=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the model as it was."""
        self._steering.leave()
        self._pending = _NOTHING

    @property
    def sequences(self) -> list[int]:
        """The sequences that were ever written to and not forgotten, in increasing order."""
        return list(self._cells)

    def tokens(self, sequence: int | None = None) -> list[int]:
        """The token ids of a sequence in the order in which attention sees them; -1 where they are not known."""
        return self._ids[self._cells.row(self._number(sequence))[0]].tolist()

    def positions(self, sequence: int | None = None) -> list[int]:
        """The positions of a sequence's tokens, in the same order."""
        return self._cells.row(self._number(sequence))[1].tolist()

    def use(self, sequence: int) -> None:
        """Let the next forward continue a sequence."""
        self.active = self._number(sequence)
        self._changed()

    def remove(self, sequence: int | None = None, start: int = 0, stop: int | None = None) -> None:
        """Forget tokens at positions `start <= p < stop`.

        Args:
            sequence: of which sequence; None is every one.
            start: first position.
            stop: position behind the last; None is the end.
        """
        self._cells.remove(sequence, start, stop)
        self._changed()

    def copy(self, source: int, target: int, start: int = 0, stop: int | None = None) -> None:
        """Let `target` hold the tokens of `source` at positions `start <= p < stop` too, sharing the storage."""
        self._cells.copy(self._number(source), self._number(target), start, stop)
        self._changed()

    def keep(self, sequence: int) -> None:
        """Forget every sequence but one, and continue that."""
        self._cells.keep(self._number(sequence))
        self.use(sequence)

    def shift(self, sequence: int, start: int, stop: int | None, delta: int) -> None:
        """Move tokens at positions `start <= p < stop` by `delta`; those that would go below 0 are forgotten."""
        self._cells.shift(self._number(sequence), start, stop, delta)
        self._changed()

    def divide(self, sequence: int, start: int, stop: int | None, by: int) -> None:
        """Divide the positions `start <= p < stop` by a whole number from 1 on, rounding down.

        Raises:
            ConfigError: the number is below 1.
        """
        self._cells.divide(self._number(sequence), start, stop, by)
        self._changed()

    def make_room(self, tokens: int) -> None:
        """Called before `tokens` new ones come; a subclass may drop old ones here."""

    def compact(self) -> None:
        """Close the holes that forgotten tokens leave in the storage, and turn keys that moved. Done by itself."""
        if self._is_laid:
            return
        if len(self._cells.held()) < self._cells.count:
            kept = self._cells.compact()
            self._origins, self._ids = self._origins[kept], self._ids[kept]
            for layer in self._sequence_layers:
                if layer.is_initialized:
                    layer.restore(*layer.stored(kept))
        self._lay()

    def shown(self) -> list[SequenceLayer]:
        """The layers, with `keys` and `values` of the active sequence laid out as attention sees them."""
        self.compact()
        return self._sequence_layers

    def refuse_extended(self) -> None:
        """Refuse to be stored, if the model is inside `self_extend` or was for some of the tokens.

        Raises:
            UnsupportedModelError: some K and V are not those that the model computes alone.
        """
        refuse_extended(self.model)
        if self._was_extended:
            raise UnsupportedModelError(
                f"a cache of {type(self.model).__name__} holds {self.get_seq_length()} tokens, some of them computed "
                "inside self_extend, but what is stored is expected to be what the model computes alone. Fill a cache "
                "outside the block."
            )

    def state(self) -> dict[str, Tensor]:
        """Everything that the cache holds, by name: `ids` and `origins` by cell, `active`, cells and positions of each
        sequence, and K (rotated for the origins) and V of each layer, `[kv_heads, cells, width]`.
        """
        self.compact()
        found = {"ids": self._ids[: self._cells.count], "origins": self._origins[: self._cells.count]}
        found["active"] = torch.tensor(self.active)
        for number in self._cells:
            found[f"sequence.{number}"] = torch.stack(self._cells.row(number))
        for index, layer in enumerate(self._sequence_layers):
            if layer.is_initialized:
                for part, states in zip("kv", layer.stored(torch.arange(self._cells.count)), strict=True):
                    found[f"layer.{index}.{part}"] = states.contiguous()
        return found

    def restore(self, state: dict[str, Tensor]) -> None:
        """Hold what `state` gave, and nothing else.

        Args:
            state: of a cache for the same model; its tensors are copied.

        Raises:
            KeyError: something is missing; the cache is then as it was.
        """
        rows = {name: tensor for name, tensor in state.items() if name.startswith("sequence.")}
        cells = Cells.of({int(name.partition(".")[2]): (row[0], row[1]) for name, row in rows.items()}, state["ids"])
        layers = [SequenceLayer() for _ in self._sequence_layers]
        for index, layer in enumerate(layers if cells.count else ()):
            keys, values = (state[f"layer.{index}.{part}"] for part in "kv")
            layer.restore(keys.to(self._device), values.to(self._device))
        active, ids, origins = int(state["active"]), state["ids"].clone(), state["origins"].clone()
        self.active, self._cells, self._ids, self._origins = active, cells, ids, origins
        self._sequence_layers, self.layers = layers, [*layers]
        self._changed()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new K and V and give back all of the active sequence's.

        Args:
            key_states: `[1, kv_heads, tokens, head_dim]`, rotated for the positions that the model was handed.
            value_states: likewise.
            layer_idx: which layer.
            *args: unused; part of the interface.
            **kwargs: unused; part of the interface.

        Returns:
            K and V, `[1, kv_heads, all tokens, head_dim]`.

        Raises:
            ConfigError: more than one request, or positions that nobody handed to the model.
        """
        if layer_idx == 0:
            self._check(key_states)
            self._was_extended = self._was_extended or is_extended(self.model)
        shown = self._sequence_layers[layer_idx].write(self._cells.count, key_states, value_states)
        if layer_idx == len(self._sequence_layers) - 1:
            self._commit()
        return shown

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of the active sequence; as a negative number, as in transformers."""
        if not -self.get_seq_length() <= tokens_to_remove <= 0:
            raise ConfigError(
                f"crop({tokens_to_remove}) was asked of a sequence of {self.get_seq_length()} tokens, but a number "
                f"from {-self.get_seq_length()} to 0 is expected: the tokens to remove, negative."
            )
        self._cells.crop(self.active, -tokens_to_remove)
        self._show()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the active sequence has, whatever their positions."""
        return len(self._cells.row(self.active)[0])

    def activate_past_recording(self) -> None:
        """Called by assisted decoding; the last tokens can always be cropped."""

    def __bool__(self) -> bool:
        """Whether there is anything in the cache."""
        return self.get_seq_length() > 0

    def forward_begins(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Called by the hook on the model: gives it the positions of the active sequence.

        Raises:
            PromptError: more than one request, padding, or images.
        """
        given = arguments.get("input_ids")
        given = arguments.get("inputs_embeds") if given is None else given
        mask = arguments.get("attention_mask")
        if given is None or given.shape[0] != 1 or (mask is not None and (mask.dim() != 2 or not bool(mask.all()))):
            raise PromptError("one request without padding is expected: a SequenceCache continues one sequence.")
        if has_features(arguments):
            raise PromptError(
                f"{', '.join(other_inputs(arguments))} came with a SequenceCache, but text alone is expected: it "
                "gives a token the position behind the last, and images have positions of their own. Use DynamicCache."
            )
        tokens = given.shape[1]
        self.make_room(tokens)
        self.compact()
        positions = _positions(self._cells.next_position(self.active), tokens)
        self._pending = positions, given[0].cpu() if given.dim() == 2 else _unknown(tokens)
        return {**arguments, "position_ids": positions[None].to(given.device), "attention_mask": None}

    def forward_ends(self) -> None:
        """Called by the hook behind the model."""
        self._pending = _NOTHING

    def _number(self, sequence: int | None) -> int:
        if sequence is None:
            return self.active
        if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
            raise ConfigError(f"a sequence is named {sequence!r}, expected a number from 0 on.")
        return sequence

    def _changed(self) -> None:
        self._is_laid = False
        for layer in self._sequence_layers:
            layer.length = self.get_seq_length()

    def _show(self) -> None:
        for layer in self._sequence_layers:
            layer.show(self.get_seq_length())

    def _lay(self) -> None:
        cells, positions = self._cells.row(self.active)
        self._refuse_gaps(positions)
        in_order = len(cells) == self._cells.count and bool((cells == torch.arange(len(cells))).all())
        turns = self._turns(self._origins[cells], positions)
        for layer, style, turn in zip(self._sequence_layers, self._source.styles, turns, strict=True):
            layer.lay(cells, in_order, style, turn)
        self._is_laid = True
        self._show()

    def _turns(self, old: Tensor, new: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """For each layer the turn of its keys from old to new positions, `[tokens]` each; None where none moves."""
        if bool((old == new).all()):
            return [None] * len(self._sequence_layers)
        turns: dict[Any, tuple[Tensor, Tensor]] = {}
        found: list[tuple[Tensor, Tensor] | None] = []
        for style, before, after in zip(
            self._source.styles, self._source.tables(old), self._source.tables(new), strict=True
        ):
            if before is not None and after is not None and (style, id(before)) not in turns:
                turns[style, id(before)] = compose(style, before, after)
            found.append(turns.get((style, id(before))))
        return found

    def _refuse_gaps(self, positions: Tensor) -> None:
        """Some attention counts tokens; that is right only where tokens follow each other as positions do."""
        counts = counted_in_tokens(self.model, self._source)
        if counts and bool((positions.diff() != 1).any()):
            raise ConfigError(
                f"the active sequence has holes or repeats in its positions, but {counts}, not positions. Close the "
                "holes with shift()."
            )

    def _check(self, keys: Tensor) -> None:
        if keys.shape[0] != 1:
            raise ConfigError(f"a batch of {keys.shape[0]} was given, but a SequenceCache continues one sequence.")
        if self._pending[0].numel() == 0:
            if not self._is_laid or self._cells.next_position(self.active) != self.get_seq_length():
                raise ConfigError(
                    "the model was called with positions that are not the cache's: tokens were moved or removed. Call "
                    "the model inside `with cache:`, or through generate()."
                )
            self._pending = _positions(self.get_seq_length(), keys.shape[2]), _unknown(keys.shape[2])

    def _commit(self) -> None:
        positions, ids = self._pending
        self._cells.append(self.active, len(positions))
        self._origins = torch.cat([self._origins[: self._cells.count - len(positions)], positions])
        self._ids = torch.cat([self._ids[: self._cells.count - len(positions)], ids])
        self._pending = _NOTHING
        self._show()


def _positions(start: int, tokens: int) -> Tensor:
    return torch.arange(start, start + tokens)


def _unknown(tokens: int) -> Tensor:
    return torch.full((tokens,), UNKNOWN)
