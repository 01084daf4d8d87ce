# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What this extension adds to the core: layers of a blend cache that hold the state of a mixer.

The state is the last inputs of a convolution, that of a scan, or both.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ..cache.layers import BatchOfRequests, BlendLayer, BlendSlidingLayer
from ..errors import ConfigError
from ..model.anatomy import LayerCall, LayerExtension, Spans, register
from ..prefill.blend import LayerKind
from ..prefill.rows import Rows
from ..selectors.base import KV
from .mixer import ActiveRows, MixerPass, full_arguments
from .mixer_probe import mixers_of

KINDS = ("LinearAttention", "LinearAttentionAndFullAttention", "LinearAttentionAndSlidingWindowAttention")
STATES = ("conv_states", "recurrent_states")
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


class MixerKind(LayerKind):
    """The mixer of one layer in a prefill: which rows it projects, and what stands for the others."""

    has_keys = attends = compares_keys = is_plain = False
    parts = frozenset({"projections"})

    def __init__(self) -> None:
        self._given = dict[str, Any]()  # the layer's arguments for all tokens
        self._pass: MixerPass | None = None

    def enter(self, prefill: Any, index: int, call: LayerCall, table: Any) -> Any:
        """Put the hooks in; the mixer runs for all rows until others are given."""
        realigner = prefill.realigner

        def write_stored(states: Tensor, spans: Spans) -> None:
            realigner.write_beside(index, prefill.stored_chunks(), states[:, None], spans)

        def projected() -> None:
            computed = self.computed() if index == 0 else None
            if computed is not None:  # before any convolution: they depend on the token alone
                prefill.check_stored(computed[:1])
            prefill.stop_when_ready("projections")

        cache = next(value for value in call.arguments.values() if hasattr(value, "update_conv_state"))
        mixer, rows = prefill.extras[index], ActiveRows(None, prefill.width)
        self._given = dict(call.arguments)
        self._pass = MixerPass(mixer, cache, rows, write_stored, projected, prefill.is_compared(index))
        self._pass.enter()
        return table

    def take_rows(self, prefill: Any, call: LayerCall, rows: Rows) -> None:
        """The mixer runs for these rows."""
        if self._pass is not None:
            plan, arguments = prefill.plan, full_arguments(call.arguments, self._given)
            padding = ~plan.real.to(rows.columns.device) if plan.has_padding else None
            self._pass.rows = ActiveRows(rows.columns, prefill.width, arguments, padding)

    def computed(self) -> KV | None:
        """The projections of all new tokens in the place of K and of V; None if they are not known."""
        states = None if self._pass is None else self._pass.states
        return None if states is None else (states[:, None], states[:, None])

    def snapshot(self, layer: Any) -> Any:
        """The state of the mixer."""
        return MixerLayer.snapshot(layer)

    def restore(self, layer: Any, snapshot: Any) -> None:
        """The mixer ran only to look into the layer: take its state back."""
        MixerLayer.restore(layer, snapshot)

    def pause(self) -> None:
        """Take the hooks out."""
        if self._pass is not None:
            self._pass.leave()

    def resume(self) -> None:
        """Put the hooks in again."""
        if self._pass is not None:
            self._pass.enter()

    def leave(self) -> None:
        """Take the hooks out, and forget the rows."""
        self.pause()
        self._pass = None
        self._given = {}


class MixerAttentionKind(MixerKind):
    """A mixer beside attention."""

    has_keys = attends = True
    parts = frozenset({"keys", "projections"})


