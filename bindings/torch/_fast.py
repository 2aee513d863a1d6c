# SPDX-License-Identifier: Apache-2.0
"""Operations in one call of C, where PyTorch says how C finds a tensor's memory (2.10 and later).

In Python each tensor of a call takes about a microsecond. bindings/torch/call.c is the other side.
"""

from __future__ import annotations

import ctypes
import inspect
import os
import sys
from typing import TYPE_CHECKING

import torch

from .._library import FOLDER
from .._operations import OPERATIONS

if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from .._operations import Operation

LEFT = -1
"""What `call` returns where the slower way must be taken. Nothing has happened then."""

_MAJOR = 1  # of DLPack's exchange interface


class GroupFacts(ctypes.Structure):
    """EpTorchGroup of call.h."""

    _fields_ = [
        ("group", ctypes.c_void_p),
        ("caller", ctypes.c_uint64),
        ("began", ctypes.c_double),
        ("is_in", ctypes.c_int32),
    ]


class HandleFacts(ctypes.Structure):
    """EpTorchHandle of call.c."""

    _fields_ = [
        ("torch", ctypes.c_void_p),
        ("group", ctypes.c_void_p),
        ("handle", ctypes.c_void_p),
        ("plan_bytes", ctypes.c_int64),
        ("max_row_bytes", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("rows_per_block", ctypes.c_int64),
        ("device", ctypes.c_int32),
        ("num_local_experts", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("has_blocks", ctypes.c_int32),
        ("is_per_token", ctypes.c_int32),
        ("by_column", ctypes.c_int32),
    ]


class StepFacts(ctypes.Structure):
    """EpTorchStep of call.h."""

    _fields_ = [
        ("next", ctypes.c_void_p),
        ("object", ctypes.c_void_p),
        ("send", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("bound", ctypes.c_int64),
        ("alignment", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("send_sms", ctypes.c_int64),
        ("sum_sms", ctypes.c_int64),
    ]


class SentFacts(ctypes.Structure):
    """EpTorchSent of call.h."""

    _fields_ = [
        ("step", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("memory", ctypes.c_void_p),
        ("ids_at", ctypes.c_int64),
        ("weights_at", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    ]


class BufferFacts(ctypes.Structure):
    """EpTorchBuffer of call.h."""

    _fields_ = [
        ("steps", ctypes.c_void_p),
        ("bound", ctypes.c_int64),
        ("send_sms", ctypes.c_int64),
        ("sum_sms", ctypes.c_int64),
    ]


class _Functions(ctypes.Structure):
    """EpTorchFunctions of call.c."""

    _fields_ = [
        ("exchange", ctypes.c_void_p),
        ("empty", ctypes.c_void_p),
        ("data_of", ctypes.c_void_p),
        ("drop", ctypes.c_void_p),
        ("wrap", ctypes.c_void_p),
        ("wait_stream", ctypes.c_void_p),
        ("is_capturing", ctypes.c_void_p),
    ]


class _Form(ctypes.Structure):
    """EpTorchForm of call.c."""

    _fields_ = [
        ("number", ctypes.c_int32),
        ("count", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("numbers", ctypes.c_int32),
        ("gradients", ctypes.c_uint32),
        ("weights", ctypes.c_uint32),
    ]


def _make_form(number: int, operation: Operation) -> _Form:
    def mask(*kinds: str) -> int:
        return sum(1 << place for place in operation.of_kind(*kinds))

    count = len(operation.inputs + operation.outputs)
    numbers = (*operation.of_kind("numbers"), -1)[0]
    inputs = len(operation.inputs)
    return _Form(number, count, inputs, numbers, mask("gradient", "bias"), mask("weights"))


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


def _find_functions() -> tuple[_Functions, bool]:
    """What call.c uses of PyTorch, and whether it can allocate."""
    names = (
        "aoti_torch_empty_strided",
        "aoti_torch_get_data_ptr",
        "aoti_torch_delete_tensor_object",
        "_Z16THPVariable_WrapRKN2at10TensorBaseE",
        "cudaStreamSynchronize",  # these are None without CUDA
        "cudaStreamIsCapturing",
    )
    library = ctypes.CDLL(torch._C.__file__)
    addresses: list[Any] = [getattr(library, name, None) for name in names]
    found = [ctypes.cast(address, ctypes.c_void_p).value for address in addresses]
    return _Functions(_find_exchange(), *found), all(found[:-2])


class _Events(ctypes.Structure):
    """EpTorchEvents of call.c."""

    _fields_ = [
        ("create", ctypes.c_void_p),
        ("record", ctypes.c_void_p),
        ("wait", ctypes.c_void_p),
        ("get_device", ctypes.c_void_p),
        ("set_device", ctypes.c_void_p),
    ]


def _find_events() -> _Events:
    """What events.c uses of PyTorch's CUDA. Empty where it has none."""
    names = (
        "cudaEventCreateWithFlags",
        "cudaEventRecord",
        "cudaStreamWaitEvent",
        "cudaGetDevice",
        "cudaSetDevice",
    )
    library = ctypes.CDLL(torch._C.__file__)
    addresses: list[Any] = [getattr(library, name, None) for name in names]
    return _Events(*(ctypes.cast(address, ctypes.c_void_p).value for address in addresses))


_MOST_WORDS = 20


class _Method(ctypes.Structure):
    """EpTorchMethod of call.h."""

    _fields_ = [
        ("function", ctypes.py_object),
        ("count", ctypes.c_int64),
        ("names", ctypes.py_object * _MOST_WORDS),
    ]


class _Methods(ctypes.Structure):
    """EpTorchMethods of call.h."""

    _fields_ = [
        ("head", ctypes.c_int64),
        ("bytes_at", ctypes.c_int64),
        ("kind", ctypes.py_object),
        ("buffer", ctypes.py_object),
        ("num_sms", ctypes.py_object),
        ("settle", ctypes.py_object),
        ("send", _Method),
        ("sum", _Method),
    ]


class Waits(ctypes.Structure):
    """EpTorchWaits of call.h."""

    _fields_ = [("count", ctypes.c_int64), ("ns", ctypes.c_int64)]


_library = ctypes.PyDLL(os.path.join(FOLDER, "lib", "libep_torch.so"))
waits = Waits.in_dll(_library, "ep_torch_waits")
"""How often, and how long, `send` has waited for a GPU's counts."""


_HEAD = object.__basicsize__  # of an object of Python


class _Spec(ctypes.Structure):
    """PyType_Spec of Python."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("size", ctypes.c_int),
        ("item_size", ctypes.c_int),
        ("flags", ctypes.c_uint),
        ("slots", ctypes.c_void_p),
    ]


class _MethodDef(ctypes.Structure):
    """PyMethodDef of Python."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("words", ctypes.c_char_p),
    ]


def _make_base() -> type:
    """A type whose objects have room for the address of a BufferFacts."""
    new_type = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)(
        ("PyType_FromSpec", ctypes.pythonapi)
    )
    slots = (ctypes.c_void_p * 2)()  # none
    name, is_base = b"libep.torch._fast.WithFacts", 1 << 10
    size = _HEAD + ctypes.sizeof(ctypes.c_void_p)
    spec = _Spec(name, size, 0, is_base, ctypes.addressof(slots))
    made: type = new_type(ctypes.addressof(spec))
    return made


if TYPE_CHECKING:

    class WithFacts:
        pass

else:
    WithFacts = _make_base()


def tell(buffer: WithFacts, facts: BufferFacts) -> None:
    """Let C find the facts of a buffer, which keeps them."""
    ctypes.c_void_p.from_address(id(buffer) + _HEAD).value = ctypes.addressof(facts)


_kept: list[Any] = []  # what C has addresses of


def _make_method(owner: type, name: str, symbol: str, method: _Method) -> None:
    """Make a method one of C. It leaves to Python's what it does not know."""
    function = getattr(owner, name)
    signature = inspect.signature(function)
    words = [each for each in signature.parameters.values() if each.kind is each.KEYWORD_ONLY]
    method.function, method.count = function, len(words)
    for at, each in enumerate(words):
        method.names[at] = sys.intern(each.name)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    first = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    first = first.replace("(self", "($self, /", 1)
    words_of_doc = f"{name}{first}\n--\n\n{inspect.getdoc(function)}".encode()
    address = ctypes.cast(getattr(_library, symbol), ctypes.c_void_p).value
    fast_with_keywords = 0x82
    definition = _MethodDef(name.encode(), address, fast_with_keywords, words_of_doc)
    new_method = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)(
        ("PyDescr_NewMethod", ctypes.pythonapi)
    )
    setattr(owner, name, new_method(owner, ctypes.addressof(definition)))
    _kept.extend((definition, words_of_doc))


def make_hybrid_methods(
    owner: type, kind: type, buffer: type, settle: Callable[[Any], None]
) -> None:
    """Make the methods of HybridEPBuffer, `owner`, those of C.

    kind    the type of its handles
    buffer  the type whose num_sms counts where a HybridEPBuffer has none
    settle  raises the Status that a function of C has returned
    """
    methods = _Methods.in_dll(_library, "ep_torch_methods")
    methods.head, methods.bytes_at = _HEAD, bytes.__basicsize__ - 1  # its last byte is a 0
    methods.num_sms = sys.intern("num_sms")
    methods.kind, methods.buffer, methods.settle = kind, buffer, settle
    _make_method(owner, "dispatch_with_permute", "ep_torch_hybrid_send_method", methods.send)
    _make_method(owner, "combine_with_unpermute", "ep_torch_hybrid_sum_method", methods.sum)
    _kept.append(methods)


def _load() -> tuple[Optional[Callable[..., int]], tuple[Any, ...]]:
    _library.ep_torch_functions.restype = ctypes.py_object
    if not _functions.exchange:
        return None, _library.ep_torch_functions()
    function = _library.ep_torch_call
    function.__name__ = "call of libep.torch"  # in sentences
    function.restype = ctypes.c_int32
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object]
    return function, _library.ep_torch_functions()


_functions, _can_allocate = _find_functions()
functions = ctypes.addressof(_functions)
"""The address of what call.c uses of PyTorch."""

_events = _find_events()
events = ctypes.addressof(_events)
"""The address of what events.c uses of CUDA."""

call, _all = _load()
make: Optional[Callable[..., Any]] = _all[0] if call and _can_allocate else None
"""Both run an operation, on the address of a HandleFacts, and one of FORMS. None where PyTorch is
older.

call  takes a tuple of its arguments, and returns a Status or LEFT
make  takes its inputs, rows or tokens of the outputs, and whether expert ids are int32. Returns a
      tuple of new outputs, or a Status that is an error, or None where `call` returns LEFT.
"""

count: Optional[Callable[..., Any]] = _all[1] if make else None
"""ep_count_routing: takes `functions`, a device's number, topk_idx, ranks and experts. Returns what
`make` does. None where PyTorch is older."""

send: Optional[Callable[..., Any]] = _all[2] if make else None
"""Prepares, waits for the counts and dispatches: see call.h. None where PyTorch is older."""

hybrid_dispatch: Callable[..., Any] = _all[3]
hybrid_combine: Callable[..., Any] = _all[4]
"""The calls of HybridEPBuffer: see hybrid.c."""

normal_dispatch: Callable[..., Any] = _all[5]
normal_combine: Callable[..., Any] = _all[6]
"""The calls of Buffer: see normal.c."""

record: Callable[[int, int, int], object] = _all[7]
"""Takes `events`, a device's number and a stream. Returns an event there, or CUDA's error."""

wait: Callable[[int, int, object], Optional[int]] = _all[8]
"""Takes `events`, a stream and the event that it waits for. Returns CUDA's error, or None."""

enter: Callable[[int], bool] = _all[9]
"""Takes the address of a GroupFacts. Whether no thread was in a call on the group: this one is."""

leave: Callable[[int], None] = _all[10]
"""Ends what `enter` began."""
