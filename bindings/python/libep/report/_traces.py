# SPDX-License-Identifier: Apache-2.0
"""Routing traces (ep-routing 1), read and counted. docs/benchmarking.md describes the format."""

from __future__ import annotations

import re
from array import array
from typing import Iterator, NamedTuple

import numpy as np

from .._config import expert_range
from ._input import ReportError

MAGIC = b"ep-routing"
_INT32_MAX = 2**31 - 1
_MAX_EXPERTS, _MAX_TOP_K, _MAX_RANKS, _MAX_TOKENS = 1 << 24, 32, 1024, 1 << 24  # as in ep.h
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_ROW = re.compile(rb"[-0-9 \t\r]*")


class Trace(NamedTuple):
    """The routing of one step, as counts. All ranks, each with its own tokens."""

    path: str
    label: str
    num_experts: int
    top_k: int
    tokens: np.ndarray  # [rank]
    masked: int  # entries without an expert
    expert_slots: np.ndarray  # [expert] live entries
    owner: np.ndarray  # [expert] the rank that owns it
    slots: np.ndarray  # [source rank, owner's rank] live entries
    rows: np.ndarray  # [source rank, owner's rank] (token, rank) pairs: rows that dispatch moves
    fan_out: np.ndarray  # [n] tokens whose experts are on n ranks

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def rank_slots(self) -> np.ndarray:
        """[rank] slots that the experts of a rank receive."""
        counts: np.ndarray = self.slots.sum(axis=0)
        return counts

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_experts, self.top_k, self.num_ranks


def imbalance(load: np.ndarray) -> float:
    """max / mean: 1 is perfect balance. 1 for no load at all."""
    return float(load.max() / load.mean()) if load.sum() else 1.0


class _Lines:
    """Lines with their numbers, and the sentences about them."""

    def __init__(self, path: str, content: bytes) -> None:
        self._path, self._number = path, 0
        self._lines = content.split(b"\n")
        self._whole = len(self._lines) - 1  # a line without its newline is not one

    def refuse(self, expected: str, got: str) -> ReportError:
        return ReportError(f"{self._path}:{self._number}: expected {expected}, got {got}")

    def next(self, expected: str) -> bytes:
        self._number += 1
        if self._number > self._whole:
            cut = bool(self._lines[-1]) and self._number == self._whole + 1
            raise self.refuse(expected, "the end of the file" +
                              (" in the middle of a line" if cut else ""))
        return self._lines[self._number - 1]

    def end(self) -> None:
        self._number = self._whole + 1
        if self._lines[-1]:
            raise self.refuse("the end of the file", "more text")

    @property
    def left(self) -> int:
        return self._whole - self._number

    def words(self, *form: str) -> list[int]:
        """The numbers of a line. `form` has its words; one in capitals stands for a number."""
        expected = '"' + " ".join(form) + '"'
        line = self.next(expected)
        words = line.split()
        numbers = []
        for i, wanted in enumerate(form):
            word = words[i] if i < len(words) else b""
            fits = _NUMBER.fullmatch(word) if wanted.isupper() else word == wanted.encode()
            if not fits or len(words) > len(form):
                raise self.refuse(expected, f'"{shown(line)}"')
            if wanted.isupper():
                numbers.append(int(word))
        return numbers


def shown(line: bytes) -> str:
    """A line for a sentence, printable whatever it has."""
    text = "".join(chr(c) if 32 <= c < 127 else "?" for c in line[:61])
    return text if len(text) <= 60 else text[:57] + "..."


def _read_header(lines: _Lines) -> tuple[int, int, int]:
    version, = lines.words("ep-routing", "VERSION")
    if version != 1:
        raise lines.refuse("version 1 of the format", f"version {version}, which this libep does "
                           f"not know")
    num_experts, top_k, num_ranks = lines.words("experts", "E", "top_k", "K", "ranks", "R")
    for name, value, most in (("experts", num_experts, _MAX_EXPERTS), ("top_k", top_k, _MAX_TOP_K),
                              ("ranks", num_ranks, _MAX_RANKS)):
        if not 1 <= value <= most:
            raise lines.refuse(f"{name} from 1 to {most}", str(value))
    return num_experts, top_k, num_ranks


def _read_row(lines: _Lines, num_experts: int, top_k: int, out: array[int]) -> None:
    line = lines.next("a token's indices")
    words = line.split()
    if not _ROW.fullmatch(line) or len(words) != top_k:
        raise lines.refuse(f"{top_k} expert indices", f'"{shown(line)}"')
    for word in words:
        if not _NUMBER.fullmatch(word) or not -_INT32_MAX - 1 <= int(word) < num_experts:
            raise lines.refuse(f"an expert index less than {num_experts}", f'"{shown(word)}"')
        out.append(int(word))


def _read_ranks(lines: _Lines, num_experts: int, top_k: int, num_ranks: int
                ) -> Iterator[np.ndarray]:
    """[tokens, K] for each rank."""
    for _ in range(num_ranks):
        tokens, = lines.words("tokens", "T")
        if not 0 <= tokens <= _MAX_TOKENS:
            raise lines.refuse(f"tokens from 0 to {_MAX_TOKENS}", str(tokens))
        row: array[int] = array("i")
        for _ in range(tokens):
            _read_row(lines, num_experts, top_k, row)
        yield np.array(row, dtype=np.int32).reshape(tokens, top_k)
    if lines.left:
        lines.next("the end of the file")
        raise lines.refuse("the end of the file", "more lines")
    lines.end()


def _owners(num_experts: int, num_ranks: int) -> np.ndarray:
    owner = np.zeros(num_experts, np.int64)
    for rank in range(num_ranks):
        first, count = expert_range(num_experts, num_ranks, rank)
        owner[first : first + count] = rank
    return owner


def read_trace(path: str, label: str, content: bytes) -> Trace:
    """The trace in a file's bytes. ReportError, with file and line, if the format is violated."""
    lines = _Lines(path, content)
    num_experts, top_k, num_ranks = _read_header(lines)
    owner = _owners(num_experts, num_ranks)
    expert_slots = np.zeros(num_experts, np.int64)
    slots, rows = (np.zeros((num_ranks, num_ranks), np.int64) for _ in range(2))
    fan_out = np.zeros(min(top_k, num_ranks) + 1, np.int64)
    tokens = np.zeros(num_ranks, np.int64)
    masked = 0
    for source, idx in enumerate(_read_ranks(lines, num_experts, top_k, num_ranks)):
        live = idx >= 0
        tokens[source] = len(idx)
        masked += int(idx.size - live.sum())
        expert_slots += np.bincount(idx[live], minlength=num_experts)
        to = np.where(live, owner[idx], num_ranks)  # one past the ranks: no expert
        slots[source] = np.bincount(to.ravel(), minlength=num_ranks + 1)[:num_ranks]
        to.sort(axis=1)
        first = np.ones(to.shape, bool)
        first[:, 1:] = to[:, 1:] != to[:, :-1]
        first &= to < num_ranks
        rows[source] = np.bincount(to[first], minlength=num_ranks)
        fan_out += np.bincount(first.sum(axis=1), minlength=len(fan_out))
    return Trace(path, label, num_experts, top_k, tokens, masked, expert_slots, owner, slots, rows,
                 fan_out)
