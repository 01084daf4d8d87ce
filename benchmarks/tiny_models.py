# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models of every causal type of transformers, as `tiny:TYPE` names them.

A tiny model is built from the config class of its type: sizes are made small by the names that configs share, whatever
else the type sets is kept. So a type needs no code here, and one whose config does not shrink says why.
"""

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from hf_blend.errors import ConfigError, UnsupportedModelError, suggest
from hf_blend.model.anatomy import other_states

LAYERS = 4
WEIGHT_SCALE = 3.0  # at 1 attention is nearly uniform, and much that is wrong would not show
SPREAD = 0.1  # of biases and norm weights, which are all 0 or all 1 in a fresh model
NOT_JUDGED = "not judged: "  # how it is said that there is no tiny model, so that nothing is known of a type
MOST_PARAMETERS = 20_000_000  # more means that the config did not shrink
FIELDS = {
    "vocab_size": 128, "hidden_size": 64, "embedding_size": 64, "intermediate_size": 128, "ffn_dim": 128,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2,
    "head_dim": 16, "rotary_dim": 16, "query_pre_attn_scalar": 16, "max_position_embeddings": 512,
    "sliding_window": 16, "attention_window_size": 16, "attention_chunk_size": 16,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
    "laurel_rank": 8, "num_kv_shared_layers": 0, "altup_num_inputs": 2, "first_k_dense_replace": 1,
    "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32, "num_global_key_value_heads": 2, "n_shared_experts": 1,
    "num_layers": LAYERS, "moe_topk": 2, "zero_expert_num": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_heads": 4, "linear_head_dim": 16, "lru_width": 64, "n_mamba_heads": 4, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
    "mamba_dt_rank": 4, "mamba_chunk_size": 32, "ssm_state_size": 16, "index_topk": 16, "index_head_dim": 32,
}  # fmt: skip
MIXERS = ("linear_attention", "conv")  # kinds of layers with a mixer
MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
SHARED: dict[str, Any] = {  # as by default in Gemma 3n, the last layers look at the K and V of earlier ones
    "num_hidden_layers": LAYERS + 1,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
}
LATENT_WINDOWS: dict[str, Any] = {  # latent attention with windows has sizes of its own
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32,
    "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16,
}  # fmt: skip
BLOCK_INDEXER: dict[str, Any] = {  # fields that are None by default, without which no layer can be made
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 16,
    "indexer_compress_ratio": 4, "hc_lowrank": 16,
}  # fmt: skip
EXTRA: dict[str, dict[str, Any]] = {  # what a type asks for beyond the names that many share
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1e6))
        },
    },
    "dbrx": {  # the classes of its inner configs lack what its checkpoints give
        "attn_config": {"rope_theta": 5e5, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_top_k": 2},
        "d_model": 64,
    },
    "dots3_note": {
        "text_config": LATENT_WINDOWS,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [-1, -1, 4, 4]},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": LATENT_WINDOWS,
    "bamba": {"attn_layer_indices": [2]},
    "gemma3n_text": SHARED,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": MIXED},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "chunk_size": 32},
    "minimax": {"layer_types": ["full_attention", "linear_attention"] * 2, "block_size": 16},
    "nemotron_h": {"chunk_size": 32},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"d_head": 16},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 32},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "chunk_size": 32},
    "qwen4_exp": {"text_config": BLOCK_INDEXER},
    "qwen4_exp_text": BLOCK_INDEXER,
    "zaya": {"num_experts_per_tok": 1},
}
WRONG_CONFIG = (ArithmeticError, AttributeError, AssertionError, ImportError, LookupError, RuntimeError,
                StrictDataclassError, TypeError, ValueError)  # fmt: skip


def tiny_types() -> list[str]:
    """Every model type that transformers knows as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(model_type: str, *, seed: int = 0, **fields: Any) -> nn.Module:
    """Build a small random model of a type: 4 layers of width 64, with grouped heads where the type can have them."""
    if model_type not in tiny_types():
        near = suggest(model_type, tiny_types()).partition("Available")[0]
        raise ConfigError(
            f"transformers has no causal language model of type {model_type!r}. {near}Give the model_type of a "
            "config.json, such as tiny:llama."
        )
    refusal = refused_by_config(model_type)
    if refusal:
        raise UnsupportedModelError(refusal)
    failures: list[BaseException] = []
    for fill in (False, True):  # some types leave at None what they cannot do without, others mean None
        try:
            return _build(model_type, seed, fields, fill)
        except UnsupportedModelError:
            raise
        except WRONG_CONFIG as error:
            failures.append(error)
    raise UnsupportedModelError(
        f"{NOT_JUDGED}no tiny model of type {model_type!r} can be built: {type(failures[0]).__name__}: "
        f"{_short(failures[0])} Its config does not shrink by the common field names; verify a checkpoint instead."
    ) from failures[0]


