# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Loading only the important KV from disk, after IMPRESS (Chen et al., FAST 2025)."""
