# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The version, in one place; read statically by the build."""

__version__ = "0.1.0"
