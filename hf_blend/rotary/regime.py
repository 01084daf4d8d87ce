# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose rotary frequencies depend on how long the prompt is: what was computed in a short one differs."""

from typing import Any


def frequency_regime(config: Any, tokens: int) -> tuple[int, ...]:
    """Which frequencies a model turns by in a forward of some length; most use the same for all.

    With longrope there are two sets, with dynamic scaling one for each length beyond the trained one. K and V behind
    other tokens are those of a full prefill only if both were computed by the same frequencies.

    Args:
        config: of the text model.
        tokens: the largest position, plus 1.

    Returns:
        Something that is equal for lengths with the same frequencies.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
    return tuple(_regime(kind, config, tokens) for kind in kinds)


def stretches(config: Any) -> bool:
    """Whether a model goes on beyond the positions of its config, because its frequencies adapt to the length."""
    return frequency_regime(config, 1 << 40) != frequency_regime(config, 1 << 41)


def _regime(rope: dict[str, Any], config: Any, tokens: int) -> int:
    kind, longest = str(rope.get("rope_type", "")), getattr(config, "max_position_embeddings", 0)
    if kind == "longrope":
        return int(tokens > (rope.get("original_max_position_embeddings") or longest))
    return tokens if "dynamic" in kind and tokens >= longest else 0
