# SPDX-License-Identifier: Apache-2.0
"""Picture: the times of one size as bars, each with its floor."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ._results import BASELINE, SPLIT, Size, Timing
from ._style import (
    INK, MUTED, PAPER, Picture, colour, legend, picture, ratio, seconds, short, slug, time_axis)

_HATCHES = {BASELINE: "////", SPLIT: "\\\\\\\\"}  # of dots, one SVG has 250 kB


class _Bar(NamedTuple):
    y: float
    result: int
    label: str
    timing: Timing
    first: Optional[Timing]  # the same operation in the first of several results
    strength: float  # opacity: the last result is the strongest

    @property
    def reach(self) -> float:
        """The end of the bar or of its floor, in seconds."""
        return max(self.timing.median_us, self.timing.floor_us or 0.0) / 1e6


def _bars(labels: Sequence[str], sizes: Sequence[Size]) -> list[_Bar]:
    """From top to bottom: operation by operation, the results of each one side by side."""
    bars, y = [], 0.0
    for name in dict.fromkeys(t.name for size in sizes for t in size.timings):
        first = sizes[0].timing(name)
        for i, (label, size) in enumerate(zip(labels, sizes)):
            timing = size.timing(name)
            if timing:
                bars.append(_Bar(y, i, short(label) if len(sizes) > 1 else name, timing,
                                 first if i else None, 0.45 + 0.55 * (i + 1) / len(sizes)))
                y += 1.0
        y += 1.1 if len(sizes) > 1 else 0.15
    return bars


def _text(bar: _Bar) -> str:
    parts = [seconds(bar.timing.median_us / 1e6)]
    if bar.timing.floor_ratio is not None:
        parts.append(f"{ratio(bar.timing.floor_ratio)} floor")
    if bar.first is not None and bar.first.median_us:
        parts.append(f"{ratio(bar.timing.median_us / bar.first.median_us)} first")
    return " · ".join(parts)


def _draw_floor(axes: Axes, bar: _Bar) -> None:
    """A solid line at the floor, a dotted one at the smaller bound."""
    timing, ends = bar.timing, (bar.y - 0.46, bar.y + 0.46)
    for bound in (timing.wire_us, timing.mem_us):
        if bound:
            is_floor = bound == timing.floor_us
            axes.plot([bound / 1e6] * 2, ends, color=INK if is_floor else MUTED,
                      linestyle="-" if is_floor else ":", linewidth=2.2 if is_floor else 1.6,
                      solid_capstyle="butt")


def _draw_bar(axes: Axes, bar: _Bar, limit: float) -> None:
    timing = bar.timing
    median, p99 = timing.median_us / 1e6, timing.p99_us / 1e6
    hatch = _HATCHES.get(timing.kind, "")
    axes.barh(bar.y, median, 0.62, color=colour(timing.name), alpha=bar.strength, hatch=hatch,
              edgecolor=PAPER, linewidth=0, gid=f"bar-{slug(timing.name)}-{bar.result}")
    shown = min(p99, limit)
    axes.plot([median, shown], [bar.y] * 2, color=INK, linewidth=1,
              marker="|" if shown == p99 else ">", markersize=6, markevery=[1])
    _draw_floor(axes, bar)
    axes.annotate(_text(bar), (max(shown, bar.reach), bar.y), xytext=(6, 0), textcoords="offset points",
                  va="center", fontsize=9)


def _legend(figure: Figure, bars: Sequence[_Bar]) -> None:
    kinds = {bar.timing.kind for bar in bars}
    bounds = {bar.timing.bound for bar in bars}
    both = any(bar.timing.wire_us and bar.timing.mem_us for bar in bars)
    entries: list[Artist] = [Patch(color=MUTED, label="median"),
                     Line2D([], [], color=INK, marker="|", markevery=[1], linewidth=1,
                            label="up to the 99th percentile")]
    if bounds - {""}:
        entries.append(Line2D([], [], color=INK, linewidth=2.2, label="floor: " + " or ".join(
            sorted(bounds - {""}, reverse=True)) + (", the larger" if both else "")))
    if both:
        entries.append(Line2D([], [], color=MUTED, linestyle=":", label="the smaller bound"))
    for kind, hatch in _HATCHES.items():
        if kind in kinds:
            entries.append(Patch(facecolor=MUTED, edgecolor=PAPER, hatch=hatch, label=kind))
    legend(figure, entries, 4)


def _draw(figure: Figure, bars: Sequence[_Bar]) -> None:
    # Whiskers are cut, so that one slow iteration does not squeeze the rest.
    axes, limit = figure.add_subplot(), 1.8 * max(bar.reach for bar in bars)
    for bar in bars:
        _draw_bar(axes, bar, limit)
    longest = max(max(min(bar.timing.p99_us / 1e6, limit), bar.reach) for bar in bars)
    several = any(bar.label != bar.timing.name for bar in bars)
    axes.set_xlim(0, longest * (1.5 if several else 1.32) or 1.0)
    axes.set_ylim(bars[-1].y + 0.6, bars[0].y - (1.5 if several else 0.6))
    axes.set_yticks([bar.y for bar in bars], [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("time of one call, slowest rank")
    time_axis(axes, "x")
    if several:
        for name in dict.fromkeys(bar.timing.name for bar in bars):
            top = next(bar.y for bar in bars if bar.timing.name == name)
            axes.annotate(name, (0, top), xytext=(3, 15), textcoords="offset points",
                          weight="bold", va="center")
    _legend(figure, bars)


def bars(name: str, alt: str, labels: Sequence[str], sizes: Sequence[Size]) -> Picture:
    """Bars of one size of one or several runs. All of them have at least one operation."""
    drawn = _bars(labels, sizes)
    height = 1.25 + (drawn[-1].y + 1.5) * (0.27 if len(sizes) > 1 else 0.36)
    return picture(name, alt, 9.0, height, lambda figure: _draw(figure, drawn))
