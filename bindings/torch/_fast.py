# SPDX-License-Identifier: Apache-2.0
"""Operations in one call of C, where PyTorch says how C finds a tensor's memory (2.10 and later).

In Python each tensor of a call takes about a microsecond. bindings/torch/call.c is the other side.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import torch

from .._library import FOLDER
from .._operations import OPERATIONS

if TYPE_CHECKING:
    from typing import Callable, Optional

    from .._operations import Operation

LEFT = -1
"""What `call` returns where the slower way must be taken. Nothing has happened then."""

_MAJOR = 1  # of DLPack's exchange interface


class HandleFacts(ctypes.Structure):
    """EpTorchHandle of call.c."""

    _fields_ = [
        ("exchange", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("num_local_experts", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    ]


class _Form(ctypes.Structure):
    """EpTorchForm of call.c."""

    _fields_ = [
        ("number", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("numbers", ctypes.c_int32),
        ("gradients", ctypes.c_uint32),
        ("weights", ctypes.c_uint32),
    ]


def _make_form(number: int, operation: Operation) -> _Form:
    def mask(kind: str) -> int:
        return sum(1 << place for place in operation.of_kind(kind))

    count = len(operation.inputs + operation.outputs)
    numbers = (*operation.of_kind("numbers"), -1)[0]
    return _Form(number, count, numbers, mask("gradient"), mask("weights"))


_at_once = [operation for operation in OPERATIONS.values() if not operation.is_phase]
_forms = {each.name: _make_form(number, each) for number, each in enumerate(_at_once)}
FORMS = {name: ctypes.addressof(form) for name, form in _forms.items()}
"""The operations that `call` has, in its order, by their names."""


def _find_exchange() -> Optional[int]:
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    get_pointer = kind(("PyCapsule_GetPointer", ctypes.pythonapi))
    address: int = get_pointer(capsule, b"dlpack_exchange_api")
    return address if ctypes.c_uint32.from_address(address).value == _MAJOR else None


def _load() -> Optional[Callable[[int, int, tuple[object, ...]], int]]:
    path = os.path.join(FOLDER, "lib", "libep_torch.so")
    if exchange is None or not os.path.exists(path):
        return None
    function = ctypes.PyDLL(path).ep_torch_call
    function.__name__ = "call of libep.torch"  # in sentences
    function.restype = ctypes.c_int32
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object]
    return function


exchange = _find_exchange()
call = _load()
"""Takes the address of a HandleFacts, one of FORMS, and a tuple of tensors and None. Returns a
Status, or LEFT. None where PyTorch is older."""
