# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""What an object that is no module, tensor or function is made of: its attributes and slots, or what pickle sees."""

import copyreg
import hashlib
import logging
from collections.abc import Iterator
from types import FunctionType, MemberDescriptorType
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch

logger = logging.getLogger(__name__)


def parts_of(value: Any) -> dict[str, Any] | None:
    """All that tells an object from others of its class, by name; None where nothing of it can be read."""
    if isinstance(value, torch.ScriptObject):  # its tensors are new ones at each look
        return None
    if isinstance(value, ReferenceType):
        return {"to": value()}
    if isinstance(value, (np.ndarray, np.generic)):
        content = value.tolist() if value.dtype.hasobject else digest_of_bytes(value.tobytes())
        return {"dtype": str(value.dtype), "shape": value.shape, "content": content}
    if isinstance(value, (property, classmethod, staticmethod)):
        return fields_of(value) | {name: getattr(value, name, None) for name in ("fget", "__func__")}
    fields, kind = fields_of(value), type(value)
    is_pickled_its_way = kind in copyreg.dispatch_table or kind.__reduce__ is not object.__reduce__
    if fields and not is_pickled_its_way and kind.__reduce_ex__ is object.__reduce_ex__:
        return fields
    try:
        reduced = copyreg.dispatch_table.get(kind, lambda _: value.__reduce_ex__(2))(value)
    except Exception as error:  # whatever the code of a stranger raises
        logger.debug("a %s is read by its attributes, as it cannot be pickled: %r", kind.__name__, error)
        return fields or _content_of(value)
    if isinstance(reduced, str):
        return fields | {"": reduced}
    return {str(at): [*state] if isinstance(state, Iterator) else state for at, state in enumerate(reduced)}


def _content_of(value: Any) -> dict[str, Any] | None:
    """The bytes of a view or another buffer; None of what is none."""
    try:
        return parts_of(np.asarray(memoryview(value)))
    except (TypeError, ValueError):  # no buffer; released, or of elements that have no dtype
        return None


def fields_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots too."""
    members = [vars(base).items() for base in type(value).__mro__]
    slots = [name for items in members for name, member in items if isinstance(member, MemberDescriptorType)]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def closed_over(function: Any) -> list[Any]:
    """The values that a closure holds."""
    cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
    return [cell.cell_contents for cell in cells if cell != type(cell)()]


def digest_of_bytes(content: bytes) -> str:
    """The SHA-256 of bytes, in 64 hex digits."""
    return hashlib.sha256(content).hexdigest()
