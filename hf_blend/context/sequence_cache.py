# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""`SequenceCache`: a cache for stock `generate` whose tokens can be removed, shared, moved and divided.

    cache = SequenceCache(model)
    model.generate(**inputs, past_key_values=cache)  # cache=cache from transformers 5.24 on
    cache.copy(0, 1)                  # a second sequence over the same storage
    cache.remove(1, 100, 200)         # without the tokens at positions 100 … 199
    cache.shift(1, 200, None, -100)   # the rest closes up; its keys are rotated when they are next needed
    cache.use(1)                      # the next forward continues sequence 1
    cache.fork(8)                     # the next forward continues eight sequences, a batch over the same storage

A key is stored as it was computed and rotated from there each time, so any number of moves costs the precision of one.
The semantics are those of llama.cpp's KV cache, except that a shift moves a shared token for one sequence only. As in
its unified cache, active sequences attend to the storage as it is, and a mask hides the tokens of other sequences.
With `SequenceCache(model, kv_bits=8)` the storage has 8 bits, each token quantised once.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import count, islice
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import Cache

from ..cache.layers import ROOM_TOKENS, SPARE_SHARE, Pair, as_indices, check_negative
from ..config import check_kv_bits
from ..errors import ConfigError, PromptError, UnsupportedModelError
from ..model.anatomy import decoder_layers, is_extended, refuse_extended, text_config
from ..model.attention import ROWS, STOCK, layers_handing_on, register_attention
from ..model.author import Author, author_of, refuse_other_author
from ..model.cache_keyword import cache_argument
from ..model.checks import CheckedModel, Use, ensure_passed
from ..model.hooks import ForwardHooks, asking_generate, is_assisting
from ..model.modality import other_inputs
from ..model.placement import input_device
from ..model.row_masks import MadeLines
from ..prefill.layout import layout_of
from ..prompt.history import UNKNOWN, refuse_other_prompt
from .sequence_layer import QuantisedSequenceLayer, SequenceLayer
from .sequence_state import check_state, layer_of, sequences_of
from .tables import TableSource, counted_in_tokens, regime_tokens
from .token_table import TokenTable, described, grown, mask_of

MASKED = ("eager", STOCK)  # attention implementations that take any mask
CHECKS = "hf_blend.context.checks"
MOVE = Use(
    "move",
    CHECKS,
    "a sequence that {} computed cannot be moved",
    "Use a fresh prefill instead, or pass allow_unverified=True to use it all the same.",
)
SHARE = Use("share", CHECKS, "several sequences of {} cannot share cells", "Continue one at a time with use().")
CONTINUE_ONLY = (
    "Pass [*cache.tokens(), *new], or call use() with another sequence, of which closest() names the one that begins "
    "as the prompt does, or with a new one, or reset()."
)
RECOMPUTE = (
    "Go back to what the model was, have the tokens computed again with recompute(), or continue another sequence: "
    "closest() says which."
)
_NOTHING = tuple(torch.empty((0, 0), dtype=dtype) for dtype in (torch.long, torch.long, torch.bool))


