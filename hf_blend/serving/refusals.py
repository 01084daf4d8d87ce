# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an engine with blended prefills refuses by name: a transformers that lacks what it needs, models, settings.

Continuous batching has no argument for a cache or a scheduler of one's own, so the engine makes them itself, overrides
some methods and reads some attributes. A release that renames one would not fail, but serve wrong answers.
"""

import dis
import importlib
import inspect
from typing import Any

import transformers
from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig

from ..config import BlendConfig
from ..errors import ConfigError, UnsupportedModelError
from ..model.anatomy import text_config
from ..model.attention import STOCK, is_flash

__all__ = ["NAMES", "check_end_tokens", "check_model", "check_names", "check_settings"]

PACKAGE = "transformers.generation.continuous_batching"
NAMES = {  # not public: class or function → its methods, and attributes that it sets
    "cache.PagedAttentionCache": "can_store_request_tokens evict_cached_blocks free_all_requests free_blocks "
    "mark_complete_blocks search_prefix_match cache_allocators device max_batch_tokens num_blocks pool",
    "cache_allocators.cache_allocator.CacheAllocator": "acquire_prefix_blocks get_write_indices match_prefix_blocks "
    "update block_physical_stride block_table blocks_per_sector cache_tensor index layer_indices ledger "
    "num_blocks tokens_per_page write_trash_index",
    "cache_allocators.cache_allocator.compute_block_hash": "",
    "cache_allocators.cache_pool.CachePool": "count_free_blocks free_blocks try_to_free_sectors free_sectors "
    "num_free_sectors",
    "cache_allocators.full_attention.FullAttentionCacheAllocator": "_copy_view _kv_token_views",
    "cb_logits_processors.ContinuousBatchingLogitsProcessor": "fill_defaults prepare_tensor_args",
    "cb_logits_processors.ContinuousBatchingLogitsProcessorList": "_retrieve_processors_kwargs check_kwargs "
    "do_processing logits_processor prepare_tensor_args tensors_required",
    "continuous_api.ContinuousBatchProcessor": "_handle_request_error has_pending_requests reset cache "
    "inputs_and_outputs model_runner scheduler",
    "continuous_api.ContinuousBatchingManager": "_create_batch_processor _generation_loop_body _generation_step "
    "add_request cancel_request destroy is_running pause register_result_handler start stop _request_counter "
    "_wake_up_loop background_thread_status batch_processor cancel_queue continuous_batching_config current_batch "
    "distributed_helper generation_config input_queue logit_processor model output_router",
    "continuous_api.OutputRouter": "_lock deliver result_handlers",
    "initialization.update_cb_config_after_cache_creation": "",
    "input_outputs.ContinuousBatchingIOs": "compute_stream",
    "model_runner.ModelRunner": "_sample return_logprobs",
    "requests.FutureRequestState": "has_new_token state",
    "requests.RequestState": "create_equivalent_initial_request generated_tokens initial_tokens "
    "logit_processor_kwargs position_offset remaining_prefill_tokens request_id status to_generation_output "
    "update_and_check_completion",
    "scheduler.FIFOScheduler": "",
    "scheduler.Scheduler": "_cleanup_waiting_queue _get_waiting_candidates _process_candidates "
    "_try_to_meet_safety_margin add_waiting_request clear_cancelled_requests finish_request reset schedule_batch "
    "set_request_cancellation _cancellation_lock _requests_to_cancel active_requests block_new_requests "
    "waiting_requests waiting_requests_order",
    "utils.drain_queue": "",
    "utils.stream_context": "",
}


def check_names() -> None:
    """Refuse a transformers that lacks one of the names."""
    missing = [name for owner, parts in NAMES.items() for name in _missing(owner, parts.split())]
    if missing:
        raise UnsupportedModelError(
            f"continuous batching of transformers {transformers.__version__} lacks {', '.join(missing)}, but blended "
            "requests need that. Install transformers 5.23 or 5.24, or use a BlendCache for each request."
        )


def _missing(owner: str, parts: list[str]) -> list[str]:
    module, _, name = owner.rpartition(".")
    try:
        member = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name, None)
    except ImportError as error:
        return [f"{owner} ({error})"]
    if member is None:
        return [owner]
    names = _names_in(member)
    return [f"{name}.{needed}" for needed in parts if needed not in names]


def _names_in(owner: Any) -> set[str]:
    """Return the names that a class has, and those of the attributes that its methods set."""
    rows = [vars(base) for base in getattr(owner, "__mro__", ())]
    methods = [inspect.unwrap(method) for row in rows for method in row.values() if inspect.isfunction(method)]
    names = {name for row in rows for name in (*row, *row.get("__annotations__", ()))}
    steps = (step for method in methods for step in dis.get_instructions(method))
    return names | {step.argval for step in steps if step.opname == "STORE_ATTR"}


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
