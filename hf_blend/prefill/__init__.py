# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""One blended prefill: find stored chunks, move their keys, choose tokens, recompute them in the model's own forward.

The door is `blend.Prefill`, which `BlendCache` makes when the forward begins and drops when it ends. Nothing here
outlives a request, and the stored chunks are never changed.
"""
