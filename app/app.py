# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The Space: the page of `hf-blend demo`, for visitors whom nobody knows. `make space` lays out all that it needs."""

from hf_blend.evaluation.demo.model_cache import ModelCache
from hf_blend.evaluation.demo.page import Demo, serve
from hf_blend.evaluation.demo.visitors import Limits, Visitors

demo = Demo(
    ModelCache(most_models=2, most_parameters=1_000_000_000, takes_folders=False),
    Visitors(Limits(answers_per_minute=12, prompt_tokens=2048, store_bytes=128 << 20)),
)

if __name__ == "__main__":
    serve(demo, host="0.0.0.0")
