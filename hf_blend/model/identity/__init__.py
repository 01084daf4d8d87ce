# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What a model computes, as far as it can be known without running it: weights, structure, code, hooks."""
