# SPDX-License-Identifier: Apache-2.0
"""JSON that is checked where it is read: each error names the file, the place and what is there."""

from __future__ import annotations

import json
from typing import Any, Iterator, Optional

_MOST = 1e18  # no time in microseconds and no count of bytes comes near


class ReportError(Exception):
    """A report cannot be made. str(error) is a sentence: the file, what was expected and got.

    `status` is the exit status of the command: 2 for a refused input, 1 for anything else.
    """

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status


class Node:
    """A value of a JSON file and the way to it, such as phases[0].median_us."""

    def __init__(self, path: str, value: Any, way: str = "", hint: str = "") -> None:
        self._path, self.value, self._way, self.hint = path, value, way, hint

    def refuse(self, expected: str) -> ReportError:
        """The error for this value; a hint stands at its end."""
        place = f"{self._way} to be {expected}" if self._way else expected
        return ReportError(f"{self._path}: expected {place}, got {_shown(self.value)}{self.hint}")

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def __getitem__(self, key: str) -> Node:
        """The member `key` of an object; None where it is missing, which the next call refuses."""
        if not isinstance(self.value, dict):
            raise self.refuse("an object")
        way = f"{self._way}.{key}" if self._way else key
        return Node(self._path, self.value.get(key), way, self.hint)

    def items(self) -> Iterator[Node]:
        """The elements of a list that is not empty."""
        if not isinstance(self.value, list) or not self.value:
            raise self.refuse("a list that is not empty")
        for i, element in enumerate(self.value):
            yield Node(self._path, element, f"{self._way}[{i}]", self.hint)

    def number(self) -> float:
        """A number from 0 to _MOST: all numbers of a result are."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse("a number")
        if not 0 <= value <= _MOST:  # false for NaN, too
            raise self.refuse(f"a number from 0 to {_MOST:g}")
        return value

    def count(self) -> int:
        """A whole number, not negative."""
        if not isinstance(self.value, int):
            raise self.refuse("a whole number")
        return int(self.number())

    def text(self) -> str:
        """A text that can be shown."""
        if not isinstance(self.value, str):
            raise self.refuse("a text")
        return decoded(self.value)

    def optional(self, key: str) -> Optional[float]:
        """The number of the member `key`, or None where it is missing or null."""
        return self[key].number() if key in self else None

    def scalars(self) -> dict[str, Any]:
        """The members of an object that are a number, a text or a truth."""
        if not isinstance(self.value, dict):
            raise self.refuse("an object")
        return {decoded(key): self[key].text() if isinstance(value, str) else value
                for key, value in self.value.items() if isinstance(value, (str, int, float))}


def decoded(text: str) -> str:
    """A text of ep_bench, which writes each byte as one character; they are UTF-8 or nearly."""
    try:
        text = text.encode("latin-1").decode("utf-8", "replace")
    except UnicodeEncodeError:
        pass
    return printable(text)


def printable(text: str) -> str:
    """The text without characters that a page cannot have."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        keys = ", ".join(list(value)[:5])
        return f"an object with {printable(keys)[:60]}" if value else "an empty object"
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def parse(path: str, content: bytes) -> Node:
    """The JSON of a file."""
    wanted = "a JSON result of ep_bench or a routing trace"
    try:
        text = content.decode("utf-8")
        if not text.strip():
            raise ReportError(f"{path}: expected a result of ep_bench or a routing trace, got an "
                              f"empty file")
        return Node(path, json.loads(text))
    except UnicodeDecodeError:
        raise ReportError(f"{path}: expected {wanted}, got bytes that are no text") from None
    except json.JSONDecodeError as error:
        raise ReportError(f"{path}:{error.lineno}: expected {wanted}, got text that is neither: "
                          f"{error.msg}") from None
    except (RecursionError, ValueError):
        raise ReportError(f"{path}: expected a JSON result of ep_bench, got JSON that is too "
                          f"large to read") from None
