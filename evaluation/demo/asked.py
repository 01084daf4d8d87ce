# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Asks a running page as a program: the check of `hf-blend demo --check`."""

import re
from html import unescape

from hf_blend.errors import import_extra

from .wish import first_wish

ANSWER = re.compile(r'data-method="([^"]+)" data-state="done".*?class="hb-answer">(.*?)</p>', re.DOTALL)


def first_answers(url: str, model: str) -> dict[str, str]:
    """Ask the question that the page opened with."""
    client = import_extra("gradio_client", extra="demo", wanted_by="checking the page").Client(url, verbose=False)
    wish = first_wish()
    how = (wish.recompute_ratio, wish.selector)
    shown = client.predict(model, wish.documents, wish.question, *how, api_name="/ask")
    return {method: unescape(text) for value in shown for method, text in ANSWER.findall(str(value))}