class SequenceCache(Cache):
    """A `transformers.Cache` of several sequences over one storage, which are continued alone or as a batch.

    Works with greedy search, sampling, streaming and assisted decoding of one request, and with a batch of sequences
    that share what they have in common: sampling several answers, beams, many questions behind one prefix. `generate`
    needs nothing more; around calls of the model itself write `with cache:`, which lets the cache hand the model its
    positions.

    Attributes:
        batch: the sequences that the next forward continues, by row.
        kv_bits: 8 or 4 holds K and V in so many bits; None in the model's dtype.
    """

    layers: list[SequenceLayer]  # type: ignore[assignment]

    def __init__(self, model: nn.Module, *, kv_bits: int | None = None, allow_unverified: bool = False) -> None:
        """Begin empty, with sequence 0 active.

        Args:
            model: a causal language model of transformers whose keys can be moved. The first cache of a model tests
                that, with some tens of tokens.
            kv_bits: 8 or 4 to hold K and V in so many bits, but for the last 32 to 63 tokens, and 32 more for each
                further active sequence; None holds them in the model's dtype.
            allow_unverified: use a model that fails the self-test, with one warning.

        Raises:
            ConfigError: `kv_bits` is something else.
            UnsupportedModelError: they cannot; the layer is named.
        """
        check_kv_bits(kv_bits)
        self.model, self.kv_bits = model, kv_bits
        self._source, self._most_tokens = TableSource.of(model, below_regime=True), regime_tokens(model)
        ensure_passed(CheckedModel(model), MOVE, allow_unverified)
        self._device, self._allow_unverified = input_device(model), allow_unverified
        self._hooks = ForwardHooks(self, model)
        Cache.__init__(self, layers=[*self._empty_layers()])
        self._begin()

    def _begin(self) -> None:
        """Hold nothing."""
        self.batch: tuple[int, ...] = (0,)
        self._table = TokenTable()
        self._dirty = False  # the columns are not those of the active sequences
        self._pending = _NOTHING  # positions and ids of new tokens, and which are no padding
        self._visible: Tensor | None = None  # columns that each active sequence sees; None: all
        self._was_extended = False
        self._authors: list[Author] = []  # by the number that the table has of them
        self._author = 0  # the number of who computes new tokens
        self._is_new_turn = True  # who computes is compared in the next forward
        self.layers = self._empty_layers()

    @property
    def nbytes(self) -> int:
        """Bytes of K and V that the cache holds, spare room included; with `kv_bits` scales and tables too."""
        shared = {id(tensor): tensor.nbytes for layer in self.layers for tensor in layer.view_tensors}
        return sum(layer.nbytes for layer in self.layers) + sum(shared.values())

    @property
    def is_compileable(self) -> bool:
        """False. `generate` asks before each forward: the model is watched from here."""
        self._hooks.watch_model()
        return False

    def __enter__(self) -> Self:
        """Hand the model its positions in every call with this cache, until the block ends."""
        self._is_new_turn = True
        self._hooks.watch_model(stay=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the model as it was."""
        self.forward_ends()
        self._hooks.leave(stop=True)

    @property
    def active(self) -> int:
        """The first of the sequences that the next forward continues."""
        return self.batch[0]

    @property
    def sequences(self) -> list[int]:
        """The numbers of all sequences that were written to and not forgotten, in increasing order."""
        return [number for number in self._table if number >= 0]

    def tokens(self, sequence: int | None = None) -> list[int]:
        """The token ids of a sequence (None: the active one), in the order of attention; -1 where unknown."""
        return self._table.ids[self._table.row(self._number(sequence))[0]].tolist()

    def positions(self, sequence: int | None = None) -> list[int]:
        """Their positions, in the order of `tokens`."""
        return self._table.row(self._number(sequence))[1].tolist()

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
        self._take([0] * sequences)
        return [*self.batch]

    def closest(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Find the sequence that has most first tokens in common with a prompt.

        Returns:
            Its number, and how many tokens they have in common. Tokens that another model computed do not count.
        """
        return self._closest(token_ids, self._number_of(author_of(self.model)), self.sequences)

    @torch.no_grad()
    def recompute(self) -> int:
        """Compute the active sequence again if the model has changed since.

        An adapter may have been switched, weights written, the dtype or the attention changed. The old K and V are
        kept for when the model is what it was: then only tokens that came since are computed. So two adapters may
        alternate; the storage holds the tokens once for each, until `reset` or `keep`.

        Returns:
            How many tokens were computed.

        Raises:
            ConfigError: several sequences are active, ids are not known, positions are not 0, 1, 2 …, or the dtype has
                changed and there are other sequences.
            UnsupportedModelError: the model is refused.
        """
        number, now, ids = self.active, author_of(self.model), self.tokens()
        author, authors = self._number_of(now), self._table.authors[self._table.row(number)[0]]
        if bool((authors == author).all()):
            return 0
        if len(self.batch) > 1 or UNKNOWN in ids or self.positions() != [*range(len(ids))]:
            raise ConfigError(
                f"{len(ids)} tokens of sequence {number}, of {len(self.batch)} active, were to be computed again, but "
                "one active sequence, known ids, and positions 0, 1, 2 … are expected. Prefill again."
            )
        before, start = (self._table, self.layers), 0
        if any(self._authors[old].form != now.form for old in authors.unique().tolist()):
            self._refuse_others(number, ids)
            self._table, self.layers = TokenTable(), self._empty_layers()
        else:
            self._table = deepcopy(self._table)
            best, start = self._closest(ids, author, self._table)
            cells, positions = self._table.row(best)
            self._table.take([number], [-1 - number])  # a number that no caller uses
            self._table.hold(number, cells[:start].clone(), positions[:start].clone())
        try:
            self._changed()
            with self:
                if new := ids[start:]:
                    new_ids = torch.tensor([new], device=self._device)
                    self.model(new_ids, **cache_argument(self.model, self), use_cache=True, logits_to_keep=1)
        except BaseException:
            self._table, self.layers = before
            self._changed()
            raise
        return len(ids) - start

    def _refuse_others(self, number: int, ids: list[int]) -> None:
        """Refuse to replace storage that other sequences share."""
        if others := {*self.sequences} - {number}:
            raise ConfigError(
                f"{len(ids)} tokens of sequence {number} were to be computed again in another dtype, but the storage "
                f"holds {len(others)} other sequences, where one alone is expected. Call keep({number}) first."
            )

    def computed_by(self, sequence: int | None = None) -> Author | None:
        """The author of the tokens of a sequence, or of all sequences; None where there are no tokens.

        Raises:
            ConfigError: the tokens have several authors.
        """
        numbers = self.sequences if sequence is None else [self._number(sequence)]
        cells = torch.cat([self._table.ids[:0], *(self._table.row(number)[0] for number in numbers)])
        authors = self._table.authors[cells].unique().tolist()
        if len(authors) > 1:
            raise ConfigError(
                f"{len(cells)} tokens of {len(numbers)} sequences were computed by {len(authors)} models (adapters, "
                "weights, dtypes or attentions that alternated), but those of one are expected. Name one sequence, or "
                "have it computed again with recompute()."
            )
        return self._authors[authors[0]] if authors else None

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

    def make_room(self, tokens: int) -> None:
        """Called before `tokens` new ones come; a subclass may drop old ones here."""

    def compact(self) -> None:
        """Free the storage of forgotten tokens and rotate keys that moved, as the next forward would do."""
        self._close_holes()
        self._ready()

    def materialize(self) -> list[SequenceLayer]:
        """The layers, with `keys` and `values` of the first active sequence alone, in the order of its tokens."""
        self._refuse_gaps(self._table.row(self.active)[1])
        self._close_holes()
        self._arrange([self.active], may_hide=False)
        self._dirty = self._visible is not None or len(self.batch) > 1
        return self.layers

    def append(self, token_ids: Sequence[int], layers: Sequence[Pair], author: Author | None = None) -> None:
        """Append tokens to the active sequence, with K and V that `author` computed; None: the model as it is now.

        Shapes: K and V of each layer `[1, kv_heads, tokens, width]`, K rotated for the positions behind the last.
        """
        self._claim(author)
        self.make_room(len(token_ids))
        self._ready()
        ids = torch.tensor([list(token_ids)])
        positions = self._table.next_position(self.active) + torch.arange(ids.shape[1])[None]
        self._refuse_crossing(positions)
        self._pending = positions, ids, torch.ones(ids.shape, dtype=torch.bool)
        for index, pair in enumerate(layers):
            self.update(*pair, index)

    def refuse_extended(self) -> None:
        """Refuse to be saved if the model is inside `self_extend`, or was when it computed some of the tokens."""
        refuse_extended(self.model)
        if self._was_extended:
            raise UnsupportedModelError(
                f"a cache of {type(self.model).__name__} holds {self.get_seq_length()} tokens, some of them computed "
                "inside self_extend, but what is stored is expected to be what the model computes alone. Fill a cache "
                "outside the block."
            )

    def state(self, sequence: int | None = None) -> dict[str, Tensor]:
        """The tensors of the cache, or of one sequence, by the names in `sequence_state`.

        The cells of one sequence are numbered from 0 on.
        """
        table, numbers = self._table, self.sequences if sequence is None else [self._number(sequence)]
        if not {*numbers} <= {*table}:
            raise ConfigError(f"there is no sequence {sequence}, expected one of {self.sequences}.")
        if sequence is None:
            self._close_holes()
        own = {number: table.row(number) for number in numbers}
        cells = torch.cat([table.ids[:0], *(row for row, _ in own.values())]).unique()
        rows = {number: torch.stack([torch.searchsorted(cells, row), at]) for number, (row, at) in own.items()}
        active = self.active if sequence is None else sequence
        state = {"ids": table.ids[cells], "origins": table.origins[cells], "active": torch.tensor(active)}
        state |= {f"sequence.{number}": row for number, row in rows.items()}
        state |= {} if self.kv_bits is None else {"kv_bits": torch.tensor(self.kv_bits)}
        for index, layer in enumerate(self.layers):
            if layer.is_initialized and len(cells):
                state |= {f"layer.{index}.{name}": tensor for name, tensor in layer.parts(cells).items()}
        return state

    def restore(self, state: dict[str, Tensor], author: Author | None = None, sequence: int | None = None) -> None:
        """Replace all sequences by what `state` gave, or only `sequence` by the state's only one.

        `author` computed the tokens; None: the model as it is now. First tokens of `sequence` that another sequence
        has with the same bits are shared with it. With `kv_bits`, K and V that are not quantised yet are quantised.
        """
        rows, layers = sequences_of(state), self._layers_of(state)
        number = self._number_of(author_of(self.model) if author is None else author)
        cells_about = described(state["ids"], state["origins"], number)
        self._is_new_turn = True
        if sequence is None:
            own_rows = {number: (cells.clone(), positions.clone()) for number, (cells, positions) in rows.items()}
            self.batch, self._table, self.layers = (int(state["active"]),), TokenTable(own_rows, cells_about), layers
        else:
            ((cells, positions),) = rows.values()
            self._take_sequence(self._number(sequence), cells, positions, layers, cells_about)
        self._changed()

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Raise EntryFault for tensors that `state` of a cache of this model never gives."""
        check_state(state, layout_of(self.model), self.kv_bits)

    def _take_sequence(
        self, number: int, cells: Tensor, positions: Tensor, saved: list[SequenceLayer], about: Tensor
    ) -> None:
        """Replace a sequence by cells of saved layers, of which `about`, `[3, cells]`, says what they are."""
        shared = self._shared(about[:, cells], positions, [layer.stored(cells) for layer in saved])
        self._table.hold(number, shared, positions[: len(shared)])
        new, order = cells[len(shared) :].sort()
        stored = self._store_cells(about, saved, new)[order.argsort()]
        self._table.hold(number, torch.cat([self._table.row(number)[0], stored]), positions.clone())

    def _store_cells(self, about: Tensor, others: list[SequenceLayer], cells: Tensor) -> Tensor:
        """Store ascending cells of other layers, of which `about` is `[3, all cells]`; returns their numbers here."""
        if not len(cells):
            return cells
        table, end = self._table, self._table.count
        start = self.layers[0].fixed_cells(end)
        fixed = int(torch.searchsorted(cells, others[0].fixed_cells(about.shape[1])))
        for layer, other in zip(self.layers, others, strict=True):
            layer.add(end, other.parts(cells))
        for index, span in ((start, cells[:fixed]), (end + fixed, cells[fixed:])):
            table.insert(index, about[:, span])
        return torch.cat([torch.arange(start, start + fixed), torch.arange(end + fixed, end + len(cells))])

    def _shared(self, about: Tensor, positions: Tensor, layers: list[tuple[Tensor, ...]]) -> Tensor:
        """The cells of the sequence that holds most of the first tokens with the same bits."""
        table, longest = self._table, torch.empty(0, dtype=torch.long)
        for number in table:
            cells, at = (column[: len(positions)] for column in table.row(number))
            same = (table.about(cells) == about[:, : len(cells)]).all(0) & (at == positions[: len(cells)])
            for layer, parts in zip(self.layers, layers, strict=False):
                for stored, column in zip(layer.stored(cells), parts, strict=True):
                    same &= (stored == column[:, : len(cells)]).flatten(2).all(2).all(0).cpu()
            length = int(same.long().cumprod(0).sum())
            longest = cells[:length] if length > len(longest) else longest
        return longest

    def _empty_layers(self) -> list[SequenceLayer]:
        bits = self.kv_bits
        return [SequenceLayer() if bits is None else QuantisedSequenceLayer(bits) for _ in decoder_layers(self.model)]

    def _layers_of(self, state: dict[str, Tensor]) -> list[SequenceLayer]:
        """Layers that hold what `state` gave."""
        bits = int(state["kv_bits"]) if "kv_bits" in state else None
        if bits not in (None, self.kv_bits):
            raise ConfigError(
                f"K and V in {bits} bits came to a cache with kv_bits={self.kv_bits}, but kv_bits={bits} is expected. "
                "Make the cache with it."
            )
        layers = self._empty_layers()
        for index, layer in enumerate(layers if len(state["ids"]) else ()):
            layer.add(0, {name: tensor.to(self._device) for name, tensor in layer_of(state, index).items()})
        return layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new K and V, and return all K and V that the active sequences attend to.

        Shapes: `[sequences, kv_heads, tokens, head_dim]` → `[sequences, kv_heads, all tokens, head_dim]`.
        """
        if layer_idx == 0:
            self._check(key_states)
            self._was_extended = self._was_extended or is_extended(self.model)
        columns = self.layers[layer_idx].write(self._table.count, key_states, value_states)
        if layer_idx == len(self.layers) - 1:
            self._commit()
        return columns

    def reset(self) -> None:
        """Forget every sequence; sequence 0 is active then, as in a new cache."""
        self.forward_ends()  # it was interrupted
        self._begin()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of each active sequence; their number is negative, and may be more than there are."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 gives a tensor
        check_negative(tokens_to_remove, self.get_seq_length())
        for number in reversed(self.batch):  # the last has the last cells
            self._table.crop(number, -tokens_to_remove)
        last = self._table.row(self.active)[0][-1:]
        if self._visible is not None or bool((last + 1 != self._table.count).any()):  # or others hold what was cropped
            self._changed()
        else:
            self._show(self.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each active sequence by the one at an index of the batch; called by beam search."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: Any) -> None:
        """Continue only some of the active sequences, `[kept]` indices of `batch`, and forget the others."""
        self._take(as_indices(indices).tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue each active sequence `repeats` times, side by side, sharing what they hold."""
        self._take([index for index in range(len(self.batch)) for _ in range(repeats)])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens the active sequence has; of a batch, the longest one."""
        length = max(len(self._table.row(number)[0]) for number in self.batch)
        if length and (call := asking_generate()) is not None:
            self._is_new_turn = True
            if call.ids is not None:
                rows = [self.tokens(number) for number in self.batch]
                refuse_other_prompt(call.ids, call.mask, length, rows, CONTINUE_ONLY)
        return length

    def activate_past_recording(self) -> None:
        """Called when assisted decoding begins a turn."""
        self._is_new_turn = True

    def __bool__(self) -> bool:
        """Whether there is anything in the cache."""
        return self.get_seq_length() > 0

    def forward_begins(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Called by the hook on the model: returns its arguments with positions and mask of the active sequences."""
        new, real = self._new_tokens(arguments)
        if others := other_inputs(self.model, arguments):
            raise PromptError(
                f"{', '.join(others)} came with a SequenceCache, but text alone is expected: it "
                "gives a token the position behind the last, and images have positions of their own. Use DynamicCache."
            )
        self._ensure_author(real.shape[1])
        self._refuse_from_start(new, arguments.get("position_ids"))
        self.make_room(real.shape[1])
        self._ready()
        starts = torch.tensor([[self._table.next_position(number)] for number in self.batch])
        positions = (starts + real.long().cumsum(1) - 1).clamp_min(0)
        self._refuse_crossing(positions)
        self._pending = positions, new.cpu() if new.dim() == 2 else torch.full(real.shape, UNKNOWN), real
        changed = {**arguments, "position_ids": positions.to(new.device), "attention_mask": None}
        if self._visible is not None:
            changed["attention_mask"] = self._made_mask(self._visible, real)
            if self._attention == STOCK and len(layers_handing_on(self.model)) == len(self.layers):
                register_attention(STOCK)
                changed[ROWS] = MadeLines(changed["attention_mask"])
        return changed

    def forward_ends(self, failed: bool = False) -> None:
        """Called by the hook behind the model."""
        self._hooks.leave()
        self._pending = _NOTHING

    def _new_tokens(self, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The new tokens, and which of them are no padding, `[sequences, tokens]`."""
        new, mask, rows = arguments.get("input_ids"), arguments.get("attention_mask"), len(self.batch)
        new = arguments.get("inputs_embeds") if new is None else new
        if new is None or new.shape[0] != rows or (mask is not None and mask.dim() != 2):
            count = 0 if new is None else new.shape[0]
            raise PromptError(
                f"{count or 'nothing'} came for {rows} active sequences, but one request without padding is expected "
                "for one, and a row for each of several. With num_beams or num_return_sequences generate makes so "
                f"many rows of each prompt: call fork({max(2, count)}) first, or use() with sequences of their own."
            )
        if mask is None:
            return new, torch.ones(new.shape[:2], dtype=torch.bool)
        mask = mask.cpu().bool()
        real = mask[:, -new.shape[1] :]
        cached = torch.tensor([len(self._table.row(number)[0]) for number in self.batch])
        dropped = mask.sum(1) - real.sum(1) - cached  # all ones may also count what a window has dropped, of all alike
        hides_nothing = bool(mask.all()) and (rows == 1 or bool((dropped == dropped[0].clamp_min(0)).all()))
        if not (hides_nothing or (rows > 1 and not dropped.any())):
            raise PromptError(
                f"the attention mask counts {mask.sum(1).tolist()} tokens, but one request without padding is "
                f"expected, or a batch whose rows count the {cached.tolist()} tokens that are held and the new ones."
            )
        return new, real

    def _refuse_from_start(self, new: Tensor, positions: Any) -> None:
        """Refuse a whole prompt whose first tokens are in the cache: assisted decoding of transformers passes it."""
        cached, tokens = self.get_seq_length(), new.shape[1]
        if cached and tokens > cached and isinstance(positions, Tensor) and int(positions.max()) + 1 == tokens:
            raise PromptError(
                f"{tokens} tokens from position 0 on came behind {cached} that are held, but new tokens alone are "
                "expected: assisted decoding of transformers passes the whole prompt. Continue without an assistant, "
                "or reset() the cache."
            )

    def _made_mask(self, visible: Tensor, real: Tensor) -> Tensor:
        """The mask of a forward, in the form that the model's attention takes."""
        mask = mask_of(visible, real)
        if self._attention == STOCK:
            return mask
        hidden = torch.zeros(mask.shape, dtype=self.model.dtype, device=mask.device)
        return hidden.masked_fill_(~mask, float("-inf"))

    @property
    def _attention(self) -> str:
        return getattr(text_config(self.model), "_attn_implementation", None) or ""

    def _ensure_shareable(self) -> None:
        """Refuse a model whose attention does not take a mask that hides cells."""
        counts = counted_in_tokens(self.model, self._source)
        if not counts and self._attention in MASKED:
            ensure_passed(CheckedModel(self.model), SHARE, self._allow_unverified)
            return
        why = counts or f"its attention is {self._attention!r}, and one of {', '.join(MASKED)} is expected"
        raise UnsupportedModelError(
            f"several sequences of {type(self.model).__name__} cannot be continued at once over shared cells: {why}. "
            "Continue one at a time with use(), or use a DynamicCache for each."
        )

    def _may_hide(self) -> bool:
        """Whether a mask can hide the tokens of other sequences; else a copy without them is needed."""
        try:
            self._ensure_shareable()
        except UnsupportedModelError:
            return False
        return True

    def _number(self, sequence: int | None) -> int:
        if sequence is None:
            return self.active
        if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 0:
            raise ConfigError(f"a sequence is named {sequence!r}, expected a number from 0 on.")
        return sequence

    def _closest(self, token_ids: Sequence[int], author: int, sequences: Iterable[int]) -> tuple[int, int]:
        """The sequence with most first tokens of a prompt that an author computed, and how many these are."""
        ids, best = torch.tensor(list(token_ids), dtype=torch.long), (self.active, 0)
        for number in sequences:
            cells, positions = (column[: len(ids)] for column in self._table.row(number))
            order = torch.arange(len(cells))
            prompt_cells = described(ids[: len(cells)], order, author)
            same = (self._table.about(cells) == prompt_cells).all(0) & (positions == order)
            length = int(same.long().cumprod(0).sum())
            best = (number, length) if length > best[1] else best
        return best

    def _number_of(self, author: Author) -> int:
        """The number that the table has of an author."""
        if author not in self._authors:
            self._authors.append(author)
        return self._authors.index(author)

    def _ensure_author(self, new: int) -> None:
        """Compare authors once in each turn, when its first `new` tokens come."""
        if self._is_new_turn or (new > 1 and not is_assisting()):
            self._claim()

    def _claim(self, author: Author | None = None) -> None:
        """Set the author of new tokens, None: the model as it is now; refuse to continue those of another author."""
        now = author_of(self.model) if author is None else author
        self._is_new_turn, self._author = False, self._number_of(now)
        for number in self.batch:
            cells = self._table.row(number)[0]
            others = self._table.authors[cells]
            others = others[others != self._author]
            if others.numel():
                refuse_other_author(self._authors[int(others[0])], now, len(others), RECOMPUTE)

    def _take(self, indices: list[int]) -> None:
        """Replace the active sequences by copies of those at some indices of the batch."""
        free = (number for number in count() if number not in {*self._table, *self.batch})
        numbers = [*self.batch[: len(indices)], *islice(free, max(0, len(indices) - len(self.batch)))]
        sources, gone = [self.batch[index] for index in indices], self.batch[len(indices) :]
        self.use(*numbers)
        self._table.take(sources, numbers)
        self._table.forget(gone)
        self._changed()

    def _changed(self) -> None:
        self._dirty = True
        for layer in self.layers:
            layer.length = self.get_seq_length()

    def _show(self, columns: int) -> None:
        for layer in self.layers:
            layer.show(columns)

    def _close_holes(self, allowed: int = 0) -> None:
        """Free the cells of no sequence, if there are more than `allowed`."""
        if self._table.count - len(self._table.used_cells()) <= allowed:
            return
        cells = self._table.compact()
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep(cells)
        self._changed()

    def _ready(self) -> None:
        """Prepare the columns of K and V that the next forward attends to."""
        if not self._dirty:
            return
        rows = [self._table.row(number) for number in self.batch]
        for _, positions in rows:
            self._refuse_gaps(positions)
            self._refuse_crossing(positions)
        self._close_holes(0 if len(rows) == 1 else max(ROOM_TOKENS, self._table.count // SPARE_SHARE))
        is_all = len(rows) == 1 and len(rows[0][0]) == self._table.count
        self._arrange(self.batch, may_hide=not is_all and self._may_hide())
        self._dirty = False

    def _arrange(self, sequences: Sequence[int], may_hide: bool) -> None:
        """Make the columns those of some sequences."""
        view = self._table.view(sequences, may_hide)
        rotations = self._source.rotations(self._table.origins[view.cells], view.positions)
        for layer, style, by in zip(self.layers, self._source.styles, rotations, strict=True):
            layer.arrange(view.cells, view.in_order, style, by)
        self._visible = None if view.visible is None else view.visible.to(self._device)
        self._show(len(view.cells))

    def _refuse_crossing(self, positions: Tensor) -> None:
        """Refuse positions from which on the rotary frequencies are others: cached keys would have the old ones."""
        most = self._most_tokens
        if most is not None and positions.numel() and int(positions.max()) >= most:
            raise PromptError(
                f"position {int(positions.max())} came to a cache of {type(self.model).__name__}, whose rotary "
                f"frequencies change with the length, but less than {most} is expected, where they stay the same. Use "
                "a ShiftCache with a window of so many tokens, or a BlendCache."
            )

    def _refuse_gaps(self, positions: Tensor) -> None:
        """Refuse gaps between positions if the attention measures distances in tokens."""
        counts = counted_in_tokens(self.model, self._source)
        if counts and bool((positions.diff() != 1).any()):
            raise ConfigError(
                f"the active sequence has holes or repeats in its positions, but {counts}, not positions. Close the "
                "holes with shift()."
            )

    def _check(self, keys: Tensor) -> None:
        if keys.shape[0] != len(self.batch):
            raise ConfigError(
                f"a batch of {keys.shape[0]} was given, but a row for each of {len(self.batch)} active sequences is "
                "expected; num_beams and num_return_sequences make several of a prompt. Call use() or fork() first."
            )
        if self._pending[0].numel() == 0:
            self._ensure_author(keys.shape[2])
            if (
                self._dirty
                or self._visible is not None
                or self._table.next_position(self.active) != self.get_seq_length()
            ):
                raise ConfigError(
                    "the model was called with positions that are not the cache's: tokens were moved or removed, or "
                    "sequences share the storage. Call the model inside `with cache:`, or through generate()."
                )
            shape = (1, keys.shape[2])
            positions = self.get_seq_length() + torch.arange(shape[1])[None]
            self._refuse_crossing(positions)
            self._pending = positions, torch.full(shape, UNKNOWN), torch.ones(shape, dtype=torch.bool)

    def _commit(self) -> None:
        positions, ids, real = self._pending
        self._table.write(self.batch, positions, ids, real, self._author)
        self._visible = None if self._visible is None else grown(self._visible, real)
        self._pending = _NOTHING
        for layer in self.layers:
            layer.commit()
        self._show(self.layers[0].length + real.numel())


class ShiftCache(SequenceCache):
    """A `SequenceCache` with a context window that shifts, so that generation continues past it, as with llama.cpp.

    When the window is full, the first tokens are kept, the older half of the rest is dropped, and the remaining tokens
    move up: their keys are rotated to their new positions. They stay as they were computed, with the dropped tokens
    before them. A prompt longer than the window is read in parts with `generate(..., prefill_chunk_size=…)`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        window_tokens: int | None = None,
        keep_tokens: int = 4,
        kv_bits: int | None = None,
        allow_unverified: bool = False,
    ) -> None:
        """Begin empty.

        Args:
            model: a causal language model of transformers.
            window_tokens: most tokens that the cache holds; None is the model's `max_position_embeddings`, or just
                below the length at which its rotary frequencies change (longrope, dynamic).
            keep_tokens: how many of the first tokens are never dropped, such as BOS and a system prompt.
            kv_bits: 8 or 4 holds K and V in so many bits; None in the model's dtype.
            allow_unverified: use a model that fails the self-test, with one warning.

        Raises:
            ConfigError: there is no room between what is kept and the window, or `kv_bits` is neither 8 nor 4.
            UnsupportedModelError: the model's keys cannot be moved; the layer is named.
        """
        super().__init__(model, kv_bits=kv_bits, allow_unverified=allow_unverified)
        longest = self._most_tokens or getattr(text_config(model), "max_position_embeddings", None)
        self.window_tokens = int((longest if window_tokens is None else window_tokens) or 0)
        self.keep_tokens, self.shifts = keep_tokens, 0
        if self._most_tokens is not None and self.window_tokens > self._most_tokens:
            raise ConfigError(
                f"window_tokens is {self.window_tokens}, but {self._most_tokens} at most is expected: the rotary "
                f"frequencies of {type(model).__name__} change with the length, and keys of both kinds cannot stand "
                "beside each other. Give a smaller window_tokens, or none."
            )
        check_window(self.window_tokens, keep_tokens)

    def reset(self) -> None:
        """Forget every sequence, and that anything was shifted."""
        super().reset()
        self.shifts = 0

    def make_room(self, tokens: int) -> None:
        """Drop at least half of the tokens behind the kept ones of each active sequence, if new ones do not fit."""
        keep, way_out = self.keep_tokens, "Pass prefill_chunk_size to generate(), or shorten the prompt."
        for number in self.batch:
            dropped = dropped_tokens(self._table.next_position(number), tokens, self.window_tokens, keep, way_out)
            if dropped:
                self.remove(number, keep, keep + dropped)
                self.shift(number, keep + dropped, None, -dropped)
                self.shifts += 1


def check_window(window_tokens: int, keep_tokens: int) -> None:
    """Refuse a window without room behind what it keeps."""
    if not 0 <= keep_tokens < window_tokens - 1:
        raise ConfigError(
            f"keep_tokens is {keep_tokens} and window_tokens {window_tokens}, but at least two tokens must fit behind "
            "those that are kept. Give a larger window_tokens."
        )


def dropped_tokens(cached: int, new: int, window_tokens: int, keep_tokens: int, way_out: str) -> int:
    """How many tokens behind the kept ones are dropped so that new ones fit: none, or at least half of them."""
    over, rest = cached + new - window_tokens, max(0, cached - keep_tokens)
    if over > rest:
        raise PromptError(
            f"{new} new tokens do not fit a window of {window_tokens}, of which {keep_tokens} are kept. {way_out}"
        )
    return max(over, rest // 2) if over > 0 else 0
