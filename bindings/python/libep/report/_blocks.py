# SPDX-License-Identifier: Apache-2.0
"""The parts that a report is made of."""

from __future__ import annotations

from typing import NamedTuple, Sequence, Union

from ._style import Picture
from ._tables import Table


class Text(NamedTuple):
    """A sentence; a warning is shown as one."""

    text: str
    warning: bool = False


class Shown(NamedTuple):
    """A picture and the sentence below it."""

    picture: Picture
    caption: str


class Facts(NamedTuple):
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


Block = Union[Text, Shown, Facts, Table]


class Section(NamedTuple):
    name: str  # the anchor
    title: str
    blocks: Sequence[Block]
