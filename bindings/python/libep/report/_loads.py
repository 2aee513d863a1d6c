# SPDX-License-Identifier: Apache-2.0
"""Pictures of routing traces: the load of experts and ranks, rows between ranks, fan-out."""

from __future__ import annotations

from typing import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ._heatmaps import text_on
from ._style import COLOURS, DOTTED, PAPER, Picture, picture, short
from ._traces import Trace, imbalance

_OWN, _REMOTE = COLOURS["dispatch_backward"], COLOURS["dispatch"]
_MOST_BARS = 1024  # more experts are drawn in groups of equally many
_MOST_NUMBERS = 12  # ranks up to which the matrix has its numbers written in


def _mean_line(axes: Axes, load: np.ndarray) -> None:
    axes.axhline(load.mean(), label=f"mean {load.mean():.1f}", **DOTTED)


def _title(what: str, load: np.ndarray) -> str:
    return f"{what}: max / mean {imbalance(load):.2f}"


def _draw_experts(axes: Axes, trace: Trace) -> None:
    """Experts in their order; shades alternate from rank to rank."""
    group = -(-trace.num_experts // _MOST_BARS)
    starts = np.arange(0, trace.num_experts, group)
    load = np.add.reduceat(trace.expert_slots, starts)
    edges = np.append(starts, trace.num_experts) - 0.5
    for parity, shade in ((0, _REMOTE), (1, _OWN)):
        mine = np.where(trace.owner[starts] % 2 == parity, load, 0)
        axes.stairs(mine, edges, fill=True, color=shade,
                    label=("even" if parity == 0 else "odd") + " ranks' experts")
    _mean_line(axes, load)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.25 * load.max() or 1)
    axes.set_title(_title("Load of experts", trace.expert_slots))
    axes.set_xlabel("expert" if group == 1 else f"expert, in groups of {group}")
    axes.set_ylabel("slots (token, k)")
    axes.grid(axis="y")
    axes.legend(loc="upper right", ncols=3)


def _rank_axis(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    axis.set_tick_params(length=0)


def _draw_ranks(axes: Axes, trace: Trace) -> None:
    ranks, own = np.arange(trace.num_ranks), trace.slots.diagonal()
    remote = trace.rank_slots - own
    axes.bar(ranks, remote, 0.8, color=_REMOTE, label="from other ranks")
    axes.bar(ranks, own, 0.8, bottom=remote, color=_OWN, label="from its own tokens",
             hatch="\\\\\\\\", edgecolor=PAPER, linewidth=0)
    _mean_line(axes, trace.rank_slots)
    axes.set_xlim(-0.6, trace.num_ranks - 0.4)
    axes.set_ylim(0, 1.5 * trace.rank_slots.max() or 1)
    axes.set_title(_title("Load of ranks", trace.rank_slots))
    axes.set_xlabel("rank")
    axes.set_ylabel("slots received")
    axes.grid(axis="y")
    _rank_axis(axes.xaxis)
    axes.legend(loc="upper left", fontsize=8)


def _draw_matrix(figure: Figure, axes: Axes, trace: Trace) -> None:
    edges = np.arange(trace.num_ranks + 1) - 0.5
    table, most = matplotlib.colormaps["cividis"], trace.rows.max() or 1
    mesh = axes.pcolormesh(edges, edges, trace.rows, cmap=table, vmin=0, vmax=most,
                           rasterized=trace.rows.size > 4096)
    if trace.num_ranks <= _MOST_NUMBERS:
        for (source, rank), rows in np.ndenumerate(trace.rows):
            axes.text(rank, source, str(rows), ha="center", va="center",
                      fontsize=8 if trace.num_ranks <= 8 else 6, color=text_on(table(rows / most)))
    figure.colorbar(mesh, ax=axes, label="rows", shrink=0.9)
    axes.set_ylim(trace.num_ranks - 0.5, -0.5)
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
    axes.set_title("Rows from rank to rank")
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    for axis in (axes.xaxis, axes.yaxis):
        _rank_axis(axis)


def _draw_fan_out(axes: Axes, trace: Trace) -> None:
    total = trace.fan_out.sum() or 1
    share = 100 * trace.fan_out / total
    bars = axes.bar(np.arange(len(share)), share, 0.8, color=COLOURS["step"])
    if len(share) <= 10:
        axes.bar_label(bars, [f"{s:.1f}" if s else "" for s in share], padding=2, fontsize=8)
    mean = float((np.arange(len(share)) * trace.fan_out).sum() / total)
    axes.set_ylim(0, 1.15 * share.max() or 1)
    axes.set_title(f"Ranks of a token: mean {mean:.2f}")
    axes.set_xlabel("ranks with an expert of the token")
    axes.set_ylabel("tokens (%)")
    axes.grid(axis="y")
    _rank_axis(axes.xaxis)


def loads(name: str, alt: str, trace: Trace) -> Picture:
    """One trace: experts above; ranks, the matrix of rows, and fan-out below."""

    def draw(figure: Figure) -> None:
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.15))[:, 0]
        for part in (above, below):
            part.set_facecolor(PAPER)
        _draw_experts(above.add_subplot(), trace)
        left, middle, right = below.subplots(1, 3, width_ratios=(1, 1.25, 1))
        _draw_ranks(left, trace)
        _draw_matrix(below, middle, trace)
        _draw_fan_out(right, trace)

    return picture(name, alt, 11.0, 6.0, draw)


