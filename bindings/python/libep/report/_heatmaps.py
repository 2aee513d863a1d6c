# SPDX-License-Identifier: Apache-2.0
"""Picture: many models in one table of colours, a panel for each operation."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from ._style import MUTED, RULE, Picture, picture, ratio, seconds


class Cell(NamedTuple):
    """What one cell says: its colour's number, if there is one, and its time."""

    value: Optional[float]
    seconds: float


class Panel(NamedTuple):
    """cells[row][column]; None where nothing was measured."""

    title: str
    cells: Sequence[Sequence[Optional[Cell]]]


FLOOR = ("cividis_r", LogNorm(1.0, 10.0, clip=True))
CHANGE = ("PuOr_r", LogNorm(0.5, 2.0, clip=True))


def text_on(rgba: Sequence[float]) -> str:
    """Black or white, whichever can be read on a colour. Cells look the same in both themes."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgba[:3]]
    light = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
    return "#000000" if light > 0.18 else "#ffffff"


def _draw_cell(axes: Axes, x: float, y: float, cell: Cell, rgba: Optional[Sequence[float]]
               ) -> None:
    if cell.value is None or rgba is None:
        axes.text(x, y, seconds(cell.seconds), ha="center", va="center", fontsize=7)
        return
    ink = text_on(rgba)
    axes.text(x, y - 0.17, ratio(cell.value), ha="center", va="center", fontsize=7.5, color=ink,
              weight="bold")
    axes.text(x, y + 0.22, seconds(cell.seconds), ha="center", va="center", fontsize=6, color=ink)


def _draw_panel(axes: Axes, panel: Panel, rows: Sequence[str], columns: Sequence[str],
                colours: tuple[str, Normalize], show_rows: bool) -> None:
    name, norm = colours
    table = matplotlib.colormaps[name]
    values = np.array([[cell.value if cell and cell.value else np.nan for cell in row]
                       for row in panel.cells], float)
    axes.pcolormesh(np.ma.masked_invalid(values), cmap=table, norm=norm, edgecolors=RULE,
                    linewidth=0.6)
    for y, row in enumerate(panel.cells):
        for x, cell in enumerate(row):
            if cell:
                rgba = table(norm(cell.value)) if cell.value else None
                _draw_cell(axes, x + 0.5, y + 0.5, cell, rgba)  # a cell is from x to x + 1
    axes.set_title(panel.title)
    axes.set_ylim(len(rows), 0)
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows if show_rows else [""] * len(rows))
    axes.tick_params(length=0, color=MUTED)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("tokens per rank")


def heatmap(name: str, alt: str, panels: Sequence[Panel], rows: Sequence[str],
            columns: Sequence[str], colours: tuple[str, Normalize]) -> Picture:
    """A panel for each operation: rows are models, columns are numbers of tokens."""
    across = min(len(panels), max(1, 14 // max(1, len(columns))), 3)
    down = -(-len(panels) // across)

    def draw(figure: Figure) -> None:
        for i, panel in enumerate(panels):
            axes = figure.add_subplot(down, across, i + 1)
            _draw_panel(axes, panel, rows, columns, colours, i % across == 0)

    width = 1.5 + across * max(1.6, 0.6 * len(columns))
    return picture(name, alt, width, down * (0.75 + 0.34 * len(rows)), draw)
