# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Everything is computed for every prompt: the end of the scale that is right."""

from .base import Plain


class FullPrefill(Plain):
    """Stock `generate`."""
