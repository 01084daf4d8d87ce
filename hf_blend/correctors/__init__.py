# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Cheap repairs of the tokens that are not recomputed: one method per file, found by name."""
