# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Stored KV for every chunk, realigned, nothing recomputed: the end of the scale that is fast."""

from hf_blend.config import BlendConfig

from .base import Blended


class FullReuse(Blended):
    """Only the question is computed."""

    config = BlendConfig(recompute_ratio=0.0, selector="none")
