# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The reference world: a small English in which later chunks refer to earlier ones, and a model that speaks it."""

from .sampling import Example, sample_examples

__all__ = ["Example", "sample_examples"]
