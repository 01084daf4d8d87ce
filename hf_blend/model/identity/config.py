# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The fields of a config on which keys and values depend: all but those that were looked at and found harmless."""

from enum import Enum
from typing import Any

import torch

from ...errors import UnsupportedModelError

IGNORED_CONFIG_FIELDS = frozenset({
    # where it came from, not what it computes
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map",
    # how it is called, not what it computes
    "use_cache", "return_dict", "output_attentions", "output_hidden_states", "_output_attentions",
    "_attn_implementation", "_attn_implementation_internal", "attn_implementation", "_attn_implementation_autoset",
    "_experts_implementation_internal",
    # the parameters say their dtype themselves, and without doubt
    "dtype", "torch_dtype",
    # read by generate and by tokenizers; what stands before a chunk is part of its key
    "bos_token_id", "eos_token_id", "pad_token_id",
    # heads and losses that no decoder layer reads
    "id2label", "label2id", "num_labels", "problem_type",
    # how weights are spread over devices; transformers 5.17 keeps it where 5.23 does not
    "base_model_tp_plan",
    # training only
    "initializer_range", "gradient_checkpointing", "_post_init_done",
})  # fmt: skip


def config_part(value: Any) -> Any:
    """A config as plain values, without the ignored fields, at every depth."""
    if isinstance(value, dict):
        return {str(name): config_part(item) for name, item in value.items() if name not in IGNORED_CONFIG_FIELDS}
    if isinstance(value, (list, tuple)):
        return [config_part(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, Enum):
        return config_part(value.value)
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "to_dict"):
        return config_part(value.to_dict())
    raise UnsupportedModelError(
        f"the model's config holds {value!r:.80} ({type(value).__name__}), which cannot be told from another value in "
        "another process. Use numbers, texts, lists and dicts in configs."
    )
