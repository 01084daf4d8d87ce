# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Documents: a text, or a dict or an object that has one.

The text is the first of `FIELDS` that is there and not None. A dict's `title` is put before it, an empty line between,
unless a prompt has the text without it. No other field is used. So documents of LangChain and Haystack can be passed,
and their JSON too. A node of LlamaIndex has the text that LlamaIndex writes into prompts.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import PromptError

logger = logging.getLogger(__name__)

FIELDS = ("text", "content", "page_content")
TITLE_END = "\n\n"
TITLES = ("title", "source", "file_path")  # of an object's metadata, the first that it has
EXPECTED = "a text, or a dict or an object that has one as text, content or page_content"
MOST_NAMED = 5  # empty documents that are named one by one


def list_documents(documents: Any, name: str = "documents") -> list[Any]:
    """Return a list of documents; a single document is refused, None is an empty list."""
    if documents is None:
        return []
    if not is_list(documents):
        raise PromptError(f"{name} is {documents!r:.60}, expected a list of {name}. Write [document].")
    return list(documents)


def is_list(value: Any) -> bool:
    """Whether something is a list of documents, or of token ids; bytes are neither."""
    is_iterable = hasattr(value, "__iter__") and not isinstance(value, bytes | bytearray | memoryview | type)
    return is_iterable and not is_document(value)


def is_document(value: Any) -> bool:
    """Whether something is one document, not a list of documents or of token ids."""
    return isinstance(value, str) or _fields(value) is not None


def text_of(document: Any, name: str = "the document", expected: str = EXPECTED, *, may_be_empty: bool = False) -> str:
    """Return a document's text, behind its title if it has one; errors call the document `name`."""
    return forms_of(document, name, expected, may_be_empty=may_be_empty)[0]


def forms_of(
    document: Any, name: str = "the document", expected: str = EXPECTED, *, may_be_empty: bool = False
) -> list[str]:
    """Return the texts that a document may be in a prompt: behind its title if it has one, and alone."""
    text = _text(document, name, expected)
    title = None
    if isinstance(document, Mapping):
        title = document.get("title")
    if not isinstance(title, str | None):
        raise PromptError(f"{name} has the title {title!r:.60}, expected a text there. Leave it out.")
    is_empty = not text.strip()
    if is_empty and not may_be_empty:
        raise PromptError(f"{name} is {document!r:.60} and has no text. Leave empty documents out.")
    if is_empty or not title or not title.strip():
        return [text]
    return [f"{title}{TITLE_END}{text}", text]


def texts_of(documents: Any, contents: Sequence[str] = ()) -> list[str]:
    """Return the text of each document, without its title where one of the contents has it so; no empty ones."""
    texts = []
    for number, document in enumerate(list_documents(documents)):
        forms = forms_of(document, f"document {number}")
        there = [text for text in forms if not absent([text], contents)]
        texts.append(there[0] if there else forms[0])
    return texts


def leave_out_empty(documents: Any, least: int = 1) -> tuple[list[Any], str]:
    """Return the documents that are not empty, and a notice about the empty ones, which is also logged.

    A retriever may return an empty page. Fewer than `least` documents that are not empty are refused.
    """
    listed = list_documents(documents)
    filled = []
    empty = []
    for number, document in enumerate(listed):
        text = text_of(document, f"document {number}", may_be_empty=True)
        if text.strip():
            filled.append(document)
        else:
            empty.append(str(number))
    if not empty:
        return listed, ""
    if len(filled) < least:
        raise PromptError(f"each of {len(listed)} documents has no text, as {listed[0]!r:.60}. Leave them out.")
    named = ", ".join(empty[:MOST_NAMED])
    if len(empty) > MOST_NAMED:
        named += ", …"
    notice = f"{len(empty)} of {len(listed)} documents are empty and left out: {named}, counted from 0."
    logger.warning(notice)
    return filled, notice


def for_template(document: Any) -> Mapping[str, Any]:
    """Return a document as chat templates expect it: `text`, and a `title` if it has one."""
    if isinstance(document, Mapping) and isinstance(document.get("text"), str):
        return document
    about = document if isinstance(document, Mapping) else _metadata(document)
    title = next((str(about[name]) for name in TITLES if about.get(name)), "")
    return {**({"title": title} if title else {}), "text": forms_of(document)[-1]}


def absent(texts: Sequence[str], contents: Sequence[str]) -> list[str]:
    """Return the texts that are in none of the contents."""
    return [text for text in texts if not any(text in content for content in contents)]


def _text(document: Any, name: str, expected: str) -> str:
    """The text, which may be empty."""
    if isinstance(document, str):
        return document
    fields = _fields(document)
    if fields is None:
        raise PromptError(f"{name} is {document!r:.60}, expected {expected}. Leave it out.")
    there = [field for field in FIELDS if field in fields]
    if not there:
        names = ", ".join(map(repr, fields))[:60] or "none"
        raise PromptError(f"{name} has no text: its fields are {names}, expected {expected}. Leave it out.")
    for field in there:
        text = fields[field]
        if isinstance(text, str):
            return text
        if text is not None:
            raise PromptError(f"{name} has the {field} {text!r:.60}, expected a text there. Leave it out.")
    return ""


def _fields(document: Any) -> Mapping[str, Any] | None:
    """The fields of a document, by name; None if it is no document."""
    if isinstance(document, Mapping):
        return document
    if isinstance(document, type) or hasattr(document, "tolist"):  # a class; an array or a tensor
        return None
    if callable(getattr(document, "get_content", None)):
        return {"text": _node_text(document)}
    return {name: getattr(document, name) for name in FIELDS if hasattr(document, name)} or None


def _node_text(node: Any) -> str:
    """The text of a LlamaIndex node as in its prompts, with metadata; empty if there is nothing but metadata."""
    if not (node.get_content(metadata_mode="none") or "").strip():
        return ""
    return str(node.get_content(metadata_mode="llm")).strip()


def _metadata(document: Any) -> Mapping[str, Any]:
    metadata = next((getattr(document, name) for name in ("metadata", "meta") if hasattr(document, name)), None)
    return metadata if isinstance(metadata, Mapping) else {}
