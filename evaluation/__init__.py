# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Measuring how well, and how cheaply, blended prompts answer; installed as `hf_blend.evaluation`."""
