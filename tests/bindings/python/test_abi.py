# SPDX-License-Identifier: Apache-2.0
"""_abi.py against the headers as the C compiler reads them: names, sizes, offsets, initial values."""

from __future__ import annotations

import ctypes
import enum
import os
import re
import shutil
import subprocess

import pytest
from libep import _abi, _library, _tensor

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../..")
HEADER = re.sub(
    r"/\*.*?\*/",
    "",
    "".join(open(os.path.join(ROOT, "include/ep", n)).read() for n in ("ep.h", "ep_quant.h", "ep_mesh.h")),
    flags=re.S,
)

STRUCTS = re.findall(r"typedef struct \w+ \{(.*?)\n\} (\w+);", HEADER, re.S)
ENUMS = re.findall(r"typedef enum \w+ \{(.*?)\} (\w+);", HEADER, re.S)
CONSTANTS = re.findall(
    r"#define EP_((?:MAX_|DEFAULT|LATENCY_TOKENS|MESH_MAX|SPEC_MAX|AXIS_NAME|WINDOW_PAIRED)\w*) ",
    HEADER,
)

# What the prefix of an enum's names is, where it does not follow from the enum's name.
PREFIXES = {
    "Status": "EP_ERR_",
    "ExpertIds": "EP_IDS_",
    "RowWeights": "EP_WEIGHTS_",
    "ScaleOrder": "EP_SCALES_",
    "AxisRole": "EP_AXIS_",
    "TensorKind": "EP_TENSOR_",
}


def fields_of(body):
    """The names of a struct's fields, in order."""
    names = []
    for declaration in body.split(";"):
        if "(*" in declaration:
            names += re.findall(r"\(\*(\w+)\)", declaration)[:1]
        elif declaration.strip():
            names += [
                re.search(r"(\w+)(\[\w+\])?$", part).group(1)
                for part in declaration.strip().split(",")
            ]
    return names


def compiled(tmp_path, lines):
    """What a C program with these lines in main prints, by line."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    source, program = tmp_path / "abi.c", tmp_path / "abi"
    source.write_text(
        "#include <ep/ep_quant.h>\n#include <ep/ep_mesh.h>\n#include <stdio.h>\n"
        "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run(
        ["cc", "-std=c11", f"-I{ROOT}/include", str(source), "-o", str(program)], check=True
    )
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )[:-1]


def number(expression):
    return f'printf("%lld\\n", (long long)({expression}));'


def test_every_struct_is_there():
    ours = {
        name: [f for f, _ in value._fields_]
        for name, value in vars(_abi).items()
        if name.startswith("Ep") and issubclass(value, ctypes.Structure)
    }
    assert len(STRUCTS) >= 12
    assert ours == {name: fields_of(body) for body, name in STRUCTS}


def test_layout_of_structs(tmp_path):
    lines, ours = [], []
    for _, name in STRUCTS:
        struct = getattr(_abi, name)
        lines.append(number(f"sizeof({name})"))
        ours.append(ctypes.sizeof(struct))
        for field, _ in struct._fields_:
            lines += [
                number(f"offsetof({name}, {field})"),
                number(f"sizeof((({name} *)0)->{field})"),
            ]
            place = getattr(struct, field)
            ours += [place.offset, place.size]
    assert [int(line) for line in compiled(tmp_path, lines)] == ours


def test_tensors_are_filled_as_declared():
    given = _tensor.Tensor(4096, _abi.Type.INT64, (5, 7))
    assert _tensor._PACK.size == given.struct_size == ctypes.sizeof(_abi.EpTensor)
    assert (given.data, given.type, given.ndim, list(given.shape)) == (4096, 8, 2, [5, 7, 1])


def test_initial_values(tmp_path):
    names = re.findall(r"#define EP_([A-Z_]+)_INIT\b", HEADER)
    assert len(names) >= 10
    lines, ours = [], []
    for name in names:
        kind = "Ep" + name.title().replace("_", "")
        lines.append(f"{kind} x_{name};")
        lines.append(f"__builtin_memset(&x_{name}, 0, sizeof(x_{name}));")
        for field, _ in getattr(_abi, kind)._fields_:  # one by one, since padding has any bytes
            lines.append(
                f"{{ {kind} y = EP_{name}_INIT; __builtin_memcpy(&x_{name}.{field}, "
                f"&y.{field}, sizeof(y.{field})); }}"
            )
        lines.append(
            f"for (size_t i = 0; i < sizeof(x_{name}); i++) "
            f'printf("%02x", ((unsigned char *)&x_{name})[i]); printf("\\n");'
        )
        ours.append(bytes(_abi.initialized(getattr(_abi, kind))).hex())
    assert compiled(tmp_path, lines) == ours


def prefix_of(kind):
    return PREFIXES.get(kind, "EP_" + re.sub(r"(?<!^)([A-Z])", r"_\1", kind).upper() + "_")


def test_enums(tmp_path):
    statuses = re.findall(r"X\((EP_\w+), \d+", HEADER)
    assert len(ENUMS) >= 12
    for body, name in ENUMS:
        kind = name[2:]
        members = statuses if kind == "Status" else re.findall(r"(EP_\w+) =", body)
        ours = getattr(_abi, kind)
        expected = [m[3:] if m == "EP_OK" else m.replace(prefix_of(kind), "") for m in members]
        assert [member.name for member in ours] == expected
        values = compiled(tmp_path, [number(member) for member in members])
        assert [int(value) for value in values] == [member.value for member in ours]


def test_every_enum_is_there():
    ours = {
        name
        for name, value in vars(_abi).items()
        if isinstance(value, type)
        and issubclass(value, enum.IntEnum)
        and value.__module__ == _abi.__name__
    }
    assert ours == {name[2:] for _, name in ENUMS}


def test_constants(tmp_path):
    assert len(CONSTANTS) >= 10
    values = compiled(tmp_path, [number("EP_" + name) for name in CONSTANTS])
    assert {n: getattr(_abi, n) for n in CONSTANTS} == dict(zip(CONSTANTS, map(int, values)))
    assert compiled(tmp_path, [number("EP_ROWS_DUPLICATES")]) == [str(_abi.Rows.DUPLICATES.value)]


def test_functions():
    with open(os.path.join(ROOT, "libep.map")) as map_file:
        exported = re.findall(r"\b(ep_\w+);", map_file.read())
    headers = HEADER
    with open(os.path.join(ROOT, "include/ep/ep_weight.h")) as header:
        headers += header.read()
    assert sorted(_abi.FUNCTIONS) == sorted(exported)
    for name, (returned, arguments) in _abi.FUNCTIONS.items():
        declared = re.search(rf"(\w+ \*?){name}\(([^;]*)\);", headers)
        if name == "ep_bootstrap_nccl":  # in ep_nccl.h
            continue
        expected = 0 if declared.group(2) == "void" else count_arguments(declared.group(2))
        assert len(arguments) == expected, name
        assert (returned is None) == declared.group(1).startswith("void"), name


def count_arguments(text):
    return re.sub(r"\([^()]*\)", "", text).count(",") + 1


def test_version_of_package_and_library():
    import libep

    assert libep.__version__ == libep.version()
    assert _library.library.ep_version() == int(
        "".join(part.zfill(2) for part in libep.version().split("."))
    )
