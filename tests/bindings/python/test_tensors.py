# SPDX-License-Identifier: Apache-2.0
"""Objects that become tensors, and what the package tells about itself."""

import gc
import os
import re
import weakref

from base import refused
import libep
import numpy as np
import pytest
from processes import finish, spawn
from libep import Tensor, Type

HERE = os.path.dirname(libep.__file__)


def parts(tensor):
    return tensor.data, Type(tensor.type), tuple(tensor.shape[: tensor.ndim])


TYPES = dict(float32="FP32", float16="FP16", int32="INT32", int64="INT64", uint8="UINT8")


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (0, 4), (1, 1, 1)])
def test_arrays(kind, shape):
    array = np.zeros(shape, kind)
    assert parts(libep.tensor(array)) == (array.ctypes.data, Type[TYPES[kind]], shape)


def test_contiguous_parts_of_arrays():
    array = np.zeros((6, 4), np.float32)
    assert parts(libep.tensor(array[2:4])) == (array.ctypes.data + 32, Type.FP32, (2, 4))
    assert parts(libep.tensor(array[:, :0]))[2] == (6, 0)
    assert parts(libep.tensor(array[:1, :2]))[2] == (1, 2)  # one row has no stride of rows


def test_another_element_type():
    array = np.zeros((3, 4), np.uint16)
    assert parts(libep.tensor(array, Type.BF16)) == (array.ctypes.data, Type.BF16, (3, 4))
    again = libep.tensor(libep.tensor(array, Type.BF16), Type.FP16)
    assert parts(again) == (array.ctypes.data, Type.FP16, (3, 4))
    with refused("TypeError as large as FP32, got <u2"):
        libep.tensor(array, Type.FP32)
    with refused("TypeError got uint16"):
        libep.tensor(array)


class Named:
    """An array whose type only its name tells, as those of ml_dtypes."""

    class dtype:
        name = "bfloat16"

    def __init__(self):
        self.memory = np.zeros((2, 8), np.uint16)
        self.__array_interface__ = dict(self.memory.__array_interface__, typestr="<V2")


class OnDevice:
    __cuda_array_interface__ = dict(
        data=(4096, True), shape=(2, 4), typestr="<f4", strides=None, version=3
    )


def test_other_interfaces():
    assert parts(libep.tensor(Named()))[1] is Type.BF16
    tensor = libep.tensor(OnDevice())
    assert parts(tensor) == (4096, Type.FP32, (2, 4)) and not tensor.writable


def test_tensor_keeps_its_array():
    array = np.zeros(3, np.int32)
    tensor, gone = libep.tensor(array), weakref.ref(array)
    plan = libep.PlanTensors(totals=tensor)
    del array, tensor
    gc.collect()
    assert gone() is not None
    del plan
    gc.collect()
    assert gone() is None


class Matrix:
    def __init__(self, array):
        self.array = array


class SquareMatrix(Matrix):
    pass


def test_converters():
    array = np.zeros((2, 2), np.float32)
    with refused("TypeError expected a tensor, got .*Matrix"):
        libep.tensor(Matrix(array))
    libep.register_converter(Matrix, lambda m: libep.tensor(m.array))
    for kind in Matrix, SquareMatrix:
        assert parts(libep.tensor(kind(array)))[0] == array.ctypes.data
    with refused("TypeError C-contiguous"):
        libep.tensor(Matrix(np.zeros((2, 3), np.float32).T))


def test_tensor_has_no_bad_shape():
    for shape in (), (1, 1, 1, 1):
        with refused(f"TypeError 1 to 3 dimensions, got {len(shape)}"):
            Tensor(0, Type.FP32, shape)
    assert repr(Tensor(255, Type.INT64, (2, 3))) == "Tensor(0xff, INT64, (2, 3))"


# ---- facts ---------------------------------------------------------------------------------------


def test_functions_without_a_group():
    assert libep.expert_range(7, 3, 0) == (0, 3)
    assert libep.expert_range(7, 3, 2).first == 5
    fields = dict(num_experts=8, max_tokens=4, max_top_k=2, max_row_bytes=64, alignment=4)
    # min(L * ceil(G / A) * A, ceil((M + (A - 1) * n) / A) * A), with G = 8, L = 4, M = 16, n = 4
    assert libep.max_recv_rows(2, 0, **fields) == 28
    assert libep.max_recv_rows(2, 0, libep.Layout.FLAT, **fields) == 8
    memory = libep.Group.memory(2, **fields)
    assert memory.feasible and memory.shared_bytes > 0 and memory.reason


