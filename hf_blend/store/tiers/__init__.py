# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Tiers keep named bytes. A new tier is one file that keeps the promises below."""
