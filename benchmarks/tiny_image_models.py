# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models that read images, and images for them in the form that their processors give.

How a tower is made small has no names that types share, so each type has a config here; others are not judged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Arguments = dict[str, Tensor]

IMAGE, VIDEO, START, END = 120, 121, 122, 123
TEXT: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EYE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
QWEN_EYE: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "spatial_merge_size": 2, "temporal_patch_size": 1,
}  # fmt: skip
MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
LOCAL: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _plain(seed: int, images: int = 1) -> Arguments:
    return {"pixel_values": _noise(seed, images, 3, 16, 16)}


def _tiles(seed: int, images: int = 1) -> Arguments:
    return {"pixel_values": _noise(seed, images, 1, 3, 16, 16)}


def _sized(seed: int, images: int = 1, copies: int | None = None) -> Arguments:
    shape = (3, 16, 16) if copies is None else (copies, 3, 16, 16)
    return {"pixel_values": _noise(seed, images, *shape), "image_sizes": torch.tensor([[16, 16]] * images)}


def _grid(seed: int, images: int = 1) -> Arguments:
    return {"pixel_values": _noise(seed, images * 16, 48), "image_grid_thw": torch.tensor([[1, 4, 4]] * images)}


def _patches(seed: int, images: int = 1) -> Arguments:
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    return {"pixel_values": _noise(seed, images, 16, 48).sigmoid(), "image_position_ids": places.repeat(images, 1, 1)}


def _marked(ids: Tensor) -> Arguments:
    return {"mm_token_type_ids": (ids == IMAGE).long()}


def _blocks(ids: Tensor) -> Arguments:
    return {"token_type_ids": (ids == IMAGE).long()}


def _prefixed(ids: Tensor) -> Arguments:
    return {"token_type_ids": torch.zeros_like(ids)}


def _unmarked(_: Tensor) -> Arguments:
    return {}


def _llava(text: dict[str, Any], eye: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"text_config": {**TEXT, **text}, "vision_config": {**EYE, **eye}, "image_token_index": IMAGE, **fields}


def _qwen(kind: str, eye: dict[str, Any], **rope: Any) -> dict[str, Any]:
    text = {**TEXT, "model_type": kind, "rope_parameters": {**MROPE, **rope}}
    return {"text_config": text, "vision_config": {**QWEN_EYE, **eye}, **QWEN}


class ImageKind(NamedTuple):
    """A type of models that read images."""

    config: dict[str, Any]
    tokens: int
    pixels: Callable[..., Arguments]
    marks: Callable[[Tensor], Arguments]


