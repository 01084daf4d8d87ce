# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Pairs of neighbouring dimensions under a table that repeats its halves, the layout of GLM, Helium and Ernie 4.5."""

from .base import InterleavedStyle


class InterleavedHalves(InterleavedStyle):
    """The model spreads the first half of the table over the pairs; dimensions beyond its width do not turn."""
