# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Measurements of speed: every figure a ratio, taken in one run, interleaved, the median of several rounds."""
