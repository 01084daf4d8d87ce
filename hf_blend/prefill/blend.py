# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fusor: one forward of the model in which stored KV stands in for most tokens.

    layer 0 … check-1   every token that has no exact KV is computed
    check layer         its K and V are computed for all of these and compared with the stored ones; the tokens are
                        chosen; attention and MLP run for the chosen and the question only
    deeper layers       only those are computed, against their own fresh K/V and the stored K/V of all others
    last layer          past its K/V only the rows whose output is wanted

To look before paying, a layer is run until its K and V reach the cache and left there by a private exception; then it
is run again for the chosen rows. The layer's code is the model's own.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import BlendConfig
from ..errors import UnsupportedModelError
from ..model.anatomy import KnownRows, LayerCall, has_indexer
from ..model.attention import AttentionCapture, StopForward
from ..model.masks import looks_ahead
from ..model.mixer import Mixer, Spans
from ..rotary.tables import Table, rotary_table
from ..selectors.attention import Attention
from ..selectors.base import KV
from .choice import Chooser
from .context import PrefillContext
from .correcting import Repair
from .mixers import MixerRows, at_layers_that_keep, keeps_keys, keeps_states, side_by_side
from .noting import AttentionNotes
from .places import PastTokens
from .plan import PlacedChunk
from .probing import AttentionObserver, sight
from .report import BlendReport, Work
from .row_masks import RowMasks
from .rows import Rows

logger = logging.getLogger(__name__)

MISMATCH_LIMIT = 0.2  # at layer 0, by the token alone: another token differs by about 1, int4 of a real model by 0.13


