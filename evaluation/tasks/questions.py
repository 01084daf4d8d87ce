# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Questions of a file of one's own: `hf-blend eval FILE.jsonl`."""

from .base import QuestionTask


class Questions(QuestionTask):
    """The prompt of 2WikiMultihopQA over the rows of a file."""
