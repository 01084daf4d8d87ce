# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""How stored keys move to new positions: one rotary style per file, and the probe that finds a layer's style."""
