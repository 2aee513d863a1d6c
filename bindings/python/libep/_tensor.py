# SPDX-License-Identifier: Apache-2.0
"""Tensors: a pointer, a type and a shape, and how objects of other packages become one."""

from __future__ import annotations

from struct import Struct

from ._abi import MAX_DIMS, EpTensor, Type

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Sequence, Union

    TensorLike = Union["Tensor", Any]

_PACK = Struct("@NPiiqqq")  # EpTensor; filling it in one go takes a third of the time
_ONES = [(1,) * (MAX_DIMS - ndim) for ndim in range(MAX_DIMS + 1)]
ELEMENT_BYTES = {
    Type.BF16: 2,
    Type.FP16: 2,
    Type.FP32: 4,
    Type.FP8_E4M3: 1,
    Type.FP8_E5M2: 1,
    Type.UINT8: 1,
    Type.INT32: 4,
    Type.INT64: 8,
}

_BY_TYPESTR = {
    "<f4": Type.FP32,
    "<f2": Type.FP16,
    "<i4": Type.INT32,
    "<i8": Type.INT64,
    "|u1": Type.UINT8,
}
# NumPy knows these types by the package ml_dtypes; their typestr does not tell them apart.
_BY_NAME = {
    "bfloat16": Type.BF16,
    "float8_e4m3fn": Type.FP8_E4M3,
    "float8_e5m2": Type.FP8_E5M2,
    "float8_e8m0fnu": Type.UINT8,
}


class Tensor(EpTensor):
    """A tensor of the caller: row-major, contiguous, of 1 to 3 dimensions.

    pointer   address of the first element; plain memory on the host backend, memory that the GPU
              reaches on the CUDA backend
    type      a Type
    shape     elements per dimension
    owner     an object that keeps the memory alive as long as this Tensor lives, or None. A Tensor
              without an owner does not keep its memory alive: the caller does.
    writable  False: calls that would write the tensor refuse it

    A Tensor may be made once and used in many calls; this is quicker than passing the framework's
    own object each time.
    """

    owner: Any
    writable: bool

    def __init__(
        self,
        pointer: int,
        type: Type,
        shape: Sequence[int],
        owner: Any = None,
        writable: bool = True,
    ) -> None:
        ndim = len(shape)
        if not 1 <= ndim <= MAX_DIMS:
            raise TypeError(f"expected a tensor of 1 to {MAX_DIMS} dimensions, got {ndim}")
        _PACK.pack_into(self, 0, _PACK.size, pointer, type, ndim, *shape, *_ONES[ndim])
        self.owner = owner
        self.writable = writable

    def __repr__(self) -> str:
        shape = tuple(self.shape[: self.ndim])
        return f"Tensor(0x{self.data or 0:x}, {Type(self.type).name}, {shape})"


_converters: dict[type, Callable[[Any], Tensor]] = {}


def register_converter(type: type, function: Callable[[Any], Tensor]) -> None:
    """Let calls take objects of `type` and of its subclasses.

    function(object) returns a Tensor over the object's memory, or raises TypeError with a sentence
    that says what it expected and got. It sets the Tensor's owner if the object must live longer
    than the call. A second registration of the same type takes the place of the first.
    """
    _converters[type] = function


def tensor(value: TensorLike, type: Optional[Type] = None) -> Tensor:
    """Make a Tensor over the memory of an array, which the Tensor keeps alive.

    value  a Tensor, an object of a registered type, or one with __array_interface__ or
           __cuda_array_interface__; C-contiguous
    type   element type, if it is not the array's own: of the same size, such as Type.BF16 for an
           array of 2-byte integers

    TypeError if the object is no tensor, not contiguous, or of a type that libep does not have.
    """
    if type is None:
        return _convert(value)
    made = _from_interface(value, type)
    if made is not None:
        return made
    made = _convert(value)
    if ELEMENT_BYTES[Type(made.type)] != ELEMENT_BYTES[type]:
        raise TypeError(f"expected elements as large as {type.name}, got {Type(made.type).name}")
    return Tensor(made.data or 0, type, made.shape[: made.ndim], made, made.writable)


def _find_converter(kind: type) -> Optional[Callable[[Any], Tensor]]:
    for base in kind.__mro__:
        if base in _converters:
            return _converters[base]
    return None


def _convert(value: TensorLike) -> Tensor:
    if isinstance(value, Tensor):
        return value
    kind = type(value)
    function = _converters.get(kind) or _find_converter(kind)
    made = function(value) if function else _from_interface(value, None)
    if made is None:
        raise TypeError(f"expected a tensor, got {kind.__module__}.{kind.__qualname__}")
    return made


def _from_interface(value: Any, given: Optional[Type]) -> Optional[Tensor]:
    """A Tensor from the array interface, by which NumPy, CuPy and others describe their arrays."""
    interface = getattr(value, "__array_interface__", None)
    if interface is None:
        interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return None
    typestr, shape = interface["typestr"], interface["shape"]
    found = _BY_TYPESTR.get(typestr) if given is None else _same_size(typestr, given)
    if found is None:
        found = _by_dtype(value, typestr)
    item = int(typestr[2:])
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(shape, strides, item):
        raise TypeError(f"expected a C-contiguous tensor, got strides {strides} for shape {shape}")
    pointer, is_readonly = interface["data"]
    return Tensor(pointer, found, shape, value, not is_readonly)


def _same_size(typestr: str, given: Type) -> Type:
    if int(typestr[2:]) != ELEMENT_BYTES[given]:
        raise TypeError(f"expected elements as large as {given.name}, got {typestr}")
    return given


def _by_dtype(value: Any, typestr: str) -> Type:
    dtype = getattr(value, "dtype", typestr)
    name = getattr(dtype, "name", typestr)
    if name not in _BY_NAME:
        names = ", ".join(t.name for t in Type)
        raise TypeError(f"expected elements of one of the types {names}, got {dtype}")
    return _BY_NAME[name]


def _is_contiguous(shape: Sequence[int], strides: Sequence[int], item: int) -> bool:
    expected = item
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length > 1 and stride != expected:
            return 0 in shape
        expected *= length
    return True


def read(value: Optional[TensorLike], name: str) -> Optional[Tensor]:
    """The argument `name`, which the call reads. None stays None."""
    if value is None or isinstance(value, Tensor):
        return value
    try:
        return _convert(value)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None


def written(value: Optional[TensorLike], name: str) -> Optional[Tensor]:
    """The argument `name`, which the call writes. None stays None."""
    made = read(value, name)
    if made is not None and not made.writable:
        raise TypeError(f"{name}: expected memory that may be written, got a read-only array")
    return made
