# SPDX-License-Identifier: Apache-2.0
"""Picture: times over the number of tokens, one panel for each operation, and one for ratios."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Optional, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ._results import BASELINE, OPERATION, STEP, Run, Timing
from ._style import (
    INK,
    MUTED,
    PAPER,
    Picture,
    colour,
    log_axis,
    marker,
    picture,
    ratio_axis,
    short,
    slug,
    time_axis,
)

_DASHES = ("-", "--", "-.", ":")


def _names(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(t.name for run in runs for size in run.sizes for t in size.timings
                              if t.kind in (OPERATION, STEP)))


def _points(run: Run, name: str) -> tuple[list[int], list[Timing]]:
    found = [(size.tokens, t) for size in run.sizes for t in (size.timing(name),) if t]
    return [tokens for tokens, _ in found], [timing for _, timing in found]


def _line_style(i: int, count: int) -> dict[str, Any]:
    """The last of several results is solid and filled, as it is alone."""
    last = i == count - 1
    return {"linestyle": "-" if last else _DASHES[1 + i % 3],
            "markerfacecolor": None if last else PAPER}


def _spread(tokens: Sequence[int]) -> list[int]:
    """As many of the ascending numbers as have room for their digits on a logarithmic axis."""
    places = [math.log2(n) if n else -1.0 for n in tokens]
    room, shown, last = (places[-1] - places[0]) / 6, [], -math.inf
    for n, place in zip(tokens, places):
        if place - last >= room:
            shown.append(n)
            last = place
    return shown


def _token_axis(axes: Axes, runs: Sequence[Run]) -> None:
    tokens = sorted({size.tokens for run in runs for size in run.sizes})
    if tokens[0] == 0:  # a logarithmic axis has no zero
        axes.set_xscale("symlog", base=2, linthresh=1)
    else:
        axes.set_xscale("log", base=2)
    shown = _spread(tokens)
    axes.set_xticks(shown, [str(t) for t in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens per rank")


def _draw_times(axes: Axes, runs: Sequence[Run], name: str) -> None:
    for i, run in enumerate(runs):
        tokens, timings = _points(run, name)
        style = _line_style(i, len(runs))
        medians = [t.median_us / 1e6 for t in timings]
        if i == len(runs) - 1:
            axes.fill_between(tokens, medians, [t.p99_us / 1e6 for t in timings],
                              color=colour(name), alpha=0.2, linewidth=0)
        floors = [(n, t.floor_us / 1e6) for n, t in zip(tokens, timings) if t.floor_us]
        if floors:
            axes.plot(*zip(*floors), color=INK, linewidth=1.1, linestyle=(0, (1.5, 1.5)))
        axes.plot(tokens, medians, color=colour(name), marker=marker(name),
                  gid=f"median-{slug(name)}-{i}", **style)
        without, plain = _points(run, "baseline_" + name)
        if plain:
            axes.plot(without, [t.median_us / 1e6 for t in plain], color=MUTED, marker="x",
                      linestyle=style["linestyle"])
    log_axis(axes)
    axes.set_title(name)
    time_axis(axes)


def _floor_ratio(timing: Timing, _: Optional[Timing]) -> Optional[float]:
    return timing.telling_ratio


def _first_ratio(timing: Timing, first: Optional[Timing]) -> Optional[float]:
    return timing.median_us / first.median_us if first and first.median_us else None


def _draw_ratios(
    axes: Axes, runs: Sequence[Run], title: str, skip: int,
    figure_of: Callable[[Timing, Optional[Timing]], Optional[float]],
) -> None:
    """figure_of(timing, the first run's) over the tokens, a line for each operation and run."""
    for name in _names(runs):
        firsts = dict(zip(*_points(runs[0], name)))
        for i, run in enumerate(runs[skip:], skip):
            values = [(n, figure_of(t, firsts.get(n))) for n, t in zip(*_points(run, name))]
            known = [(n, value) for n, value in values if value]
            if known:
                axes.plot(*zip(*known), color=colour(name), marker=marker(name), label=name,
                          linewidth=1.3, markersize=4, **_line_style(i, len(runs)))
    ratio_axis(axes)
    axes.axhline(1, color=INK, linewidth=1.1, linestyle=(0, (1.5, 1.5)))
    axes.set_title(title)


def _legend(figure: Figure, labels: Sequence[str], runs: Sequence[Run]) -> None:
    timings = [t for run in runs for size in run.sizes for t in size.timings]
    entries = []
    if len(labels) > 1:
        entries += [Line2D([], [], color=MUTED, marker="o", label=short(label),
                           **_line_style(i, len(labels))) for i, label in enumerate(labels)]
    entries += [Line2D([], [], color=colour(name), marker=marker(name), label=name)
                for name in _names(runs)]
    entries.append(Line2D([], [], color=MUTED, alpha=0.25, linewidth=8,
                          label="up to the 99th percentile"))
    if any(t.floor_us for t in timings):
        entries.append(Line2D([], [], color=INK, linewidth=1.1, linestyle=(0, (1.5, 1.5)),
                              label="floor"))
    if any(t.kind == BASELINE for t in timings):
        entries.append(Line2D([], [], color=MUTED, marker="x", label="without libep"))
    figure.legend(handles=entries, loc="outside lower left", ncols=min(len(entries), 5))


def _grid(panels: int) -> tuple[int, int]:
    """Rows and columns: no panel alone in a row of its own."""
    columns = 4 if panels in (4, 7, 8) else 3
    return -(-panels // columns), columns


def _panels(labels: Sequence[str], runs: Sequence[Run]) -> list[Callable[[Axes], None]]:
    names = _names(runs)
    panels: list[Callable[[Axes], None]] = [
        partial(_draw_times, runs=runs, name=name) for name in names
    ]
    if any(t.floor_us for run in runs for size in run.sizes for t in size.timings):
        panels.append(lambda axes: _draw_ratios(axes, runs, "time / floor", 0, _floor_ratio))
    if len(runs) > 1:
        panels.append(lambda axes: _draw_ratios(axes, runs, f"time / {short(labels[0])}", 1,
                                                _first_ratio))
    return panels


def sweep(name: str, alt: str, labels: Sequence[str], runs: Sequence[Run]) -> Picture:
    """Times of one or several runs over their sizes."""
    panels = _panels(labels, runs)
    rows, columns = _grid(len(panels))

    def draw(figure: Figure) -> None:
        for i, draw_panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, i + 1)
            draw_panel(axes)
            _token_axis(axes, runs)
        _legend(figure, labels, runs)

    return picture(name, alt, 3.1 * columns, 0.6 + 2.5 * rows, draw)
