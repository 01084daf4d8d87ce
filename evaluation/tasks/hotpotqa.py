# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""HotpotQA (distractor): ten passages, two of which answer together."""

from .base import QuestionTask


class Hotpotqa(QuestionTask):
    """CacheBlend has no script for it; its 2WikiMultihopQA prompt is used."""

    hub = ("hotpotqa/hotpot_qa", "distractor", "validation")
