# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""The rule that did best for its cost on the reference model: see benchmarks/LOG.md, benchmarks/results/study.json.

`dependency` with its defaults. Evidence: one small model that binds in its first layers; for another model let
`hf-blend tune` say what it needs.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from .. import plugins
from .base import Selector, TokenView


class Auto(Selector):
    """The recommended selector; it takes no options, so that its results stay comparable."""

    needs_attention = True
    at_layer_0 = True
    defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, options: Mapping[str, Any], seed: int = 0) -> None:
        """See `Selector`."""
        super().__init__(options, seed)
        self._rule: Selector = plugins.load("selectors", "dependency")({}, seed)

    def score(self, view: TokenView) -> Tensor:
        """The rule's scores, `[batch, tokens]`."""
        return self._rule.score(view)
