# SPDX-License-Identifier: Apache-2.0
"""The shared library of the package, and its errors as exceptions."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from . import _abi
from ._abi import Status
from ._version import __version__

if TYPE_CHECKING:
    from typing import NoReturn

    from typing_extensions import Self

FOLDER = os.path.dirname(os.path.abspath(__file__))
PATH = os.path.join(FOLDER, "lib", "libep.so.0")


class EpError(RuntimeError):
    """A call of libep failed. str(error) is the library's sentence: rank, call, expected and got.

    `status` is the Status that the call returned.
    """

    status: Status

    def __init__(self, status: int, sentence: str) -> None:
        self.status = Status(status)
        # The sentence alone, which frameworks add their own words to.
        super().__init__(sentence or self.status.name)

    def __reduce__(self) -> tuple[type[EpError], tuple[int, str]]:
        return type(self), (int(self.status), str(self))


def public_name(value: object) -> str:
    """The class of an object as programs name it, such as libep.torch.Group."""
    kind = type(value)
    packages = (name for name in kind.__module__.split(".") if not name.startswith("_"))
    return ".".join([*packages, kind.__qualname__])


class OfProcess:
    """What belongs to its process. A copy is the object itself, so copies of a model share it."""

    _anew = "make it anew there"
    """What a program does in place of pickling it."""

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {public_name(self)} belongs to its process: {self._anew}")


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):
        return False


def _machine_of(path: str) -> str:
    """The processor that a library is for, as os.uname() names it, or "" for another one."""
    with open(path, "rb") as file:
        head = file.read(20)
    numbers = {62: "x86_64", 183: "aarch64"}  # EM_X86_64, EM_AARCH64
    return numbers.get(int.from_bytes(head[18:20], "little"), "") if head[:4] == b"\x7fELF" else ""


def _why_not(error: OSError) -> str:
    """Why the library cannot be loaded. The loader names a file that it misses, not the reason."""
    if not os.path.exists(PATH):
        return str(error)
    here, machine = os.uname().machine, _machine_of(PATH)
    if machine and machine != here:
        return f"expected a wheel for {here}, got one for {machine}: {PATH}"
    if not _has_glibc():
        return f"expected an interpreter on glibc, got one on another C library, as musl: {error}"
    return str(error)


def _load() -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(PATH)
    except OSError as error:
        sentence = f"libep: its shared library cannot be loaded: {_why_not(error)}"
        raise ImportError(sentence) from None
    _abi.declare(loaded)
    return loaded


def version() -> str:
    """The version of the shared library, such as "0.2.0"."""
    number = library.ep_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _check_version() -> None:
    if version() != __version__:
        raise ImportError(
            f"libep: expected the shared library of version {__version__}, as the package, "
            f"got {version()} in {PATH}: install the package again"
        )


def last_error(status: int) -> EpError:
    """The exception for a call of this thread that has just returned `status`."""
    return EpError(status, library.ep_last_error().decode("utf-8", "replace"))


def check(status: int) -> None:
    """Raise EpError unless `status` is OK."""
    if status:
        raise last_error(status)


library = _load()
_check_version()