STACKED: dict[str, Any] = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEP = _qwen("qwen3_vl_moe_text", STACKED, mrope_interleaved=True)
GLM = {
    **_qwen("glm4v_text", {"image_size": 16}, partial_rotary_factor=1.0),
    "image_start_token_id": START,
    "image_end_token_id": END,
}
GLM_MOE = {
    "model_type": "glm4v_moe_text", "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
HYBRID = _qwen("qwen3_5_text", {"num_position_embeddings": 16}, mrope_interleaved=True, partial_rotary_factor=1.0)
HYBRID["text_config"] |= LINEAR
HYBRID_MOE = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 32, **MOE}
KINDS: dict[str, ImageKind] = {
    "llava": ImageKind(
        _llava(
            {"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 32}, vision_feature_layer=-1
        ),
        16,
        _plain,
        _unmarked,
    ),
    "llava_onevision": ImageKind(
        _llava(
            {"model_type": "qwen2"},
            {"model_type": "siglip_vision_model"},
            video_token_index=VIDEO,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[16, 16]],
        ),
        36,
        functools.partial(_sized, copies=2),
        _unmarked,
    ),
    "mistral3": ImageKind(
        _llava(
            {"model_type": "mistral"},
            {"model_type": "pixtral", "head_dim": 16},
            spatial_merge_size=2,
            vision_feature_layer=-1,
        ),
        4,
        _sized,
        _unmarked,
    ),
    "gemma3": ImageKind(
        _llava(
            {"model_type": "gemma3_text", "query_pre_attn_scalar": 16, **LOCAL},
            {"model_type": "siglip_vision_model"},
            boi_token_index=START,
            eoi_token_index=END,
            mm_tokens_per_image=4,
        ),
        4,
        _plain,
        _blocks,
    ),
    "internvl": ImageKind(
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**EYE, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
        4,
        _plain,
        _unmarked,
    ),
    "idefics3": ImageKind(
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {**EYE, "model_type": "idefics3_vision"},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        4,
        _tiles,
        _unmarked,
    ),
    "smolvlm": ImageKind(
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {**EYE, "model_type": "smolvlm_vision"},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        4,
        _tiles,
        _unmarked,
    ),
    "qwen2_vl": ImageKind(
        _qwen("qwen2_vl_text", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}), 4, _grid, _marked
    ),
    "qwen2_5_vl": ImageKind(
        _qwen("qwen2_5_vl_text", {"window_size": 16, "fullatt_block_indexes": [1]}), 4, _grid, _marked
    ),
    "qwen3_vl": ImageKind(_qwen("qwen3_vl_text", STACKED, mrope_interleaved=True), 4, _grid, _marked),
    "qwen3_vl_moe": ImageKind({**DEEP, "text_config": {**DEEP["text_config"], **MOE}}, 4, _grid, _marked),
    "glm4v": ImageKind(GLM, 4, _grid, _marked),
    "gemma4": ImageKind(
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "global_head_dim": 16,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 128,
                "num_kv_shared_layers": 0,
                **LOCAL,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 16,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "boi_token_id": START,
            "eoi_token_id": END,
        },
        4,
        _patches,
        _marked,
    ),
    "paligemma": ImageKind(
        _llava(
            {"model_type": "gemma"},
            {"model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False},
            projection_dim=64,
        ),
        16,
        _plain,
        _prefixed,
    ),
    "aya_vision": ImageKind(
        _llava(
            {"model_type": "cohere2", **LOCAL},
            {"model_type": "siglip_vision_model", "vision_use_head": False},
            vision_feature_layer=-1,
        ),
        4,
        _plain,
        _unmarked,
    ),
    "cohere2_vision": ImageKind(
        {
            "text_config": {"model_type": "cohere2", **TEXT, **LOCAL},
            "vision_config": {"model_type": "siglip_vision_model", **EYE},
            "image_token_id": IMAGE,
            "alignment_intermediate_size": 64,
        },
        4,
        _plain,
        _unmarked,
    ),
    "vipllava": ImageKind(
        _llava(
            {"model_type": "llama"},
            {"model_type": "clip_vision_model", "projection_dim": 32},
            vision_feature_layer=[-1, -2],
        ),
        16,
        _plain,
        _unmarked,
    ),
    "glm4v_moe": ImageKind({**GLM, "text_config": {**GLM["text_config"], **GLM_MOE}}, 4, _grid, _marked),
    "qwen3_5": ImageKind(HYBRID, 4, _grid, _marked),
    "qwen3_5_moe": ImageKind({**HYBRID, "text_config": {**HYBRID["text_config"], **HYBRID_MOE}}, 4, _grid, _marked),
}
KINDS |= {"glm46v": KINDS["glm4v"], "shieldgemma2": KINDS["gemma3"]}


def image_types() -> list[str]:
    """Every model type that transformers knows to read images and text, and to write text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def tiny_image_model(kind: str, attention: str = "sdpa") -> nn.Module:
    """Build a small random model that reads images, in which every weight matters."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(kind, **KINDS[kind].config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention, dtype=torch.float32)
        for weight in model.parameters():
            if weight.ndim > 1 and weight.any():
                weight.mul_(4.0)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    found: nn.Module = model.eval()
    return found


def picture(kind: str) -> list[int]:
    """The tokens of one image."""
    return [START, *[IMAGE] * KINDS[kind].tokens, END]


def image_arguments(kind: str, ids: Tensor, seeds: Sequence[int]) -> Arguments:
    """What a processor makes of a prompt with images.

    Shapes: ids `[1, tokens]`.
    """
    each = [KINDS[kind].pixels(seed) for seed in seeds]
    axis = 1 if KINDS[kind].pixels is _tiles else 0  # [batch, images, …]
    pixels = {name: torch.cat([one[name] for one in each], axis) for name in each[0]}
    return {"input_ids": ids, **KINDS[kind].marks(ids), **pixels}
