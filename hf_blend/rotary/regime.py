# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models that compute a token otherwise in a longer prompt, or farther on in it: what was stored elsewhere differs."""

from typing import Any

SCALES = ("attn_temperature_tuning", "log_scaling_n_floor")


def frequency_regime(config: Any, tokens: int) -> tuple[int, ...]:
    """Which set of frequencies a model rotates by in a forward of some length; most models have one for all lengths.

    With longrope there are two sets, with dynamic scaling one for each length beyond the trained one. Stored K and V
    are those of a full prefill only if both were computed with the same set.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
    longest = getattr(config, "max_position_embeddings", 0)
    sets = []
    for parameters in by_layer_type or [rope]:
        name = str(parameters.get("rope_type", ""))
        if name == "longrope":
            trained = parameters.get("original_max_position_embeddings") or longest
            sets.append(int(tokens > trained))
        elif "dynamic" in name and tokens >= longest:
            sets.append(tokens)
        else:
            sets.append(0)
    return tuple(sets)


def stretches(config: Any) -> bool:
    """Whether a model works beyond the positions of its config, because its frequencies adapt to the length."""
    return frequency_regime(config, 1 << 40) != frequency_regime(config, 1 << 41)


def scales_by_position(config: Any) -> bool:
    """Whether attention of a model depends on where its tokens are, and not only on how far apart.

    Llama 4, Ministral 3, Mistral 4 and Inkling scale their queries by steps of the position, or of the column.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    scales = [rope.get("llama_4_scaling_beta")]
    scales += [getattr(config, name, None) for name in SCALES]
    return any(scale is not None and scale is not False for scale in scales)
