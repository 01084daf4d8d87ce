# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Measurements behind this repository's own pages: one file each, with a plan and what measures it."""

from hf_blend.evaluation.bench.shapes import SHAPES, llama

SHAPES |= {
    "tiny-deep": llama("64 128 32 4 2", 512, 131072),
    "narrow-48-layers": llama("32 32 48 2 2", 512, 8192),
    "thin": llama("128 256 4 2 1", 512, 131072),
    "wide-kv": llama("256 256 16 8 8", 512, 8192),
    "tiny-hybrid": llama("64 128 4 4 2", 512, 8192, model_type="lfm2", full_attn_idxs=[2]),
    "lfm2-350m": llama(
        "1024 6656 16 16 8", 65536, 128000, model_type="lfm2", full_attn_idxs=[2, 5, 8, 10, 12, 14],
        tie_word_embeddings=True,
    ),
    "qwen3.5-12-layers": llama(
        "1024 3584 12 8 2", 4096, 32768, model_type="qwen3_5_text", head_dim=256, linear_num_key_heads=16,
        linear_num_value_heads=16, tie_word_embeddings=True,
    ),
}  # fmt: skip
