# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Attending to less and loading less: selections of blocks that hold over several decoding steps."""
