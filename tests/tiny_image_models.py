# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models that read images, and prompts as their processors make them."""

import functools
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

IMAGE = 120
START = 122
END = 123
CONFIGS = json.loads(Path(__file__).with_name("image_configs.json").read_text("utf-8"))
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
