# SPDX-License-Identifier: Apache-2.0
"""_abi.py, which make-abi makes, against the headers as the C compiler reads them."""

import ctypes
import enum
import inspect
import os
import re
import shutil
import subprocess

import pytest
from libep import Handle, _abi, _library, _tensor
from libep._operations import OPERATIONS

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../..")
NAMES = ("ep.h", "ep_nccl.h", "ep_mesh.h", "ep_quant.h", "ep_weight.h")
HEADERS = "".join(open(os.path.join(ROOT, "include/ep", name)).read() for name in NAMES)
CONSTANTS = re.findall(r"#define EP_(\w+) +\(?-?\d+\)?(?!\w)", HEADERS)
STRUCTS = {n: c for n, c in vars(_abi).items() if n.startswith("Ep")}
ENUMS = {
    name: kind
    for name, kind in vars(_abi).items()
    if isinstance(kind, type) and issubclass(kind, enum.IntEnum) and kind is not enum.IntEnum
}


def compile_main(tmp_path, lines, *options):
    """Compile a C program with these lines in main."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    (tmp_path / "nccl.h").write_text("typedef struct ncclComm *ncclComm_t;\n")
    includes = [f"#include <{name}>" for name in ("stdio.h", "string.h", *NAMES)]
    text = "\n".join([*includes, "int main(void) {", *lines, "}\n"])
    command = ["cc", "-std=c11", f"-I{ROOT}/include/ep", f"-I{ROOT}/include", f"-I{tmp_path}"]
    subprocess.run([*command, "-xc", "-", *options], input=text, text=True, check=True)


def printed(tmp_path, lines):
    """What such a program prints, by line."""
    compile_main(tmp_path, lines, "-o", str(tmp_path / "abi"))
    return subprocess.check_output([str(tmp_path / "abi")], text=True).splitlines()


def numbers(tmp_path, expressions):
    lines = [f'printf("%lld\\n", (long long)({expression}));' for expression in expressions]
    return [int(line) for line in printed(tmp_path, lines)]


def test_everything_is_there():
    assert sorted(STRUCTS) == sorted(re.findall(r"typedef struct (\w+) \{", HEADERS))
    assert sorted(ENUMS) == sorted(re.findall(r"typedef enum Ep(\w+) \{", HEADERS))
    assert len(CONSTANTS) >= 15
    initial = re.findall(r"#define EP_(\w+)_INIT\b", HEADERS)
    assert {"Ep" + name.title().replace("_", "") for name in initial} == {
        kind.__name__ for kind in _abi.INITIAL_VALUES
    }
    with open(os.path.join(ROOT, "libep.map")) as map_file:
        assert sorted(_abi.FUNCTIONS) == sorted(re.findall(r"\b(ep_\w+);", map_file.read()))


def test_layout_of_structs(tmp_path):
    expressions, ours = [], []
    for name, struct in STRUCTS.items():
        expressions.append(f"sizeof({name})")
        ours.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            place = getattr(struct, field)
            expressions += [f"offsetof({name}, {field})", f"sizeof((({name} *)0)->{field})"]
            ours += [place.offset, place.size]
    assert numbers(tmp_path, expressions) == ours


def test_initial_values(tmp_path):
    lines, ours = [], []
    for struct in _abi.INITIAL_VALUES:
        name = struct.__name__
        initial = "EP" + re.sub("([A-Z])", r"_\1", name[2:]).upper() + "_INIT"
        lines += [f"{{ {name} x, y = {initial}; memset(&x, 0, sizeof(x));"]
        # One by one, since padding has any bytes.
        lines += [f"memcpy(&x.{f}, &y.{f}, sizeof(y.{f}));" for f, _ in struct._fields_]
        lines += ['for (size_t i = 0; i < sizeof(x); i++) printf("%02x", ((uint8_t *)&x)[i]);']
        lines += ['printf("\\n"); }']
        ours.append(bytes(_abi.initialized(struct)).hex())
    assert printed(tmp_path, lines) == ours


def test_numbers(tmp_path):
    names, ours = [], []
    for kind, body in re.findall(r"typedef enum Ep(\w+) \{(.*?)\n?\} Ep", HEADERS, re.S):
        listed = r"X\((EP_\w+)," if kind == "Status" else r"(EP_\w+)\s*="
        names += re.findall(listed, HEADERS if kind == "Status" else body)
        ours += ENUMS[kind]
    assert [re.sub("EP_([A-Z]+_)?", "", name) for name in names] == [each.name for each in ours]
    names += [f"EP_{name}" for name in CONSTANTS] + ["EP_ROWS_DUPLICATES"]
    ours += [getattr(_abi, name) for name in CONSTANTS] + [_abi.Rows.DUPLICATES]
    assert numbers(tmp_path, names) == ours


def test_functions(tmp_path):
    """They have as many arguments, and return something or nothing, as in the headers."""
    lines = []
    for name, (returned, arguments) in _abi.FUNCTIONS.items():
        call = f"{name}({', '.join('0' for _ in arguments)})"
        lines.append(f"if ({call}) return 1;" if returned else f"{call};")
    compile_main(tmp_path, lines, "-fsyntax-only")


def test_tensors_are_filled_as_declared():
    given = _tensor.Tensor(4096, _abi.Type.INT64, (5, 7))
    assert _tensor._PACK.size == given.struct_size == ctypes.sizeof(_abi.EpTensor)
    assert (given.data, given.type, given.ndim, list(given.shape)) == (4096, 8, 2, [5, 7, 1])


def test_version_of_package_and_library():
    import libep

    assert libep.__version__ == libep.version()
    assert _library.library.ep_version() == int(
        "".join(part.zfill(2) for part in libep.version().split("."))
    )


# ---- the table of operations, and the methods that are made from it ------------------------------

METHODS = sorted({operation.function for operation in OPERATIONS.values()})


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_what_they_say(name):
    def parameters(follow):
        signature = inspect.signature(getattr(Handle, name), follow_wrapped=follow)
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    assert parameters(True) == parameters(False)
    function = _abi.FUNCTIONS.get(f"ep_{name}_with") or _abi.FUNCTIONS[f"ep_{name}"]
    assert len(parameters(True)) == len(function[1])


def test_backward():
    """A derivative takes the gradient of the rows that come, and returns that of the rows sent."""
    for operation in OPERATIONS.values():
        if operation.backward:
            backward = OPERATIONS[operation.backward]
            assert [each.name for each in backward.outputs][0] == f"grad_{operation.inputs[1].name}"
            assert [each.name for each in backward.inputs][1] == f"grad_{operation.outputs[0].name}"