class MixerLayer(BatchOfRequests, LinearAttentionLayer):
    """The state of a mixer behind the last token, as transformers keeps it; it can be taken back as a whole."""

    is_compileable = False
    has_only_state = True
    prefill_kind: type[LayerKind] = MixerKind

    def snapshot(self) -> Any:
        """A copy of the states, by which `restore` takes back every later token."""
        states = tuple({at: _copied(state) for at, state in getattr(self, name).items()} for name in STATES)
        return states, tuple(dict(getattr(self, name)) for name in FLAGS), (self.dtype, self.device)

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot, which may be used again."""
        states, flags, (self.dtype, self.device) = snapshot
        for name, snapshot_states in zip(STATES, states, strict=True):
            setattr(self, name, {at: _copied(state) for at, state in snapshot_states.items()})
        for name, flag in zip(FLAGS, flags, strict=True):
            setattr(self, name, dict(flag))

    def suspend(self, snapshot: Any, past: int) -> Any:
        """Return to a snapshot while another forward runs; gives what `resume` needs."""
        states = MixerLayer.snapshot(self)
        MixerLayer.restore(self, snapshot)
        return states

    def resume(self, suspended: Any) -> None:
        """Return to the states at `suspend`."""
        MixerLayer.restore(self, suspended)

    def state(self) -> dict[str, Tensor]:
        """The states by name and number, from which `load_state` fills a layer that the same model has filled."""
        state = {}
        for name in STATES:
            for number, tensor in getattr(self, name).items():
                if tensor is not None:
                    state[f"{name}.{number}"] = tensor
        for number, width in self.conv_kernel_size.items():
            if f"conv_states.{number}" in state:  # one that records its past has more
                state[f"conv_states.{number}"] = state[f"conv_states.{number}"][..., -width:]  # type: ignore[operator]
        return state

    def load_state(self, state: Mapping[str, Tensor], tokens: int) -> None:
        """Hold what `state` gave of a layer with so many tokens."""
        for name, tensor in MixerLayer.state(self).items():
            tensor.copy_(state[name])

    def has_lengths(self, state: Mapping[str, Tensor], tokens: int) -> bool:
        """True: a state is as large for any number of tokens."""
        return True

    def check_crop(self, tokens_to_remove: int) -> int:
        """Refuse a `crop` that this layer could not do."""
        if tokens_to_remove and not (self.record_past and self._has_only_inputs()):
            raise ConfigError(
                f"crop({tokens_to_remove}) was asked of a cache with a layer of linear attention, whose state holds "
                "every token before and gives none back. reset() and fill the cache again, or decode without an "
                "assistant."
            )
        return tokens_to_remove

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, where only the inputs of a convolution are kept and they were recorded."""
        self.check_crop(tokens_to_remove)
        if self.record_past and self._has_only_inputs():
            LinearAttentionLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)

    def _has_only_inputs(self) -> bool:
        return any(self.is_conv_states_initialized.values()) and not any(self.is_recurrent_states_initialized.values())

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in STATES:
            states = getattr(self, name)
            states.update({at: change(state) for at, state in states.items() if state is not None})


class MixerAttentionLayer(MixerLayer, BlendLayer):  # type: ignore[override]  # is_croppable, as in transformers
    """K and V of each token, and the state of a mixer beside them."""

    has_only_state = False
    prefill_kind: type[LayerKind] = MixerAttentionKind
    _attention: type[BlendLayer] = BlendLayer

    def __init__(self, number_of_states: int = 1, *args: Any) -> None:
        CacheLayerMixin.__init__(self)
        self._attention.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.dtype = self.device = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise K and V by position of the arguments, a state by name, as transformers calls it."""
        if args:
            self._attention.lazy_initialization(self, *args)
        else:
            MixerLayer.lazy_initialization(self, **kwargs)

    def suspend(self, snapshot: Any, past: int) -> Any:
        """As `MixerLayer.suspend`, of the mixer alone."""
        return MixerLayer.suspend(self, snapshot[0], past)

    def snapshot(self) -> Any:
        """The snapshots of both."""
        return MixerLayer.snapshot(self), self._attention.snapshot(self)

    def restore(self, snapshot: Any) -> None:
        """Return to a snapshot of both."""
        self._attention.restore(self, snapshot[1])
        MixerLayer.restore(self, snapshot[0])

    def state(self) -> dict[str, Tensor]:
        """The tensors of both."""
        return {**MixerLayer.state(self), **self._attention.state(self)}

    def load_state(self, state: Mapping[str, Tensor], tokens: int) -> None:
        """Hold what `state` gave of both."""
        MixerLayer.load_state(self, state, tokens)
        states = MixerLayer.snapshot(self)
        self._attention.load_state(self, state, tokens)  # resets both
        MixerLayer.restore(self, states)

    def has_lengths(self, state: Mapping[str, Tensor], tokens: int) -> bool:
        """Whether K and V may be of so many tokens."""
        return self._attention.has_lengths(self, state, tokens)

    def check_crop(self, tokens_to_remove: int) -> int:
        """Refuse a `crop` that one of the two could not do."""
        MixerLayer.check_crop(self, tokens_to_remove)
        return self._attention.check_crop(self, tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, in both."""
        self._forget(self.check_crop(tokens_to_remove))
        MixerLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self._attention.reset(self)
        MixerLayer.reset(self)

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self._attention._map(self, change)
        MixerLayer._map(self, change)


class MixerSlidingLayer(MixerAttentionLayer, BlendSlidingLayer):  # type: ignore[override]  # as above
    """K and V within a window, and the state of a mixer beside them."""

    is_sliding = True
    _attention = BlendSlidingLayer

    def __init__(self, sliding_window: int, number_of_states: int = 1) -> None:
        super().__init__(number_of_states, sliding_window)


def make_layer(stock: Any) -> Any:
    """The layer of a blend cache for one of transformers that holds a mixer's state; None for any other."""
    if not hasattr(stock, "recurrent_states"):
        return None
    states, window = stock.number_of_states, getattr(stock, "sliding_window", None)
    if not isinstance(stock, CacheLayerMixin):
        return MixerLayer(states)
    return MixerAttentionLayer(states) if window is None else MixerSlidingLayer(window, states)


def _copied(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.clone()


register(LayerExtension(KINDS, mixers_of, make_layer))
