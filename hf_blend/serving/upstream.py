# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What serving uses of transformers beside its public interface, and a check that all of it is there.

Continuous batching gives no place to name a cache or a scheduler of one's own, so the engine makes them itself, some
methods are overridden and some attributes read. A release that renames one would not fail, but serve wrong.
"""

import dis
import importlib
import inspect
from typing import Any

from ..errors import UnsupportedModelError

__all__ = ["NAMES", "check_names"]

PACKAGE = "transformers.generation.continuous_batching"
NAMES = {  # class or function: its methods, and attributes that it sets
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
    """Look for every name."""
    missing = [name for owner, parts in NAMES.items() for name in _missing(owner, parts.split())]
    if missing:
        import transformers

        raise UnsupportedModelError(
            f"continuous batching of transformers {transformers.__version__} lacks {', '.join(missing)}, but blended "
            "requests need that. Install transformers 5.23, or use a BlendCache for each request."
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
    """What a class has, and what its methods set."""
    rows = [vars(base) for base in getattr(owner, "__mro__", ())]
    methods = [inspect.unwrap(method) for row in rows for method in row.values() if inspect.isfunction(method)]
    names = {name for row in rows for name in (*row, *row.get("__annotations__", ()))}
    steps = (step for method in methods for step in dis.get_instructions(method))
    return names | {step.argval for step in steps if step.opname == "STORE_ATTR"}
