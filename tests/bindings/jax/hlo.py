# SPDX-License-Identifier: Apache-2.0
"""What a compiled program of XLA communicates, read from its text."""

import re
from typing import NamedTuple

_OPERATIONS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
_LINE = re.compile(rf"= (.*?) ({_OPERATIONS})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    operation: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # type and shape of the results


def collectives(text: str) -> list[Collective]:
    """All collectives of a program."""
    found = []
    for line in text.splitlines():
        if match := _LINE.search(line):
            arrays = tuple(
                (kind, tuple(int(n) for n in shape.split(",") if n))
                for kind, shape in _ARRAY.findall(match[1])
            )
            if match[3]:  # an operation that only starts also returns its operands, first
                arrays = arrays[len(arrays) // 2 :]
            found.append(Collective(match[2], arrays))
    return found


def calls(text: str) -> list[str]:
    """The calls of libep in a program, sorted, without those that make an order of a token."""
    return sorted(re.findall(r'custom_call_target="ep_jax_(?!order)(\w+)"', text))
