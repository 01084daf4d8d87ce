# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What this room adds to the core: forwards that bring more than text."""

import logging
from dataclasses import replace
from typing import Any

from ..cache.blend_cache import BlendCache
from ..model.modality import has_features
from ..prefill.plan import Plan
from ..prefill.request import Request
from ..prompt.content import is_content
from .input_test import InputTest

logger = logging.getLogger(__name__)


def can_blend(cache: BlendCache, request: Request) -> bool:
    """Return True if it is known what each token of a forward stands for; if not, all of it is computed."""
    is_named = any(is_content(max(row, default=0)) for row in request.rows)
    marked = is_named or not all(map(cache._placeholders.isdisjoint, request.rows))
    if not marked and has_features(request.arguments):
        logger.warning(
            "nothing is reused: %s came with a prompt in which no token is known to stand for it",
            ", ".join(request.others),
        )
        return False
    return cache._past == 0 or InputTest.is_passed(cache.model, request.arguments, is_named)


def ensure_tested(cache: BlendCache, plan: Plan, request: Request) -> None:
    """Test the first forward of its kind beside itself."""

    def enter(plan: Plan, arguments: dict[str, Any]) -> BlendCache:
        twin = BlendCache(cache.model, cache.store, InputTest.config(cache.chunk_prefix_ids))
        tested = replace(request, arguments={**arguments, "logits_to_keep": 1})
        twin._enter(plan, tested, twin._prompts.pending, twin.report)
        return twin

    test = InputTest(cache.model, cache._placeholders, enter)
    test.ensure_passed(plan, {**request.arguments}, cache.config.allow_unverified)
