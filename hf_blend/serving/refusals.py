# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models and settings that an engine with blended prompts refuses, by name."""

from typing import Any

from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..config import BlendConfig
from ..errors import ConfigError, UnsupportedModelError
from ..model.anatomy import text_config
from ..model.attention import STOCK, is_flash

__all__ = ["check_end_tokens", "check_model", "check_settings"]


def check_model(model: nn.Module) -> None:
    """Refuse a model whose blocks cannot hold what is blended."""
    name, config = type(model).__name__, text_config(model)
    attention = str(getattr(model.config, "_attn_implementation", None))
    kinds, window = set(getattr(config, "layer_types", None) or ()), getattr(config, "sliding_window", None)
    windows = kinds - {"full_attention"} if kinds else ({f"a window of {window}"} if window else set())
    rope = str((getattr(config, "rope_parameters", None) or {}).get("rope_type", ""))
    alone = "Use a BlendCache for each request."
    refused = (
        (attention != STOCK and not is_flash(attention),
         f"{name} attends by {attention!r}, but blended prefills and the engine share sdpa or flash attention. Load "
         "it with attn_implementation='sdpa'."),
        (windows,
         f"layers of {name} have {', '.join(sorted(map(str, windows)))}, of which the engine keeps the last tokens "
         f"alone, but blended blocks hold every token. {alone}"),
        ("dynamic" in rope or "longrope" in rope,
         f"{name} has rope_type={rope!r}: its frequencies depend on the longest prompt in a step, so requests would "
         f"change each other. {alone}"),
        (getattr(model, "_device_mesh", None) is not None,
         f"{name} is spread over devices by tensor parallelism, but a blended prefill runs on one. Load it without "
         "tp_plan."),
    )  # fmt: skip
    for is_so, complaint in refused:
        if is_so:
            raise UnsupportedModelError(complaint)


def check_settings(
    config: BlendConfig, batching: ContinuousBatchingConfig, generation: GenerationConfig, stall_s: float | None
) -> None:
    """Refuse settings with which a prefill and the engine's steps do not go together."""
    blocks, graphs = batching.num_blocks, batching.use_cuda_graph
    refused = (
        (config.kv_bits is not None, f"kv_bits={config.kv_bits}", "the engine's blocks hold the model's dtype"),
        (config.kv_device_map is not None, f"kv_device_map={config.kv_device_map}",
         "the engine's blocks are on the model's device"),
        (batching.scheduler_type != "fifo", f"scheduler_type={batching.scheduler_type!r}", "only 'fifo' holds back"),
        (not batching.allow_block_sharing, "allow_block_sharing=False", "blended blocks enter by the shared prefix"),
        (bool(batching.use_async_batching), "use_async_batching=True", "a prefill needs the model between steps"),
        (any(graphs if isinstance(graphs, tuple) else [graphs]), f"use_cuda_graph={graphs}",
         "a prefill would break a captured graph"),
        (batching.cpu_offload_space != 0, f"cpu_offload_space={batching.cpu_offload_space}", "a swap hashes again"),
        (blocks is not None and (type(blocks) is not int or blocks < 1), f"num_blocks={blocks!r}",
         "a number from 1 on is expected"),
        (bool(batching.max_blocks_per_request), f"max_blocks_per_request={batching.max_blocks_per_request}",
         "the decode fast path writes K and V by itself"),
        ((generation.num_return_sequences or 1) != 1, f"num_return_sequences={generation.num_return_sequences}",
         "a fork begins before the last prompt token"),
        (stall_s is not None and not stall_s >= 0, f"stall_s={stall_s}", "seconds from 0 on are expected"),
    )  # fmt: skip
    for is_so, setting, reason in refused:
        if is_so:
            raise ConfigError(f"{setting} cannot be served with blended prompts: {reason}. Leave it at its default.")


def check_end_tokens(ends: Any) -> None:
    """Refuse here what would fail in the engine, or would never end an answer."""
    ids = list(ends) if isinstance(ends, list | tuple) else [ends]
    if ends is not None and not all(type(token) is int for token in ids):
        raise ConfigError(
            f"eos_token_id={ends!r} came, expected the id of a token, a list of such, or None. Give whole numbers."
        )
