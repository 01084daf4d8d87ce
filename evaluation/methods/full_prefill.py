# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Everything is computed for every prompt: the end of the scale that is right."""

import time
from collections.abc import Sequence

from hf_blend.model.anatomy import full_cache

from ..tasks.base import Sample
from .base import EvalMethod, Outcome


class FullPrefill(EvalMethod):
    """Stock `generate`."""

    def answer(self, samples: Sequence[Sample], targets: Sequence[Sequence[int]] | None = None) -> list[Outcome]:
        """Prefill everything; windows forget nothing, or 5.17 could not go back to the prompt for the targets."""
        started = time.perf_counter()
        return self.generate(self.inputs(samples), full_cache(self.model), targets, started)