# ---- several traces: one after the other -------------------------------------------------------


def _draw_over_time(figure: Figure, axes: Axes, load: np.ndarray, what: str, labels: Sequence[str]
                    ) -> None:
    """load[trace, expert or rank] over its mean, as colours."""
    mean = load.mean(axis=1, keepdims=True)
    relative = np.divide(load, mean, out=np.zeros(load.shape), where=mean > 0)
    edges = np.arange(len(load) + 1) - 0.5, np.arange(load.shape[1] + 1) - 0.5
    most = min(max(1.25, float(relative.max())), 8.0)
    mesh = axes.pcolormesh(*edges, relative.T, cmap="cividis", vmin=max(0.0, 2.0 - most),
                           vmax=most, rasterized=load.size > 2048)
    figure.colorbar(mesh, ax=axes, label="load / mean")
    axes.set_ylabel(what)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[:].set_visible(False)
    _trace_axis(axes, labels)


def _trace_axis(axes: Axes, labels: Sequence[str]) -> None:
    step = -(-len(labels) // 12)
    axes.set_xticks(range(0, len(labels), step), labels[::step])
    if max(map(len, labels)) * len(labels[::step]) > 90:
        axes.set_xticks(range(0, len(labels), step), labels[::step], rotation=25, ha="right")
    axes.set_xlim(-0.5, len(labels) - 0.5)


def _draw_imbalance(axes: Axes, experts: np.ndarray, ranks: np.ndarray, labels: Sequence[str]
                    ) -> None:
    for load, what, colour, mark in ((experts, "experts", COLOURS["combine"], "s"),
                                     (ranks, "ranks", COLOURS["dispatch"], "o")):
        axes.plot([imbalance(row) for row in load], color=colour, marker=mark, label=what)
    axes.axhline(1, **DOTTED)
    axes.set_ylim(0)
    axes.set_title("Imbalance: max / mean")
    axes.grid(axis="y")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    _trace_axis(axes, labels)


def series(name: str, alt: str, traces: Sequence[Trace]) -> Picture:
    """Several traces of one shape, in the order given: steps or layers, from left to right."""
    experts = np.array([trace.expert_slots for trace in traces])
    ranks = np.array([trace.rank_slots for trace in traces])
    labels = [short(trace.label) for trace in traces]

    def draw(figure: Figure) -> None:
        first, second, third = figure.subplots(3, 1, height_ratios=(1, 1, 1.5))
        _draw_imbalance(first, experts, ranks, labels)
        _draw_over_time(figure, second, ranks, "rank", labels)
        _draw_over_time(figure, third, experts, "expert", labels)
        for axes in (first, second):  # the names stand below the last one
            axes.tick_params(axis="x", labelbottom=False)

    return picture(name, alt, 9.5, 7.5, draw)
