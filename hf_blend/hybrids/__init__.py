# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Models whose layers keep the state of a mixer beside or instead of K and V; an extension that may be absent."""
