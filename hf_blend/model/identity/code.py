# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""Digests of what a model is made of: the code of its functions, by name or by bytecode, and the bits of its tensors.

A function counts as a library's own if it, and all that it wraps, was compiled from a file of that library: a wrapper
may copy every name, but not the file. Bytecode belongs to one version of Python; names belong to all.
"""

import contextlib
import functools
import hashlib
import os
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn

LIBRARIES = ("torch", "transformers", "accelerate", "bitsandbytes", "peft", "torchao", "hf_blend")
_ROW_LANES = 1 << 17  # 1 MiB at a time on the CPU, so that the work stays in its caches
_ROWS_ON_ACCELERATOR = 64
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
_SITES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
BUILTINS = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, type(object.__init__))
CALLABLES = (FunctionType, MethodType, functools.partial, *BUILTINS)


def is_library(module: str | None) -> bool:
    """Whether a dotted module name belongs to a library whose code is known by name."""
    return (module or "").partition(".")[0] in LIBRARIES


def is_stock(function: Any) -> bool:
    """Whether a function, and everything that it wraps, was compiled from files of the libraries."""
    folders = _folders(tuple(name for name in LIBRARIES if name in sys.modules))
    inner: Any = function
    while isinstance(inner, FunctionType):
        file, wrapped = inner.__code__.co_filename, getattr(inner, "__wrapped__", None)
        wrapped = getattr(wrapped, "__func__", wrapped)
        is_decorator = wrapped is not None and file in (contextlib.__file__, functools.__file__)
        if not is_library(inner.__module__) or not (is_decorator or file.startswith(folders)):
            return False
        inner = wrapped
    return inner is None or isinstance(inner, BUILTINS)


def is_installed(value: Any) -> bool:
    """Whether a function or class comes with Python or from an installed package, rather than from the user."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    code = getattr(value, "__code__", None)
    file = code.co_filename if code is not None else getattr(module, "__file__", None) or ""
    top = (getattr(value, "__module__", None) or "").partition(".")[0]
    return file.startswith("<frozen") or top in sys.stdlib_module_names or any(name in file for name in _SITES)


def qualified_name(value: Any) -> str:
    """Module and name of a function or class."""
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def plain_function(attribute: Any) -> FunctionType | None:
    """The function behind an attribute of a class: a method, a property's getter, or what a decorator wraps."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    attribute = getattr(attribute, "__func__", attribute)
    return attribute if isinstance(attribute, FunctionType) else None


@functools.lru_cache(maxsize=4096)
def code_digest(code: CodeType) -> str:
    """A digest of bytecode, constants and names, with those of the functions inside, in 64 hex digits."""
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    parts = [sys.version_info[:2], code.co_code.hex(), shape, names, [_constant(one) for one in code.co_consts]]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def global_names(code: CodeType) -> set[str]:
    """Names that a function, and the functions inside it, may look up in its module."""
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*map(global_names, inside))


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return repr(sorted(map(repr, value)))
    return repr(value)


@functools.lru_cache(maxsize=8)
def _folders(names: tuple[str, ...]) -> tuple[str, ...]:
    files = (getattr(sys.modules[name], "__file__", None) for name in names)
    return tuple(os.path.dirname(file) + os.sep for file in files if file)


@torch.no_grad()
def checksum(tensor: Tensor) -> str:
    """Sum up the bits of a tensor on its own device, so that any changed, moved or swapped value changes the sum.

    The bytes are taken as 64-bit lanes; each is mixed, multiplied by an odd number that belongs to its position, and
    added. All steps are integers that wrap around, so the order of adding does not matter, and a single changed lane
    always shows.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    step, multipliers = _rows_at_once(data.device) * _ROW_LANES * 8, _multipliers(data.device)
    whole = data.numel() // (_ROW_LANES * 8) * _ROW_LANES * 8
    blocks = [data[start : min(start + step, whole)] for start in range(0, whole, step)]
    sums = [_summed(_lanes(block).view(-1, _ROW_LANES), multipliers) for block in blocks]
    if whole < data.numel() or not sums:
        sums.append(_summed(_lanes(data[whole:])[None], multipliers))
    total = torch.cat(sums)
    while len(total) > 1:
        width = min(len(total), _ROW_LANES)
        total = _summed(nn.functional.pad(total, (0, -len(total) % width)).view(-1, width), multipliers)
    return f"{total.item() % (1 << 64):016x}"


def _rows_at_once(device: torch.device) -> int:
    return 1 if device.type == "cpu" else _ROWS_ON_ACCELERATOR


def _lanes(data: Tensor) -> Tensor:
    """Bytes as int64, filled up with zeros; a tensor's length is written beside its sum."""
    if data.numel() % 8:
        data = nn.functional.pad(data, (0, -data.numel() % 8))
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    return data.view(torch.int64)


def _summed(lanes: Tensor, multipliers: Tensor) -> Tensor:
    """One sum per row of `[rows, lanes]`."""
    mixed = lanes * _MIX
    mixed ^= mixed >> 32
    mixed *= multipliers[: lanes.shape[1]]
    return mixed.sum(dim=1)


@functools.lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> Tensor:
    """Odd numbers without pattern, one per lane of a row."""
    numbers = torch.arange(1, _ROW_LANES + 1, device=device) * _MIX
    for shift in (31, 27):
        numbers ^= numbers >> shift
        numbers *= _MIX
    return numbers | 1
