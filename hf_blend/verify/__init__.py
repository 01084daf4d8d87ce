# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Checks of exactness: small claims about blending, each measured on one model, and what runs them."""
