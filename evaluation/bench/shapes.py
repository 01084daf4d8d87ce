# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models to time: of a known shape with random weights, since speed does not depend on them, or one of the user's."""

from typing import Any

import torch
from torch import nn

from hf_blend.errors import ConfigError, suggest
from hf_blend.model.placement import input_device

from ..bundled import choose_dtype, open_model

OWN = "model:"  # before the path or id of a model that is no shape

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
    },
    "tiny-deep": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 131072,
    },
    "narrow-48-layers": {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
    },
    "thin": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
        "max_position_embeddings": 131072,
    },
    "wide-kv": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "lfm2-350m": {
        "model_type": "lfm2",
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "vocab_size": 65536,
        "max_position_embeddings": 128000,
        "tie_word_embeddings": True,
    },
    "qwen3.5-12-layers": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "vocab_size": 4096,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "tiny-hybrid": {
        "model_type": "lfm2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "full_attn_idxs": [2],
        "vocab_size": 512,
        "max_position_embeddings": 8192,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "sliding_window": None,
    },
}


def wait_for(model: nn.Module) -> None:
    """Wait until the model's device has done what was asked of it, so that a clock shows it."""
    if (device := input_device(model)).type == "cuda":
        torch.cuda.synchronize(device)


def timed_model(shape: str, dtype: str, device: str, seed: int = 0) -> nn.Module:
    """Load or make the model that a bench times."""
    if shape.startswith(OWN):
        return open_model(shape.removeprefix(OWN), device, dtype).load()
    kind = choose_dtype(dtype)
    return random_model(shape, kind if isinstance(kind, torch.dtype) else torch.float32, device, seed)


def text_config(model: nn.Module) -> Any:
    """Return the config of a model's decoder."""
    config: Any = model.config
    return config.get_text_config(decoder=True)


def head_width(config: Any) -> int:
    """Return how wide K and V of a head are."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kv_bytes(model: nn.Module, tokens: int) -> int:
    """Count the bytes of K and V of some tokens, in the model's dtype."""
    config, itemsize = text_config(model), next(model.parameters()).element_size()
    return int(2 * tokens * config.num_key_value_heads * head_width(config) * itemsize * config.num_hidden_layers)


def random_model(shape: str, dtype: torch.dtype, device: str, seed: int = 0) -> nn.Module:
    """Build a model of a known shape with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if shape not in SHAPES:
        raise ConfigError(f"there is no shape named {shape!r}. {suggest(shape, SHAPES)}")
    settings = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        settings.pop("model_type"), **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
