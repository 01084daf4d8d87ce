# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Layers of a blend cache that hold the state of a mixer: last inputs of a convolution, state of a scan, or both."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from ..errors import ConfigError
from .layers import BlendLayer
from .sliding_layer import BlendSlidingLayer

STATES = ("conv_states", "recurrent_states")
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state", "conv_kernel_size")


class MixerLayer(LinearAttentionLayer):
    """The state of a mixer behind the last token, as transformers keeps it; it can be taken back as a whole."""

    is_compileable = False

    @property
    def mixer_nbytes(self) -> int:
        """Bytes of the states."""
        held = (state for name in STATES for state in getattr(self, name).values())
        return sum(state.nbytes for state in held if state is not None)

    def settle(self) -> None:
        """The state is its own; nothing to forget."""

    def snapshot_mixer(self) -> Any:
        """What `restore_mixer` needs to take back every token that comes from now on: a copy of the states."""
        states = tuple({at: _copied(one) for at, one in getattr(self, name).items()} for name in STATES)
        return states, tuple(dict(getattr(self, name)) for name in FLAGS), (self.dtype, self.device)

    def restore_mixer(self, snapshot: Any) -> None:
        """Be as at a snapshot, which may be used again."""
        states, flags, (self.dtype, self.device) = snapshot
        for name, kept in zip(STATES, states, strict=True):
            setattr(self, name, {at: _copied(one) for at, one in kept.items()})
        for name, flag in zip(FLAGS, flags, strict=True):
            setattr(self, name, dict(flag))

    def snapshot(self) -> Any:
        """What `restore` needs to take back every token that comes from now on."""
        return self.snapshot_mixer()

    def restore(self, snapshot: Any) -> None:
        """Be as at a snapshot."""
        self.restore_mixer(snapshot)

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

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""
        self._map(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some batch entries; `indices` is `[kept]`."""
        self._map(lambda state: state.index_select(0, indices.to(state.device)))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Give every beam the state of the beam that it continues; `beam_idx` is `[batch]`."""
        self.batch_select_indices(beam_idx)

    def _has_only_inputs(self) -> bool:
        return any(self.is_conv_states_initialized.values()) and not any(self.is_recurrent_states_initialized.values())

    def _map(self, change: Any) -> None:
        for name in STATES:
            states = getattr(self, name)
            states.update({at: change(state) for at, state in states.items() if state is not None})


class MixerAttentionLayer(MixerLayer, BlendLayer):  # type: ignore[override]
    """K and V of each token, and the state of a mixer beside them."""

    _attention: type[BlendLayer] = BlendLayer

    def __init__(self, number_of_states: int = 1, *given: Any) -> None:
        self._attention.__init__(self, *given)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.dtype = self.device = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of K and V by place, of a state by name, as transformers calls it."""
        if args:
            self._attention.lazy_initialization(self, *args)
        else:
            MixerLayer.lazy_initialization(self, **kwargs)

    def settle(self) -> None:
        """See `BlendLayer.settle`."""
        self._attention.settle(self)

    def get_max_length(self) -> int:
        """See `BlendLayer.get_max_length`."""
        return self._attention.get_max_length(self)

    def snapshot(self) -> Any:
        """Of both."""
        return self.snapshot_mixer(), self._attention.snapshot(self)

    def restore(self, snapshot: Any) -> None:
        """Both."""
        self._attention.restore(self, snapshot[1])
        self.restore_mixer(snapshot[0])

    def check_crop(self, tokens_to_remove: int) -> int:
        """Refuse a `crop` that one of the two could not do."""
        MixerLayer.check_crop(self, tokens_to_remove)
        return self._attention.check_crop(self, tokens_to_remove)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, in both."""
        self.check_crop(tokens_to_remove)
        self._attention.crop(self, tokens_to_remove)
        MixerLayer.crop(self, tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self._attention.reset(self)
        MixerLayer.reset(self)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch entry `repeats` times in a row."""
        self._attention.batch_repeat_interleave(self, repeats)
        MixerLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only some batch entries; `indices` is `[kept]`."""
        self._attention.batch_select_indices(self, indices)
        MixerLayer.batch_select_indices(self, indices)


class MixerSlidingLayer(MixerAttentionLayer, BlendSlidingLayer):  # type: ignore[override]
    """K and V within a window, and the state of a mixer beside them."""

    is_sliding = True
    _attention = BlendSlidingLayer

    def __init__(self, sliding_window: int, number_of_states: int = 1) -> None:
        super().__init__(number_of_states, sliding_window)


def _copied(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.clone()