def refused_by_config(model_type: str) -> str:
    """Why no model of a type can be blended, as far as its default config tells; empty if it does not."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(model_type).get_text_config(decoder=True)
    except WRONG_CONFIG:
        return ""
    if getattr(config, "is_encoder_decoder", False):
        return f"{model_type} models are encoder-decoders, but only decoders that read prompts themselves are blended."
    complaint = other_states(config)
    return f"{model_type} models cannot be blended: {complaint}" if complaint else ""


def _build(model_type: str, seed: int, fields: dict[str, Any], fill: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = _tiny_config(model_type, fields, fill)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST_PARAMETERS:
        raise UnsupportedModelError(
            f"{NOT_JUDGED}no tiny model of type {model_type!r} can be built: it would have {count:,} parameters, at "
            f"most {MOST_PARAMETERS:,} are expected. Verify a checkpoint of it instead."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        _roughen(model)
    with torch.no_grad():
        model(torch.arange(8, 16)[None])  # sizes that do not fit each other show here
    return model


@torch.no_grad()
def _roughen(model: nn.Module) -> None:
    """Make every weight matter: larger matrices, biases and norm weights that differ."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(WEIGHT_SCALE)
        else:
            weight.add_(SPREAD * torch.randn_like(weight))


def _tiny_config(model_type: str, fields: dict[str, Any], fill: bool) -> Any:
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    shrunk = _shrunk(default, fill)
    extra = EXTRA.get(model_type, {})
    inner = {name: {**shrunk[name], **extra[name]} for name in extra if isinstance(shrunk.get(name), dict)}
    return AutoConfig.for_model(model_type, **{**shrunk, **extra, **inner, **fields})


def _shrunk(default: Any, fill: bool) -> dict[str, Any]:
    """Small values for those fields that a config has, with `fill` those at None too; its inner configs likewise."""
    found: dict[str, Any] = {name: value for name, value in FIELDS.items() if _has(default, name, fill)}
    found |= {name: FIELDS[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if _has(default, "num_key_value_heads", True):
        latent = _has(default, "kv_lora_rank", False)  # latent attention has as many as there are heads
        found["num_key_value_heads"] = FIELDS["num_attention_heads" if latent else "num_key_value_heads"]
    for name in getattr(default, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None:
            found[name] = _shrunk(inner, fill)
    kinds = _layer_kinds(default)
    own = getattr(default, "attribute_map", {}).get("layer_types", "layer_types")
    if 1 < len(kinds) <= LAYERS and not isinstance(getattr(type(default), own, None), property):
        found[own] = _layer_types(kinds)
    return found


def _has(config: Any, name: str, fill: bool) -> bool:
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        return hasattr(config, name) if fill else getattr(config, name, None) is not None
    except RuntimeError:  # its layers differ in it
        return True


def _layer_kinds(config: Any) -> list[str]:
    """The kinds of layers that a config names, one by one or as those with rotary tables of their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    named = (name for name in rope if name.endswith("_attention"))
    types = getattr(config, "layer_types", None) or ()
    return list(dict.fromkeys((*types, *(named if types else ()))))


def _layer_types(kinds: Sequence[str]) -> list[str]:
    """Every kind of layer that the type has, in its order; the first kind fills up, and is also last if it mixes."""
    if kinds[0] in MIXERS and len(kinds) < LAYERS:
        return [kinds[0]] * (LAYERS - len(kinds)) + [*kinds[1:], kinds[0]]
    return [kinds[0]] * (LAYERS - len(kinds) + 1) + list(kinds[1:])


def _short(error: BaseException) -> str:
    line = " ".join(str(error).split())
    return line if len(line) <= 200 else f"{line[:200]}…"
