# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The tier that faults are injected into where no file is needed."""

from typing import Any

from hf_blend import plugins

__all__ = ["MemoryTier"]

MemoryTier: Any = plugins.load("store.tiers", "memory")
