# SPDX-FileCopyrightText: 2026 The hf_blend authors
# SPDX-License-Identifier: Apache-2.0
"""A second device without one: tensors that say they are on a GPU, compute on the CPU, and meet no others.

What a real device refuses is refused here: two tensors of different devices in one operation, but for copies, indices
of an advanced index, and single numbers. Each time the host asks for a value is counted, and where in the library a
tensor of more than one number is made on the host. Threads that begin meanwhile are on the device, too.
"""

import contextlib
import sys
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import hf_blend
from hf_blend import observer
from hf_blend.model import identity

DEVICE = torch.device("cuda", 0)
_SHELL = torch.device("meta")  # what torch itself sees: the one device that is always there
ASKS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::_unique2", "aten::masked_select")
COPIES = ("aten::copy_", "aten::_to_copy", "aten::_copy_from")
LIBRARY = str(Path(hf_blend.__file__).parent)
INDEXED = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


class There(Tensor):
    """A tensor on the second device; `held` is where its numbers are."""

    is_meta = False
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=_SHELL, requires_grad=False,
        )  # fmt: skip

    def __init__(self, held):
        self.held = held

    @property
    def device(self):
        return DEVICE

    def tolist(self):
        """The numbers, by way of the host."""
        return self.cpu().tolist()

    def __repr__(self):
        return f"There({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {}, Counter())


def run(func, args, kwargs, asked):
    """One operation, on the device of its tensors."""
    name = func._schema.name
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    there = any(isinstance(one, There) for one in tensors)
    if any(one.is_meta for one in tensors if not isinstance(one, There)):
        raise RuntimeError(f"{name}: torch made an index of a list, which has no numbers here. Index by a tensor.")
    to = kwargs.get("device")
    if there:
        operands = tensors[:1] if name in INDEXED else tensors
        strangers = [one for one in operands if not isinstance(one, There) and one.dim()]
        if strangers and name not in COPIES:
            raise RuntimeError(f"{name}: tensors on two devices: {[one.shape for one in strangers]}")
        if name in ASKS:
            asked[name] += 1
    if name == "aten::_fused_sdp_choice":
        return 0
    goes = there if to is None else torch.device(to).type != "cpu"
    inner = {**kwargs, "device": torch.device("cpu")} if to is not None else kwargs
    bare = lambda tree: tree_map(lambda one: one.held if isinstance(one, There) else one, tree)  # noqa: E731
    inner = {key: value for key, value in inner.items() if key != "pin_memory"}
    if there and to is not None and not goes:
        asked["to the host"] += 1
        inner["non_blocking"] = False
        found = func(*bare(args), **bare(inner))
        return found
    found = func(*bare(args), **bare(inner))
    if not goes:
        return found
    known = {id(one.held): one for one in tensors if isinstance(one, There)}  # what was written in place
    return tree_map(
        lambda one: (known[id(one)] if id(one) in known else There(one)) if isinstance(one, Tensor) else one, found
    )


def place():
    """Name the innermost function of the library that is running; a comprehension is in one."""
    frame = sys._getframe(1)
    while frame and (frame.f_code.co_name[0] == "<" or not frame.f_code.co_filename.startswith(LIBRARY)):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


class SecondDevice(TorchDispatchMode):
    """While it is entered, `device="cuda:0"` is one that computes.

    It counts how often the host `asked` which value of it, and which functions made a tensor on the host (`hosted`).
    """

    def __init__(self, asked=None, hosted=None):
        super().__init__()
        self.asked = Counter() if asked is None else asked
        self.hosted = Counter() if hosted is None else hosted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = run(func, args, kwargs or {}, self.asked)
        made = () if any(one.alias_info for one in func._schema.returns) else tree_flatten(found)[0]
        if any(isinstance(one, Tensor) and not isinstance(one, There) and one.dim() for one in made):
            self.hosted[place()] += 1
        return found


@contextlib.contextmanager
def second_device():
    """Yield the mode, to read what was asked."""
    mode = SecondDevice()
    make = torch.tensor
    begin = threading.Thread.run

    def tensor(data, *, device=None, **given):  # the device of no memory has no numbers either, made so
        made = make(data, **given)
        return made.clone() if device is None else made.to(device)  # what stays on the host is seen by the mode

    def in_thread(thread):
        with observer(SecondDevice(mode.asked, mode.hosted)):
            begin(thread)

    with contextlib.ExitStack() as entered:
        entered.enter_context(mock.patch.object(torch, "tensor", tensor))
        entered.enter_context(mock.patch.object(threading.Thread, "run", in_thread))
        for name in ("_lazy_init", "set_device"):
            entered.enter_context(mock.patch.object(torch.cuda, name, return_value=None))
        entered.enter_context(mock.patch.object(identity, "sampled", return_value=[]))  # bits: not there
        yield entered.enter_context(observer(mode))


def move(model):
    """Put a model's parameters and buffers on the second device, in place."""
    with torch.no_grad():
        for module in model.modules():
            for name, one in list(module._parameters.items()):
                if one is not None:
                    module._parameters[name] = torch.nn.Parameter(There(one.detach()), requires_grad=False)
            for name, one in list(module._buffers.items()):
                if one is not None:
                    module._buffers[name] = There(one)
    return model
