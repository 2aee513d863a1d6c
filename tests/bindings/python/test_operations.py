# SPDX-License-Identifier: Apache-2.0
"""The table of operations against the headers and the methods that are made from it."""

import inspect

import libep
import pytest
from libep import _abi
from libep._operations import OPERATIONS

FUNCTIONS = sorted({operation.function for operation in OPERATIONS.values()})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_methods_take_what_they_say(name):
    def parameters(follow):
        signature = inspect.signature(getattr(libep.Handle, name), follow_wrapped=follow)
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
