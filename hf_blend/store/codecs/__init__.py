# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Codecs pack K and V into fewer bytes. A new codec is one file that keeps the promises of `base.py`."""