class Prefill:
    """State of one forward; made when it begins, gone when it ends."""

    def __init__(
        self, context: PrefillContext, chooser: Chooser, repair: Repair, listener: AttentionObserver | None = None
    ) -> None:
        """Prepare a forward."""
        plan, layers, past = context.plan, context.layers, context.past
        self._model, self._layers, self._plan, self._past = context.model, layers, plan, past
        self._chooser: Any = chooser  # None: nothing is chosen
        self._realigner, self._report = context.realigner, context.report
        self._wanted_rows, self._repair = min(context.wanted_rows, plan.real.shape[1]), repair
        self._beyond_text = context.beyond_text
        self._tokens = plan.real.shape[1]
        self._padded = min(plan.counts) < self._tokens
        self._schedule(chooser, context.config, context.mixers)
        self._masks = RowMasks(context.model, layers, past, self._tokens)
        self._exact, self._reusable = plan.where(exact=True), plan.where(exact=False)
        self._end = self._tokens - self._wanted_rows  # an output is expected from here on
        self._exact[:, self._end :] = self._reusable[:, self._end :] = False
        exact, self._stored_counts = plan.stored_counts(True, self._end), plan.stored_counts(False, self._end)
        known = zip(plan.counts, exact, self._stored_counts, strict=True)
        self._fresh_counts = [count - sum(stored) for count, *stored in known]
        self._chosen_counts: list[int] | None = None  # of the reusable tokens those that are computed; None: all
        self._known_rows = KnownRows()
        self._padding: dict[torch.device, Tensor] = {}
        self._rows: Rows | None = None  # None: all tokens, as the model passes them
        self._opened: dict[int, KV] = {}
        self._whole_table: Table | None = None  # of all tokens, past and new, where a layer needs it
        self._indexed: dict[int, Tensor] = {}  # the new tokens' indexer keys, `[batch, tokens, width]`
        devices = {*getattr(context.model, "hf_device_map", {}).values()}
        self._opens_several = len(devices) < 2  # several layers at once, until one proves to be unlike its neighbour
        self._settled = 0  # the layers before this one are done
        self._used: set[int] = set()  # the layers that handed over K and V; others may be opened with them
        self._ahead: dict[int, int] = {}  # layer → the first of those that were written with it
        self._is_looking = False
        self._is_shared = False  # its layers are those of another forward, to which they are left open
        self._glance: AttentionCapture | None = None
        self._listener = listener
        self._notes = self._new_notes()

    def _schedule(self, chooser: Chooser, config: BlendConfig, mixers: Sequence[Mixer | None]) -> None:
        """Find out what the layers keep, and when tokens are chosen: where there is something to choose by."""
        layers, need = self._layers, chooser.needs_attention
        padding = ~self._plan.real if self._padded else None
        self._mixers = MixerRows(mixers or [None] * len(layers), layers, self._tokens, padding)
        self._unseen: set[str] = set()  # what a look still waits for
        self._last = max((index for index, layer in enumerate(layers) if keeps_states(layer)), default=-1)
        self._with_keys = [index for index, layer in enumerate(layers) if keeps_keys(layer)]
        tokens = self._plan.real.numel()
        self._first_ratio, asked = chooser.schedule(config, len(layers), tokens)
        last_ratio = asked[max(asked)] if asked else self._first_ratio or 0.0
        self._recomputes_all = chooser.counts(last_ratio, [tokens]) == [tokens]  # then what is exact is seen whole
        self._ratios = at_layers_that_keep(asked, layers, need)
        self._sees_attention = {
            place: chooser.wants_attention(layer)
            for layer in sorted(asked, reverse=True)
            for place in at_layers_that_keep({layer: 0.0}, layers, need)
        }

    def probe(self, listener: AttentionObserver, spare: Callable[[], Sequence[Any]]) -> "Prefill":
        """A forward over the same plan that recomputes nothing but the question, beside this one."""
        keep_all = all(getattr(layer, "keeps_all", False) for layer in self._layers)
        shared = keep_all and not self._used and self._plan.partial is None
        twin = copy.copy(self)
        twin._layers = self._layers if shared else spare()
        twin._report, twin._listener, twin._is_shared = BlendReport(_costs=self._report._costs), listener, shared
        twin._first_ratio, twin._ratios, twin._chooser = 0.0, {}, None
        twin._chosen_counts, twin._rows, twin._notes = None, None, None
        twin._opened, twin._indexed, twin._ahead, twin._used, twin._settled = {}, {}, {}, set(), 0
        self._mixers.pause()  # its layer may be the one that this forward is in
        twin._mixers, twin._unseen = self._mixers.emptied(), set()
        twin._known_rows, twin._glance, twin._is_looking = KnownRows(), None, False
        return twin

    def adopt(self, probe: "Prefill") -> None:
        """End a probe: it is charged for, and what it wrote stays."""
        probe.close_doors()
        self._mixers.resume()
        report = probe._report
        self._report.charge(lambda: report.flops)
        if probe._is_shared:
            self._opened.update(probe._opened)
            self._ahead.update(probe._ahead)

    @property
    def is_plain(self) -> bool:
        """Whether the new tokens are those of one prompt, without padding."""
        return len(self._plan.counts) == 1 and not self._padded

    @property
    def past(self) -> int:
        """Tokens in the cache before the new ones; it knows where the rows stand that flow."""
        return self._past if self._rows is None else PastTokens.before(self._past, self._rows.columns)

    def enter(self, index: int, call: LayerCall) -> LayerCall:
        """Make a layer's arguments ready: only the rows that still flow, with their own lines of the mask."""
        self._settle(index)
        table = self._own_table(index, call)
        if self._chooser is None:  # a probe: the forward knows the tables of the layers that it has reached
            self._realigner.learn_again(index, table)
        self._realigner.learn(index, table)
        model_mask = call.arguments.get(call.mask_name)
        self._begin_mixer(index, call)
        if index == 0:
            self._begin(call)
        if self._rows is not None:
            call.take_rows(self._rows.columns, self._tokens, index == 0 or self._beyond_text, self._known_rows)
            self._pass_on(index, call, model_mask, self._rows)
        if index in self._ratios and any(self._stored_counts):
            seen = self._look(index, call, self._sees_attention[index])
            self._narrow(index, call, model_mask, *self._chosen(index, seen))
        in_part = self._plan.partial if self._listener is None else None
        if in_part is not None and index > max(self._ratios, default=-1):
            in_part.begin(index, None if self._recomputes_all else self._rows, self._plan)
        if index == self._last:
            self._trim(index, call, model_mask)
        self._close_glance()
        if self._listener is not None and self._is_heard(index):
            self._glance = self._glancing(index, call, self._listener.take)
        elif in_part is not None:
            self._glance = in_part.glance(index, call.layer, self._rows, self._realigner, self._past)
        elif self._notes is not None and self._notes.hears(index, call.layer):
            self._glance = self._notes.glance(call.layer)
        if self._glance is not None:
            self._glance.open(call.cache)
        self._note(index, kv_only=self._is_last_heard(index))
        return call

    def leave(self, output: Any) -> Any:
        """Put the rows that left a layer back to their columns, where a decoder may add to them between its layers.

        Shapes: output `[…, batch, rows, width]`.
        """
        if self._rows is None or not self._beyond_text:
            return None
        if isinstance(output, tuple):
            return (self._rows.spread(output[0], self._tokens), *output[1:])
        return self._rows.spread(output, self._tokens)

    def update(self, index: int, keys: Tensor, values: Tensor) -> KV:
        """Take the K and V of the rows that flow, and give back those of all tokens.

        Shapes: keys `[batch, kv_heads, rows, head_dim]`, values `[batch, kv_heads, rows, head_dim]`.
        """
        if index not in self._used:
            self._open(index, keys, values)
            if self._rows is not None:
                self._repair.keep(index, self._opened[index])
        for whole, part in zip(self._opened[index], (keys, values), strict=True):
            if self._rows is None:
                whole.copy_(part)
            else:
                self._rows.write_states(whole, part)
        self._repair.apply(index, self._opened[index], self._flowing)
        if index == 0 and self._mixers[0] is None:
            self._guard()
        if self._glance is None and self._is_looking:
            self._reach("keys")
        return self._layers[index].keys, self._layers[index].values

    def update_indexer(self, index: int, keys: Tensor) -> Tensor:
        """Take the indexer's keys of the rows that flow, and give back those of all tokens.

        Shapes: keys `[batch, rows, width]` → `[batch, tokens, width]`.
        """
        if index not in self._indexed:
            self._indexed[index] = self._layers[index].open_indexer(self._tokens, keys)
            self._realigner.lay_projections(index, self._stored_slots(), self._indexed[index][:, None])
        if self._rows is None:
            self._indexed[index].copy_(keys)
        else:
            self._rows.write_states(self._indexed[index][:, None], keys[:, None])
        if self._is_looking:
            self._reach("indexer")
        return self._layers[index].indexer_keys

    def end(self) -> None:
        """Leave no hook inside a layer, also after a failure, and no more in the cache than stays."""
        self.close_doors()
        self._realigner.close()
        self._settle(len(self._layers))
        if self._notes is not None:
            self._notes.end()
        if self._plan.partial is not None:
            self._plan.partial.finish()
        replaced = len(self._plan.replaced)
        self._report.planned(computed_chunks=replaced, loaded_chunks=-replaced)
        self._plan.close()

    def close_doors(self) -> None:
        """Take the hooks out of attention modules and of a mixer."""
        self._mixers.leave()
        self._close_glance()

    def _close_glance(self) -> None:
        if self._glance is not None:
            self._glance.close()
        self._glance = None

    def _settle(self, index: int) -> None:
        """The layers before this one are done: what they hold beyond their windows is given back."""
        if self._is_shared:
            return
        for done in range(self._settled, index):
            self._indexed.pop(done, None)
            if self._opened.pop(done, None) is not None:
                self._layers[done].settle()
        self._settled = max(self._settled, index)

    def _begin(self, call: LayerCall) -> None:
        """Leave out what needs no computing at all, and choose at once if nothing must be seen for it."""
        device = call.hidden.device
        self._plan.real, self._exact = self._plan.real.to(device), self._exact.to(device)
        self._reusable = self._reusable.to(device)
        if self._plan.partial is None:
            self._realigner.ahead(range(1), device)
        if self._beyond_text:
            self._drop_what_looks_ahead(call.arguments.get(call.mask_name))
            self._look(0, call)
            if not self._plan.slots:
                return
        counts, nothing, picked = self._stored_counts, [0] * len(self._stored_counts), None
        if self._chooser is None:
            counts = self._chosen_counts = nothing
        elif self._first_ratio is not None:
            counts = self._chooser.counts(self._first_ratio, self._stored_counts)
            picked = self._chooser.choose(0, Rows.every(self._reusable), self._reusable, None, counts)
            self._chosen_counts = counts
        total = [fresh + stored for fresh, stored in zip(self._fresh_counts, counts, strict=True)]
        if min(total) == self._tokens:
            return
        known = self._plan.fresh(self._end, with_reusable=counts == self._stored_counts and any(counts))
        if min(total) == max(total) and counts in (self._stored_counts, nothing):
            self._rows = Rows.at([np.flatnonzero(row).tolist() for row in known], device)
        else:
            flows = torch.from_numpy(known).to(device)
            self._rows = Rows.of(flows if picked is None else flows | picked, total)[0]

    @property
    def _is_narrowed(self) -> bool:
        """Whether some reusable tokens are computed no more."""
        return self._chosen_counts is not None and self._chosen_counts != self._stored_counts

    def _new_notes(self) -> AttentionNotes | None:
        """What gathers the question's attention; None where no tier reads it, or it is gathered elsewhere."""
        store = self._plan.store
        if store is None or self._plan.partial is not None or not store.reads_importance:
            return None
        after = max(self._ratios, default=-1)
        return AttentionNotes(self._plan, self._layers, after, self._past, self._report.charge)

    def _open(self, index: int, keys: Tensor, values: Tensor) -> None:
        """Open the new tokens' columns in a layer's buffers and write what is stored, unless it was done ahead."""
        self._used.add(index)
        if index in self._opened and self._is_ready(index, keys):
            return
        slots, partial = self._stored_slots(), self._plan.partial
        if index in self._opened:  # written ahead as another layer's table says
            self._realigner.lay(index, slots, *self._opened[index])
            return
        several = self._opens_several and partial is None and not keys.requires_grad
        if several and self._open_several(index, keys, values, slots):
            self._bring_next(index, keys.device)
            return
        self._opened[index] = opened = self._layers[index].open(self._tokens, keys, values)
        self._ahead[index] = index
        self._blank(opened)
        if partial is not None and partial.is_open(index):
            slots = partial.lay_probes(index, slots, self._realigner, opened)
        self._realigner.lay(index, slots, *opened)
        self._bring_next(index, keys.device)

    def _bring_next(self, index: int, device: torch.device) -> None:
        """Bring what is stored of the layers behind those that were written to the device, while these compute."""
        if device.type == "cpu" or self._plan.partial is not None:
            return
        following = [one for one in self._with_keys if one > index and one not in self._opened]
        if not following:
            return
        first, is_narrowed = following[0], self._is_narrowed or index in self._ratios
        checks = [] if is_narrowed else [one for one in self._ratios if one >= first]
        group = range(first, first + 1)
        if first not in checks and self._opens_several:
            group = self._realigner.together(first, self._plan.slots, min(checks, default=self._last), device)
        self._realigner.ahead(group, device)

    def _own_table(self, index: int, call: LayerCall) -> Table | None:
        """The rotary table of the new tokens; a layer whose indexer rotates stored keys has those before them too."""
        table, self._whole_table = rotary_table(call.arguments, call.layer), None
        if table is None or not has_indexer(self._layers[index]) or not self._realigner.is_unrotated_beside(index):
            return table
        self._whole_table = table
        return table[0][:, -self._tokens :], table[1][:, -self._tokens :]

    def _is_heard(self, index: int) -> bool:
        """Whether the listener takes the attention of a layer, if it has any."""
        return index in self._with_keys and self._listener.hears(self._with_keys.index(index))  # type: ignore[union-attr]

    def _is_last_heard(self, index: int) -> bool:
        """Whether nothing runs any more behind the attention of a layer, because nobody listens there."""
        last = None if self._listener is None else self._listener.last
        return last is not None and self._with_keys.index(index) == last if index in self._with_keys else False

    def _begin_mixer(self, index: int, call: LayerCall) -> None:
        keeps = index in self._ratios or index in (0, self._last)  # compared there, or run again for fewer rows
        self._mixers.begin(index, call, partial(self._lay_projections, index), partial(self._projected, index), keeps)

    def _lay_projections(self, index: int, states: Tensor, spans: Spans) -> None:
        """Write what is stored of a mixer's projections to columns of `[batch, tokens, features]`."""
        self._realigner.lay_projections(index, self._stored_slots(), states[:, None], spans)

    def _stored_slots(self) -> list[PlacedChunk]:
        """The chunks of which something stored is used, now: none where all rows flow."""
        return [] if self._rows is None else [slot for slot in self._plan.slots if slot.exact or self._is_narrowed]

    def _projected(self, index: int) -> None:
        """All that is stored of a layer's mixer has been computed for the rows that flow."""
        if index == 0:  # before any convolution: they depend on the token alone
            self._guard()
        if self._is_looking:
            self._reach("projections")

    def _reach(self, part: str) -> None:
        """A look has come to a part of what it waits for; it ends with the last."""
        self._unseen.discard(part)
        if not self._unseen:
            raise StopForward

    def _open_several(self, index: int, keys: Tensor, values: Tensor, slots: list[PlacedChunk]) -> bool:
        """Open a layer, and those behind it that look alike; True if that was possible."""
        checks = [] if self._is_narrowed else [one for one in self._ratios if one >= index]  # then more is stored
        last = min(checks, default=self._last)
        group = self._realigner.together(index, slots, last, keys.device)
        first, *others = (self._layers[one] for one in group)
        states = first.open_with(others, self._tokens, keys, values)
        if states is None:
            return False
        self._blank(states)
        self._realigner.lay(index, slots, *states)
        for number, one in enumerate(group):
            self._opened[one] = (states[0][number], states[1][number])
            self._ahead[one] = index
        return True

    def _is_ready(self, index: int, keys: Tensor) -> bool:
        """Whether what was written ahead for a layer is what it needs; it is closed again where it is elsewhere."""
        ahead = self._opened[index][0]
        if (ahead.device, ahead.dtype) == (keys.device, keys.dtype):
            is_laid = self._realigner.is_alike(index, self._ahead[index])
        else:
            is_laid = False
            del self._opened[index]
            self._layers[index].reset()
        self._opens_several = self._opens_several and is_laid
        return is_laid

    def _blank(self, opened: KV) -> None:
        """Zeros on padding: NaN would pass a mask."""
        if self._padded and self._rows is not None:
            for states in opened:
                states.masked_fill_(self._padding_on(states.device), 0)

    def _padding_on(self, device: torch.device) -> Tensor:
        """`[batch, 1, tokens, 1]`, True on padding."""
        if device not in self._padding:
            self._padding[device] = ~self._plan.real[:, None, :, None].to(device)
        return self._padding[device]

    def _guard(self) -> None:
        """Refuse chunks whose stored K/V at layer 0 are not what this model computes for these tokens here."""
        slots = [slot for slot in self._plan.slots if self._rows is None or not slot.exact]
        if self._is_narrowed or not slots:
            return
        for slot, error in zip(slots, self._mismatches(slots), strict=True):
            if error > MISMATCH_LIMIT:
                self._refuse(slot, error)

    def _mismatches(self, slots: Sequence[PlacedChunk]) -> list[float]:
        if (projections := self._mixers.kept(0)) is not None:
            return self._realigner.mismatches(0, slots, projections, of_mixer=True)
        if self._plan.partial is not None and self._listener is None:
            found: list[float] = self._plan.partial.mismatches(slots, self._realigner, self._opened[0])
            return found
        return self._realigner.mismatches(0, slots, *self._opened[0])

    def _drop_what_looks_ahead(self, model_mask: Any) -> None:
        """Compute chunks in which a token sees others behind it than where the chunk was computed."""
        for slot in list(self._plan.slots):
            if looks_ahead(model_mask, slot.row, slot.columns, self._tokens, inside=slot.is_image):
                self._drop(slot)

    def _drop(self, slot: PlacedChunk) -> None:
        self._plan.drop(slot)
        self._reusable[slot.row, slot.columns] = self._exact[slot.row, slot.columns] = False
        tokens = max(0, min(slot.columns.stop, self._end) - slot.start)
        self._fresh_counts[slot.row] += tokens
        if not slot.exact:
            self._stored_counts[slot.row] -= tokens
        self._report.refused_chunks += 1

    def _refuse(self, slot: PlacedChunk, error: float) -> None:
        logger.warning(
            "chunk %s is computed anew: its stored K/V at layer 0 differ by %.2g from those of its tokens",
            slot.chunk.key.digest[:12],
            error,
        )
        self._drop(slot)

    def _glancing(self, index: int, call: LayerCall, take: Callable[[int, Attention], Any]) -> AttentionCapture:
        """A way to see what the rows that flow look at in a layer."""
        rows = self._rows or Rows.every(self._plan.real)
        number = self._with_keys.index(index)  # selectors count the layers that attend
        heard = sight(rows.columns, self._tokens, self._report.charge, lambda seen: take(number, seen))
        return AttentionCapture(call.layer, heard)

    def _look(self, index: int, call: LayerCall, further: bool = False) -> Attention | None:
        """Run a layer until what it keeps is known for the rows that flow, or further until its attention begins."""
        self._note(index, kv_only=True)
        found: list[Attention] = []

        def take(_: int, seen: Attention) -> None:
            found.append(seen)
            raise StopForward

        self._is_looking, self._unseen = True, self._parts(index)
        before = self._mixers.states()
        self._glance = self._glancing(index, call, take) if further else None
        if self._glance is not None:
            self._glance.open(call.cache)
        try:
            call.run()
        except StopForward:
            return found[0] if found else None
        finally:
            self._close_glance()
            self._is_looking = False
            self._mixers.restore(before)
        raise UnsupportedModelError(
            f"layer {index} of {type(self._model).__name__} ran to its end without handing K and V to the cache, but "
            "blending waits for them there. Use full prefill for this model."
        )

    def _chosen(self, index: int, seen: Attention | None) -> tuple[Tensor, list[int]]:
        """Which of the active rows go on, `[batch, rows]`, and how many in each entry."""
        rows = self._rows or Rows.every(self._plan.real)
        before = self._stored_counts if self._chosen_counts is None else self._chosen_counts
        counts = self._chooser.counts(self._ratios[index], self._stored_counts)
        picked = self._chooser.choose(index, rows, self._reusable, self._fresh(index), counts, seen)
        self._chosen_counts = [min(pair) for pair in zip(counts, before, strict=True)]
        total = [sum(pair) for pair in zip(self._fresh_counts, self._chosen_counts, strict=True)]
        kept = ~rows.take(self._reusable) | picked
        return (kept & rows.take(self._plan.real) if self._padded else kept), total

    def _fresh(self, index: int) -> KV | None:
        """What a layer keeps of all new tokens, as far as it is known: K and V, or the projections of its mixer."""
        if index in self._opened:
            return self._opened[index]
        projections = self._mixers.kept(index)
        return None if projections is None else side_by_side(projections)

    def _parts(self, index: int) -> set[str]:
        """What a layer keeps of each token."""
        has = {
            "keys": keeps_keys(self._layers[index]),
            "projections": self._mixers[index] is not None,
            "indexer": has_indexer(self._layers[index]) and self._realigner.has_beside(index),
        }
        return {part for part, is_kept in has.items() if is_kept}

    def _pass_on(self, layer: int, call: LayerCall, model_mask: Any, rows: Rows) -> None:
        """Give a layer's mixer and its attention what they need to know of the rows."""
        if self._whole_table is not None:
            table = tuple(rows.behind(part, self._tokens) for part in self._whole_table)
            call.arguments["position_embeddings"] = table
        self._mixers.take(call, rows)
        if self._mixers[layer] is None or keeps_keys(self._layers[layer]):
            self._masks.give(layer, call, model_mask, rows)

    def _narrow(self, layer: int, call: LayerCall, model_mask: Any, selected: Tensor, counts: list[int]) -> None:
        """Let only the selected of the active rows go on."""
        if self._rows is not None and tuple(counts) == self._rows.counts:
            return
        rows = self._rows or Rows.every(selected)
        self._go_on(layer, call, model_mask, *rows.keep(selected, counts))

    def _go_on(self, layer: int, call: LayerCall, model_mask: Any, rows: Rows, index: Tensor) -> None:
        before = self._tokens if self._rows is None else self._rows.columns.shape[1]
        call.take_rows(index, before)
        self._rows = rows
        self._pass_on(layer, call, model_mask, rows)

    def _trim(self, index: int, call: LayerCall, model_mask: Any) -> None:
        """In the last layer, go past K and V only with the rows whose output is expected; a listener hears all."""
        active = self._tokens if self._rows is None else self._rows.columns.shape[1]
        if self._wanted_rows >= active or not self._plan.slots or self._listener is not None:
            return
        self._look(index, call)
        rows = self._rows or Rows.every(self._plan.real)
        self._go_on(index, call, model_mask, *rows.last(self._wanted_rows))

    def _note(self, index: int, kv_only: bool) -> None:
        """Tell the report what a layer is about to compute."""
        columns = None if self._rows is None else self._rows.columns
        self._report.computed(Work(index, kv_only, columns, self._reusable, self._plan.real, self._past))

    def _flowing(self) -> Tensor:
        """`[batch, tokens]`: which columns flow."""
        if self._rows is None:
            return torch.ones_like(self._plan.real)
        return torch.zeros_like(self._plan.real).scatter_(1, self._rows.columns, True)
