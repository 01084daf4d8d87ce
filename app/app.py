# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The Space: the page of `hf-blend demo`, for visitors whom nobody knows. `make space` lays out all that it needs."""

from hf_blend.evaluation.demo.loaded import load_exact
from hf_blend.evaluation.demo.page import Demo, serve
from hf_blend.evaluation.demo.visitors import Limits, Visitors

if __name__ == "__main__":
    limits = Limits(answers_per_minute=12, prompt_tokens=2048, store_bytes=128 << 20)
    serve(Demo(load_exact(), Visitors(limits)), host="0.0.0.0")
