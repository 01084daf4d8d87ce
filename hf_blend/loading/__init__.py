# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading stored KV while the model computes, and deciding how much to recompute meanwhile."""
