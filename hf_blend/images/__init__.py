# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Prompts with images: blended in place, or as chunks of their own; an extension that may be absent."""
