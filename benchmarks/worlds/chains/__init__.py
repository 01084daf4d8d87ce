# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The chain world: short notes in which "that animal" means the last animal told of, often in another chunk."""

from .sampling import Example, sample_examples

__all__ = ["Example", "sample_examples"]
