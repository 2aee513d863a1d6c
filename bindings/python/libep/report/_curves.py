# SPDX-License-Identifier: Apache-2.0
"""Picture: times over a number, one panel for each operation, and one for ratios."""

from __future__ import annotations

import math
from typing import Any, Callable, NamedTuple, Optional, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ._results import BASELINE, OPERATION, STEP, Size, Timing, names
from ._style import (
    DOTTED, MUTED, PAPER, Picture, colour, floor_line, legend, log_axis, marker, picture,
    ratio_axis, short, slug, time_axis)

_DASHES = ("-", "--", "-.", ":")


class Series(NamedTuple):
    """Sizes of one result over its numbers of tokens, or of several results over an option."""

    label: str
    points: Sequence[tuple[float, Size]]  # in ascending order

    def timings(self, name: str) -> dict[float, Timing]:
        return {x: t for x, size in self.points for t in (size.timing(name),) if t}


def _sizes(series: Sequence[Series]) -> list[Size]:
    return [size for one in series for _, size in one.points]


def _line_style(i: int, count: int) -> dict[str, Any]:
    """The last of several results is solid and filled, as it is alone."""
    last = i == count - 1
    return {"linestyle": "-" if last else _DASHES[1 + i % 3],
            "markerfacecolor": None if last else PAPER}


def _spread(numbers: Sequence[float]) -> list[float]:
    """As many of the ascending numbers as have room for their digits on a logarithmic axis."""
    places = [math.log2(n) if n else -1.0 for n in numbers]
    room, shown, last = (places[-1] - places[0]) / 6, [], -math.inf
    for n, place in zip(numbers, places):
        if place - last >= room:
            shown.append(n)
            last = place
    return shown


def _number_axis(axes: Axes, series: Sequence[Series], title: str) -> None:
    numbers = sorted({x for one in series for x, _ in one.points})
    if numbers[0] == 0:  # a logarithmic axis has no zero
        axes.set_xscale("symlog", base=2, linthresh=1)
    else:
        axes.set_xscale("log", base=2)
    shown = _spread(numbers)
    axes.set_xticks(shown, [f"{x:g}" for x in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(title)


def _draw_times(axes: Axes, series: Sequence[Series], name: str) -> None:
    for i, one in enumerate(series):
        found, style = one.timings(name), _line_style(i, len(series))
        medians = [t.median_us / 1e6 for t in found.values()]
        if i == len(series) - 1:
            axes.fill_between(list(found), medians, [t.p99_us / 1e6 for t in found.values()],
                              color=colour(name), alpha=0.2, linewidth=0)
        floors = [(x, t.floor_us / 1e6) for x, t in found.items() if t.floor_us]
        if floors:
            axes.plot(*zip(*floors), **DOTTED)
        axes.plot(list(found), medians, color=colour(name), marker=marker(name),
                  gid=f"median-{slug(name)}-{i}", **style)
        plain = one.timings("baseline_" + name)
        if plain:
            axes.plot(list(plain), [t.median_us / 1e6 for t in plain.values()], color=MUTED,
                      marker="x", linestyle=style["linestyle"])
    log_axis(axes)
    axes.set_title(name)
    time_axis(axes)


Ratio = Callable[[Timing, Optional[Timing]], Optional[float]]


def _floor_ratio(timing: Timing, _: Optional[Timing]) -> Optional[float]:
    return timing.telling_ratio


def _first_ratio(timing: Timing, first: Optional[Timing]) -> Optional[float]:
    return timing.median_us / first.median_us if first and first.median_us else None


def _draw_ratios(axes: Axes, series: Sequence[Series], title: str, skip: int, ratio: Ratio
                 ) -> None:
    """ratio(timing, the first result's) over the numbers, a line for each operation and result."""
    for name in names(_sizes(series), OPERATION, STEP):
        firsts = series[0].timings(name)
        for i, one in enumerate(series[skip:], skip):
            values = [(x, ratio(t, firsts.get(x))) for x, t in one.timings(name).items()]
            known = [(x, value) for x, value in values if value]
            if known:
                axes.plot(*zip(*known), color=colour(name), marker=marker(name), linewidth=1.3,
                          markersize=4, **_line_style(i, len(series)))
    ratio_axis(axes)
    axes.axhline(1, **DOTTED)
    axes.set_title(title)


def _legend(figure: Figure, series: Sequence[Series]) -> None:
    timings = [t for size in _sizes(series) for t in size.timings]
    entries = [Line2D([], [], color=MUTED, marker="o", label=short(one.label),
                      **_line_style(i, len(series)))
               for i, one in enumerate(series) if len(series) > 1]
    entries += [Line2D([], [], color=colour(name), marker=marker(name), label=name)
                for name in names(_sizes(series), OPERATION, STEP)]
    entries.append(Line2D([], [], color=MUTED, alpha=0.25, linewidth=8,
                          label="up to the 99th percentile"))
    if any(t.floor_us for t in timings):
        entries.append(floor_line("floor"))
    if any(t.kind == BASELINE for t in timings):
        entries.append(Line2D([], [], color=MUTED, marker="x", label="without libep"))
    legend(figure, entries, 5)


def curves(name: str, alt: str, title: str, series: Sequence[Series]) -> Picture:
    """Times of one or several series over the number that `title` names."""
    panels = names(_sizes(series), OPERATION, STEP)
    ratios: list[tuple[str, int, Ratio]] = []
    if any(t.floor_us for size in _sizes(series) for t in size.timings):
        ratios.append(("time / floor", 0, _floor_ratio))
    if len(series) > 1:
        ratios.append((f"time / {short(series[0].label)}", 1, _first_ratio))
    count = len(panels) + len(ratios)
    columns = 4 if count in (4, 7, 8) else 3  # no panel alone in a row of its own
    rows = -(-count // columns)

    def draw(figure: Figure) -> None:
        for i in range(count):
            axes = figure.add_subplot(rows, columns, i + 1)
            if i < len(panels):
                _draw_times(axes, series, panels[i])
            else:
                _draw_ratios(axes, series, *ratios[i - len(panels)])
            _number_axis(axes, series, title)
        _legend(figure, series)

    return picture(name, alt, 3.1 * columns, 0.6 + 2.5 * rows, draw)
