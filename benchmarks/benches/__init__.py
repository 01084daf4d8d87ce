# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Measurements behind this repository's own pages: one file each, with a plan and what measures it."""
