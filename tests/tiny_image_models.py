# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models that read images, and prompts as their processors make them."""

import functools

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE = 120
START = 122
END = 123
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 32,
}  # fmt: skip
QWEN_VISION = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "spatial_merge_size": 2, "temporal_patch_size": 1, "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
CONFIGS = {
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"}, "vision_config": CLIP, "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "model_type": "qwen3_vl_text", "rope_parameters": MROPE},
        "vision_config": QWEN_VISION, "image_token_id": IMAGE, "video_token_id": 121,
        "vision_start_token_id": START, "vision_end_token_id": END,
    },
}  # fmt: skip
IMAGE_TOKENS = {"llava": 16, "qwen3_vl": 4}


@functools.cache
def tiny_image_model(kind):
    """A model of this type in which every weight matters, the same at each call."""
    config = AutoConfig.for_model(kind, **CONFIGS[kind])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        for weight in model.parameters():
            if weight.ndim > 1 and weight.any():
                weight.mul_(4.0)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


def image_tokens(kind):
    """The tokens of one image."""
    return [START, *[IMAGE] * IMAGE_TOKENS[kind], END]


def image_inputs(kind, ids, seed=0):
    """What a processor makes of a prompt with one image; ids `[1, tokens]`."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "llava":
        return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(16, 48, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }
