# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Small random models that read images, their images, and the stock answer to compare with."""

import functools

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from hf_blend import BlendCache, ChunkStore

IMAGE, VIDEO, START, END = 120, 121, 122, 123
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EYE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
QWEN_EYE = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "spatial_merge_size": 2, "temporal_patch_size": 1,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
QWEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
LOCAL = {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}


def pixels(seed, batch, *shape):
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed))


def plain(seed, batch=1):
    return {"pixel_values": pixels(seed, batch, 3, 16, 16)}


def tiles(seed, batch=1):
    return {"pixel_values": pixels(seed, batch, 1, 3, 16, 16)}


def sized(seed, batch=1, copies=None):
    shape = (3, 16, 16) if copies is None else (copies, 3, 16, 16)
    return {"pixel_values": pixels(seed, batch, *shape), "image_sizes": torch.tensor([[16, 16]] * batch)}


def grid(seed, batch=1):
    return {"pixel_values": pixels(seed, batch * 16, 48), "image_grid_thw": torch.tensor([[1, 4, 4]] * batch)}


def patches(seed, batch=1):
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    return {"pixel_values": pixels(seed, batch, 16, 48).sigmoid(), "image_position_ids": places.repeat(batch, 1, 1)}


def marked(ids):
    return {"mm_token_type_ids": (ids == IMAGE).long()}


def blocks(ids):
    return {"token_type_ids": (ids == IMAGE).long()}


def prefixed(ids):
    return {"token_type_ids": torch.zeros_like(ids)}


def unmarked(ids):
    return {}


def llava(text, eye, **fields):
    return {"text_config": {**TEXT, **text}, "vision_config": {**EYE, **eye}, "image_token_index": IMAGE, **fields}


def qwen(kind, eye, **rope):
    text = {**TEXT, "model_type": kind, "rope_parameters": {**MROPE, **rope}}
    return {"text_config": text, "vision_config": {**QWEN_EYE, **eye}, **QWEN}


STACKED = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEP = qwen("qwen3_vl_moe_text", STACKED, mrope_interleaved=True)
KINDS = {  # type: its config, tokens of an image, pixels, what says which token is of an image
    "llava": (
        llava(
            {"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 32}, vision_feature_layer=-1
        ),
        16,
        plain,
        unmarked,
    ),
    "llava_onevision": (
        llava(
            {"model_type": "qwen2"},
            {"model_type": "siglip_vision_model"},
            video_token_index=VIDEO,
            vision_feature_layer=-1,
            image_grid_pinpoints=[[16, 16]],
        ),
        36,
        functools.partial(sized, copies=2),
        unmarked,
    ),
    "mistral3": (
        llava(
            {"model_type": "mistral"},
            {"model_type": "pixtral", "head_dim": 16},
            spatial_merge_size=2,
            vision_feature_layer=-1,
        ),
        4,
        sized,
        unmarked,
    ),
    "gemma3": (
        llava(
            {"model_type": "gemma3_text", "query_pre_attn_scalar": 16, **LOCAL},
            {"model_type": "siglip_vision_model"},
            boi_token_index=START,
            eoi_token_index=END,
            mm_tokens_per_image=4,
        ),
        4,
        plain,
        blocks,
    ),
    "internvl": (
        {
            "text_config": {"model_type": "qwen2", **TEXT},
            "vision_config": {**EYE, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
        4,
        plain,
        unmarked,
    ),
    "idefics3": (
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {**EYE, "model_type": "idefics3_vision"},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        4,
        tiles,
        unmarked,
    ),
    "smolvlm": (
        {
            "text_config": {"model_type": "llama", **TEXT},
            "vision_config": {**EYE, "model_type": "smolvlm_vision"},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        4,
        tiles,
        unmarked,
    ),
    "qwen2_vl": (qwen("qwen2_vl_text", {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}), 4, grid, marked),
    "qwen2_5_vl": (qwen("qwen2_5_vl_text", {"window_size": 16, "fullatt_block_indexes": [1]}), 4, grid, marked),
    "qwen3_vl": (qwen("qwen3_vl_text", STACKED, mrope_interleaved=True), 4, grid, marked),
    "qwen3_vl_moe": ({**DEEP, "text_config": {**DEEP["text_config"], **MOE}}, 4, grid, marked),
    "glm4v": (
        {
            **qwen("glm4v_text", {"image_size": 16}, partial_rotary_factor=1.0),
            "image_start_token_id": START,
            "image_end_token_id": END,
        },
        4,
        grid,
        marked,
    ),
    "gemma4": (
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
        patches,
        marked,
    ),
    "paligemma": (
        llava(
            {"model_type": "gemma"},
            {"model_type": "siglip_vision_model", "projection_dim": 64, "vision_use_head": False},
            projection_dim=64,
        ),
        16,
        plain,
        prefixed,
    ),
}
FAST = ("llava", "qwen3_vl", "gemma3")
FLOOR = 2e-5  # of logits of size 1 to 5: sums in another order; another image moves them by 0.01 to 1
PREFIX, CHUNKS, QUESTION = [1, 5, 6, 7], [[*range(10, 26)], [*range(30, 50)], [*range(52, 70)]], [7, 8, 9, 11]


def build(kind, attention="sdpa", dtype=torch.float32):
    """A small random model with eyes, the same at each call."""
    return _build(kind, attention, dtype)


@functools.cache
def _build(kind, attention, dtype):
    """Every weight matters: biases and norms differ, and nothing is zero."""
    config = AutoConfig.for_model(kind, **KINDS[kind][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1 and weight.any():
                    weight.mul_(4.0)
                else:
                    weight.add_(0.1 * torch.randn_like(weight))
    return model.eval().to(dtype)


def picture(kind):
    """The tokens of one image."""
    return [START, *[IMAGE] * KINDS[kind][1], END]


def arguments(kind, ids, seed):
    given = dict(KINDS[kind][2](seed, len(ids)).items())
    dtype = build(kind).dtype
    return {name: part.to(dtype) if part.is_floating_point() else part for name, part in given.items()} | KINDS[kind][
        3
    ](ids)


@torch.no_grad()
def stock(kind, ids, seed, attention="sdpa", **given):
    """Last logits of the model alone, and its cache, which forgets nothing."""
    cache = DynamicCache()
    given = {**arguments(kind, ids, seed), **given}
    output = build(kind, attention)(input_ids=ids, **given, past_key_values=cache, logits_to_keep=1, use_cache=True)
    return output.logits[:, -1], cache


@torch.no_grad()
def blend(kind, ids, seed, store, attention="sdpa", given=(), **settings):
    """Last logits of a blended forward, and the cache."""
    cache = BlendCache(build(kind, attention), store, **settings)
    cache.get_seq_length()
    given = {**arguments(kind, ids, seed), **dict(given)}
    output = build(kind, attention)(input_ids=ids, **given, past_key_values=cache, logits_to_keep=1, use_cache=True)
    return output.logits[:, -1], cache


def prompt(kind, *pieces):
    """Prefix, pieces and question as `[1, tokens]`."""
    return torch.tensor([[*PREFIX, *(token for piece in pieces for token in piece), *QUESTION]])


def filled(kind, attention="sdpa"):
    store = ChunkStore.open("memory://")
    store.add(build(kind, attention), None, CHUNKS)
    return store


def gap(one, other):
    return float((one - other).abs().max())
