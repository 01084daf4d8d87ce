# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Whether a model's own code continues a filled cache: found out by running it, never taken from a list of types.

Some code ignores a state before several tokens (`ignores_states`; 16 bits could hide it here); some keeps a state in
its modules, which no cache brings back (RecurrentGemma). So a prefix is saved, continued in pieces after another
prompt, and compared with one forward: logits behind each border, and every state at the end. One of the pieces is
longer than what a chunked scan takes at once.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from ..model.anatomy import other_states, stock_cache, text_config
from ..model.calibrate import HELD_TOKENS, ignores_states
from ..model.checks import FAILURES, FINE, LOGITS, MOST_ALLOWED, allowed_of, norm_error
from ..model.fingerprint import PerStructure
from ..model.identity.canonical import canonical, notes_kept
from ..model.modality import text_ids
from ..model.placement import input_device
from .stock_form import Parts, StockForm, is_state

COMPARED_TOKENS = 4
STATE_FACTOR = (
    10.0  # of what logits may be off: code for one token may clamp a step that a scan does not (1e-3, zamba2)
)
CHUNK_FIELDS = ("mamba_chunk_size", "chunk_size", "block_size")  # tokens that a scan takes at once, where it is said
LEAST_CHUNK = 64  # of a delta rule, whose config does not say


@dataclass(frozen=True)
class Continuing:
    """How a model's stock cache is continued."""

    form: StockForm
    at_once: bool

    @torch.no_grad()
    def advance(self, model: nn.Module, cache: Any, ids: Tensor) -> None:
        """Let a cache hold more tokens, `[tokens]`: one by one where several would be computed wrongly."""
        size = len(ids) if self.at_once or not cache.get_seq_length() else 1
        for piece in ids.split(size) if len(ids) else ():
            advance(model, cache, piece[None])


@PerStructure
def continuing(model: nn.Module) -> Continuing:
    """Find out how a model's stock cache is continued; remembered until the fingerprint that is given changes."""
    complaint = other_states(text_config(model)) or _notes(model)
    if complaint:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be continued from a saved prefix: {complaint}")
    long = _longest_chunk(model) + 2
    try:
        with torch.inference_mode(False), canonical(model), notes_kept(model):
            form = StockForm(_whole(model, text_ids(model, HELD_TOKENS)[None])[1])
            one_by_one = _error(model, form, (1,) * COMPARED_TOKENS)
            several = _error(model, form, (COMPARED_TOKENS, long, COMPARED_TOKENS - 1))
    except UnsupportedModelError:
        raise
    except FAILURES as broken:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be continued from a saved prefix: the test ended in "
            f"{type(broken).__name__}: {broken} Prefill its prompts as a whole."
        ) from broken
    if not one_by_one <= 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be continued from a saved prefix: tokens that come one by one differ from "
            f"one forward by {one_by_one:.2g} times what is allowed. Prefill its prompts as a whole."
        )
    return Continuing(form, several <= 1 and not ignores_states(model))


def _notes(model: nn.Module) -> str:
    """What a model remembers of its last prompt and applies to a filled cache of any other; empty if nothing."""
    if not any("rope_deltas" in vars(module) for module in model.modules()):
        return ""
    return (
        "it notes in its modules by how much the images of its last prompt moved the positions behind them "
        "(rope_deltas), and moves the tokens behind any filled cache by as much. Load its text model alone."
    )


def _error(model: nn.Module, form: StockForm, pieces: tuple[int, ...]) -> float:
    """How far a model that continues a saved prefix in pieces is from one forward, as a multiple of what is allowed.

    Logits behind each border and every state at the end are compared. In 16 bits the median counts: there a token may
    be sent to another expert for a rounding error.
    """
    ids = text_ids(model, HELD_TOKENS + sum(pieces))[None]
    whole, cache = _whole(model, ids)
    other = form.fill([_saved(model, form, ids)], HELD_TOKENS)
    with torch.no_grad():
        rest = [
            advance(model, other, part, part.shape[1]).logits for part in ids[:, HELD_TOKENS:].split(pieces, dim=1)
        ]
    logits = torch.cat((whole[:, :HELD_TOKENS], *rest), dim=1)
    starts = torch.tensor((HELD_TOKENS, *pieces)).cumsum(0).tolist()[:-1]
    rows = {row for start in starts for row in range(start, min(start + COMPARED_TOKENS, ids.shape[1]))}
    expected, found = (form.take(one, 0, ids.shape[1]) for one in (cache, other))
    errors = [norm_error(logits[0, row], whole[0, row]) for row in sorted(rows)]
    states = [norm_error(found[name], expected[name]) for name in expected if is_state(name)]
    bound = allowed_of(LOGITS, model.dtype)
    allowed = ((errors, bound), (states, min(MOST_ALLOWED, STATE_FACTOR * bound)))
    if model.dtype in FINE:
        return max(max(shares) / most for shares, most in allowed if shares)
    return max(float(torch.tensor(shares).median()) / most for shares, most in allowed if shares)


@torch.no_grad()
def _whole(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    """Logits of one forward, and the cache behind it."""
    cache = stock_cache(model)
    return advance(model, cache, ids, ids.shape[1]).logits, cache


def _saved(model: nn.Module, form: StockForm, ids: Tensor) -> Parts:
    """What is saved behind the first tokens; the model has computed others since, as states outside a cache show."""
    parts = form.take(_whole(model, ids[:, :HELD_TOKENS])[1], 0, HELD_TOKENS)
    _whole(model, ids[:, :HELD_TOKENS].flip(1))
    return parts


def advance(model: nn.Module, cache: Any, ids: Tensor, logits: int = 1) -> Any:
    """Let a cache hold more tokens, by a forward with the positions that `generate` gives.

    Shapes: ids `[1, tokens]`.
    """
    held, taken = cache.get_seq_length(), signature(model.forward).parameters
    ids = ids.to(input_device(model))
    positions = torch.arange(held, held + ids.shape[1], device=ids.device)[None]
    given = {"position_ids": positions, "logits_to_keep": logits}
    few = {name: value for name, value in given.items() if name in taken}
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **few)


def _longest_chunk(model: nn.Module) -> int:
    named = (getattr(text_config(model), name, None) for name in CHUNK_FIELDS)
    return max(LEAST_CHUNK, *(size for size in named if isinstance(size, int)), 0)
