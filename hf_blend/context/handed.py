# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stock caches that note who fills them with what, so that nothing else is saved for every process.

K, V and states do not say what they were computed from. So the caches that `StateCheckpoints` hands out look, at the
first attention layer of each forward, at the call of the model that runs: its ids, mask and positions, its fingerprint
and its mode. No hook is put on the model. Where a model ignores a state before several tokens, its cache refuses
these, too.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ..errors import ConfigError, HfBlendError, UnsupportedModelError
from ..model.anatomy import decoder_layers
from ..model.fingerprint import fingerprint
from ..model.hooks import callable_as, running_calls
from ..model.identity.canonical import refuse_request_state


@dataclass
class Notes:
    """Who filled a cache with what."""

    model: ref[nn.Module]
    fingerprint: str
    is_at_once: bool
    ids: list[int] = field(default_factory=list)
    why: str = ""
    states: dict[tuple[str, int], Counter[int]] = field(default_factory=dict)  # kind and number → updates by layer


def handed(filled: Any, model: nn.Module, ids: Tensor, identity: str, is_at_once: bool) -> Any:
    """Let a stock cache note what it is filled with from now on.

    Shapes: ids `[tokens]`.
    """
    filled.__class__ = _handed(type(filled))  # type: ignore[arg-type]
    filled.notes = Notes(ref(model), identity, is_at_once, ids.tolist())
    return filled


def complaint(filled: Any, ids: Tensor, identity: str) -> str:
    """Why what a cache holds is not what a model makes of some text; empty if it is.

    Shapes: ids `[tokens]`.
    """
    notes = getattr(filled, "notes", None)
    if not isinstance(notes, Notes):
        return "nothing is known of what it was computed from"
    if notes.why:
        return notes.why
    if notes.fingerprint != identity:
        return "the model was another one when it was filled"
    if any(len({*updates.values()}) > 1 for updates in notes.states.values()):
        return "a forward updated the states of some layers only, as one does that fails"
    held = notes.ids[: len(ids)]
    if held == ids.tolist():
        return ""
    if len(held) < len(ids):
        return f"only {len(held)} of its tokens came in calls of the model that were seen"
    at = next(index for index, (own, given) in enumerate(zip(held, ids.tolist(), strict=True)) if own != given)
    return f"its token {at} is {held[at]}, and {int(ids[at])} was given"


@cache
def _handed(kind: type) -> type:
    stock: Any = kind

    def update(self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **given: Any) -> Any:
        held, tokens = self.layers[layer_idx].get_seq_length(), key_states.shape[-2]
        _refuse(self, tokens, held)
        if layer_idx == _first(self) and not torch.compiler.is_compiling():
            _note(self.notes, held, tokens)
        return stock.update(self, key_states, value_states, layer_idx, *args, **given)

    def update_conv_state(self: Any, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **given: Any) -> Any:
        _refuse(self, conv_states.shape[-1], self.layers[layer_idx].has_previous_state[state_idx])
        found = stock.update_conv_state(self, conv_states, layer_idx, state_idx, **given)
        _count(self, "conv_states", state_idx, layer_idx)
        return found

    def update_recurrent_state(self: Any, states: Tensor, layer_idx: int, state_idx: int = 0, **given: Any) -> Any:
        found = stock.update_recurrent_state(self, states, layer_idx, state_idx, **given)
        _count(self, "recurrent_states", state_idx, layer_idx)
        return found

    methods = (update, update_conv_state, update_recurrent_state)
    return type(kind.__name__, (kind,), {"__doc__": kind.__doc__, **{one.__name__: one for one in methods}})


def _count(filled: Any, kind: str, number: int, layer: int) -> None:
    """Note that a state of a layer was updated: behind a whole forward those of a kind were equally often."""
    if torch.compiler.is_compiling():
        return
    if (kind, number) not in filled.notes.states:
        held = (at for at, one in enumerate(filled.layers) if getattr(one, kind, {}).get(number) is not None)
        filled.notes.states[kind, number] = Counter(dict.fromkeys(held, 0))
    filled.notes.states[kind, number][layer] += 1


def _first(filled: Any) -> int:
    """The first layer that counts tokens."""
    return next(index for index, layer in enumerate(filled.layers) if isinstance(layer, CacheLayerMixin))


def _refuse(filled: Any, tokens: int, held: int) -> None:
    if held and tokens > 1 and not filled.notes.is_at_once:
        raise UnsupportedModelError(
            f"{tokens} tokens came at once behind what a cache holds, where one is expected: the code of this model "
            "computes several as if nothing were before them. Get the cache by resume() with the whole prompt, or "
            "prefill the prompt as a whole."
        )


def _note(notes: Notes, held: int, tokens: int) -> None:
    """Note a forward that adds tokens behind those held."""
    model = notes.model()
    calls = [] if model is None else list(_calls(model))
    ids = next((call.get("input_ids") for call in reversed(calls)), None)
    if model is None or not calls:
        notes.why = notes.why or f"{tokens} of its tokens came from another model object, or from none"
    elif not isinstance(ids, Tensor) or ids.shape != (1, tokens):
        notes.why = notes.why or f"{tokens} of its tokens came as a batch, or as embeddings without ids"
    else:
        notes.why = (
            notes.why or _in_other_places(calls, held, tokens) or _in_another_state(model, notes.fingerprint, held)
        )
        notes.ids[held:] = ids[0].tolist()


def _calls(model: nn.Module) -> Iterator[dict[str, Any]]:
    """The variables of this thread's calls up to that of the model, the innermost first; none without one."""
    names, found = callable_as(model), []
    for module, variables in running_calls():
        found.append(variables)
        if any(module is name for name in names):
            yield from found
            found = []


def _in_other_places(calls: list[dict[str, Any]], held: int, tokens: int) -> str:
    """What says that tokens are not computed as those that follow all others; empty if they are."""
    mask = calls[-1].get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
        return f"{tokens} of its tokens came with padding, or with a mask of their own"
    positions = next((one for call in calls if isinstance(one := call.get("position_ids"), Tensor)), None)
    if positions is None or bool((positions == torch.arange(held, held + tokens, device=positions.device)).all()):
        return ""
    return f"{tokens} of its tokens were computed at other positions than {held} to {held + tokens - 1}"


def _in_another_state(model: nn.Module, identity: str, held: int) -> str:
    """What says that a model does not compute now what it computes by itself; empty if nothing does.

    Another model than that of the tokens held is refused.
    """
    if any(module.training for module in model.modules()):
        return "it was filled by a model in training mode"
    try:
        refuse_request_state(model, decoder_layers(model))
        if fingerprint(model) == identity:
            return ""
    except HfBlendError as error:
        return f"it was filled by a model that is refused ({error})"
    if held:
        raise ConfigError(
            f"{held} tokens of a saved prefix were computed by another model than the one that is expected to "
            "continue them: its adapter, weights, dtype or code is another one. Call resume() as the model is now."
        )
    return "the model was another one when it was filled"
