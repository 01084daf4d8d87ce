# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What mkdocs calls while it builds docs/ as a site: links to files outside docs/ become the files' names."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Name the files of the repository that a page links to, because they are no pages of the site."""
    return OUTSIDE.sub(lambda found: _named(found[1], found[2]), markdown)


def _named(text: str, path: str) -> str:
    """A text, and in brackets the path that it does not end with."""
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
