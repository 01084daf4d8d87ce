# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What mkdocs calls while it builds docs/ as a site: README is the first page, links to other files become names."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "README.md"
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")
BADGES = re.compile(r"^\[!\[.*\n", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Name the files of the repository that a page links to, because they are no pages of the site."""
    if page.file.src_uri == "README.md":
        markdown = front_page(README.read_text("utf-8"))
    return OUTSIDE.sub(lambda found: _named(found[1], found[2]), markdown)


def front_page(readme: str) -> str:
    """README with links as they are in docs/, and without its badges, which a reader would fetch from elsewhere."""
    text = BADGES.sub("", readme)
    text = re.sub(r"\]\((?!https?:|docs/|#)", "](../", text)
    return re.sub(r'(\]\(|src=")docs/', r"\1", text)


def _named(text: str, path: str) -> str:
    """A text, and in brackets the path that it does not end with."""
    return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"