def test_info():
    facts = libep.info()
    assert facts["version"] == libep.__version__
    assert facts["backend"] in (libep.Backend.HOST, libep.Backend.CUDA) and facts["reason"]
    assert facts["settings"]["LIBEP_TIMEOUT"].default == "100"
    assert os.path.exists(facts["library"])
    assert os.path.exists(os.path.join(facts["nccl_ep_home"], "lib/libnccl_ep.so.0"))


def python(*arguments, **settings):
    """Run Python with settings in its environment."""
    return finish(spawn(*arguments, **settings))


@pytest.mark.parametrize("arguments, settings, expected", [
    ([], {}, (0, f"libep {libep.__version__}\n.*LIBEP_TIMEOUT.*", "")),
    (["--help"], {}, (0, "usage: python -m libep .*", "")),
    (["--nonsense"], {}, (2, "", ".*unrecognized arguments: --nonsense\n")),
    ([], {"LIBEP_TIMEOUT": "x"}, (1, "", "libep: setting LIBEP_TIMEOUT: expected a positive.*")),
])  # fmt: skip
def test_command(arguments, settings, expected):
    status, *texts = python("-m", "libep", *arguments, **settings)
    assert status == expected[0]
    for text, pattern in zip(texts, expected[1:]):
        assert re.fullmatch(pattern, text, re.S), text


def test_unknown_setting():
    source = (
        "import libep\ntry: libep.settings()\nexcept libep.EpError as e: print(e.status.name, e)"
    )
    status, out, _ = python("-c", source, LIBEP_NONSENSE="1")
    assert status == 0 and out.startswith("SETTING") and "LIBEP_NONSENSE" in out


# What takes time to import, beside the frameworks. (libep itself takes about 13 ms.)
SLOW = {*"numpy torch jax asyncio dataclasses importlib.metadata inspect".split()}
SLOW |= {*"logging matplotlib multiprocessing subprocess socket".split()}


def test_import_brings_little():
    source = "import sys; old = set(sys.modules); import libep; print(*set(sys.modules) - old)"
    status, out, err = python("-S", "-c", source, PYTHONPATH=os.path.dirname(HERE))
    assert status == 0 and not SLOW & set(out.split()), err


def test_library_of_another_version(tmp_path):
    os.mkdir(tmp_path / "libep")
    for name in os.listdir(HERE):
        if name not in ("_version.py", "__pycache__"):
            os.symlink(os.path.join(HERE, name), tmp_path / "libep" / name)
    (tmp_path / "libep" / "_version.py").write_text('__version__ = "9.8.7"\n')
    status, _, err = python("-c", "import libep", PYTHONPATH=str(tmp_path))
    assert status == 1
    assert "ImportError: libep: expected the shared library of version 9.8.7" in err
    os.unlink(tmp_path / "libep" / "lib")
    status, _, err = python("-c", "import libep", PYTHONPATH=str(tmp_path))
    assert status == 1 and "ImportError: libep: its shared library cannot be loaded" in err

    # One for another processor; then a broken one, on a C library that does not know its version.
    os.mkdir(tmp_path / "libep" / "lib")
    with open(os.path.join(HERE, "lib", "libep.so.0"), "rb") as file:
        head = bytearray(file.read(64))
    machine = {62: ("x86_64", 183, "aarch64"), 183: ("aarch64", 62, "x86_64")}
    here, number, other = machine[head[18]]
    without = "import os\ndef confstr(name): raise OSError\nos.confstr = confstr\nimport libep"
    for head[18], source, words in (  # e_machine
        (number, "import libep", f"expected a wheel for {here}, got one for {other}: /"),
        (head[18], without, "expected an interpreter on glibc, got one on another C library"),
    ):
        (tmp_path / "libep" / "lib" / "libep.so.0").write_bytes(head)
        status, _, err = python("-c", source, PYTHONPATH=str(tmp_path))
        assert status == 1 and f"cannot be loaded: {words}" in err, err
