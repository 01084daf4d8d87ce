# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Leave stored KV as it is: every byte that is not recomputed stays what the store holds."""

from .base import Corrector, LayerView


class Nothing(Corrector):
    """Corrects nothing, and is never called."""

    is_active = False

    def correct(self, view: LayerView) -> None:
        """Nothing."""
