# SPDX-License-Identifier: Apache-2.0
"""What a compiled program of XLA communicates, read from its text."""

import math
import re
from typing import NamedTuple

import numpy as np

_OPERATIONS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
_LINE = re.compile(rf"= (.*?) ({_OPERATIONS})(-start)?\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


class Collective(NamedTuple):
    operation: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  # type and shape of the results
    groups: frozenset[frozenset[int]]


def _groups(text: str) -> frozenset[frozenset[int]]:
    """replica_groups in the three ways of writing them."""
    if found := re.search(r"(?:replica_groups|source_target_pairs)={(\{[\d,{}]*\})}", text):
        lists = [part.split(",") for part in re.findall(r"{([\d,]+)}", found[1])]
        return frozenset(frozenset(map(int, part)) for part in lists)
    if found := re.search(r"replica_groups=(\[[\d,]+\])<=(\[\S+)", text):
        return _rows(_numbers(found[2]).reshape(_integers(found[1])))
    found = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? {(.*?)}", text)
    assert found, f"unknown replica_groups: {text}"
    axes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
    names = re.findall(r"'(\w+)'", found[3])
    numbers = _numbers(found[2]) if found[2] else np.arange(math.prod(axes.values()))
    places = [list(axes).index(name) for name in names]
    numbers = np.moveaxis(numbers.reshape(list(axes.values())), places, range(-len(names), 0))
    return _rows(numbers.reshape(-1, math.prod(axes[name] for name in names)))


def _integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _numbers(text: str) -> np.ndarray:
    """Devices as XLA writes them: [2,4]T(1,0) is the transpose of 0 ... 7 in two rows."""
    sizes, _, order = text.partition("T")
    numbers = np.arange(math.prod(_integers(sizes))).reshape(_integers(sizes))
    return numbers.transpose(_integers(order)) if order else numbers


def _rows(numbers: np.ndarray) -> frozenset[frozenset[int]]:
    return frozenset(frozenset(row) for row in numbers.tolist())


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
            found.append(Collective(match[2], arrays, _groups(match[4])))
    return found


def calls(text: str) -> list[str]:
    """The calls of libep in a program, sorted, without those that make an order of a token."""
    return sorted(re.findall(r'custom_call_target="ep_jax_(?!order)(\w+)"', text))
