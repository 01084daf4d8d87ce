# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What this room adds to the core: forwards that bring more than text."""

import logging

from ..cache.blend_cache import BlendCache
from ..model.checks import ensure_passed, has_passed
from ..model.modality import has_features
from ..prefill.plan import Plan
from ..prefill.request import Request
from ..prompt.content import is_content
from .input_test import OTHER_INPUTS, FirstForward

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
    if request.past == 0:
        return True
    return has_passed(FirstForward(cache, request.arguments, is_named), OTHER_INPUTS)


def ensure_tested(cache: BlendCache, plan: Plan, request: Request) -> None:
    """Test the first forward of its kind beside itself."""
    of_images = any(placed.is_image for placed in plan.chunks)
    tested = FirstForward(cache, request.arguments, of_images).plan(plan, request)
    ensure_passed(tested, OTHER_INPUTS, cache.config.allow_unverified)
