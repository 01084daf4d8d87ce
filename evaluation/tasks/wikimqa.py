# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""2WikiMultihopQA: questions whose answer joins facts from several passages."""

from .base import QuestionTask


class Wikimqa(QuestionTask):
    """CacheBlend's prompt; departs where the whole list of answers counts, not the first alias alone."""

    hub = ("framolfese/2WikiMultihopQA", None, "validation")
    between_sentences = " "
