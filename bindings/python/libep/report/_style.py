# SPDX-License-Identifier: Apache-2.0
"""How pictures look: colours, units, and a matplotlib figure as SVG for a page or a file."""

from __future__ import annotations

import io
import re
from typing import Any, Callable, Literal, NamedTuple, Sequence

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

# Colours of the theme. In a page they become its CSS variables, so that one picture serves the
# light and the dark theme; in a file they stay what they are.
INK, MUTED, RULE, PAPER = "#1f2329", "#5d6672", "#d3d9e0", "#fdfdfe"
_VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--paper)"}

# One colour for an operation in all pictures. Any two of them differ by at least 14 (CIE76) for
# readers without red, green or blue cones, and each has contrast with both themes.
COLOURS = {"prepare": "#c46a9c", "dispatch": "#1f6fb5", "combine": "#c8500a",
           "combine_backward": "#d99a1c", "dispatch_backward": "#5fb0e5", "step": "#109070"}
MARKERS = {"prepare": "v", "dispatch": "o", "combine": "s", "combine_backward": "D",
           "dispatch_backward": "^", "step": "P"}

# Floors and means.
DOTTED: Any = {"color": INK, "linewidth": 1.1, "linestyle": (0, (1.5, 1.5))}

_SETTINGS: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
    "svg.hashsalt": "libep",  # the same picture has the same bytes
    "text.parse_math": False,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "axes.facecolor": PAPER, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": MUTED, "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.linewidth": 0.8,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "xtick.minor.size": 0, "ytick.minor.size": 0, "grid.color": RULE, "grid.linewidth": 0.7,
    "hatch.linewidth": 0.6, "legend.frameon": False, "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


class Picture(NamedTuple):
    """A drawn picture."""

    name: str  # of its file, without .svg
    alt: str  # what it shows, in one sentence
    svg: str  # for a page
    file: str  # for a file of its own


def picture(name: str, alt: str, width: float, height: float,
            draw: Callable[[Figure], None]) -> Picture:
    """Let `draw` fill a figure of this size in inches."""
    name = slug(name)
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None},
                       facecolor=PAPER)
    text = out.getvalue().replace("'DejaVu Sans', sans-serif",
                                  "'DejaVu Sans', Verdana, sans-serif")
    return Picture(name, alt, _for_page(text, name), text)


def _for_page(text: str, name: str) -> str:
    """The svg element: colours of the theme, ids that no other picture of the page has."""
    element = text[text.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)
    element = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", element)
    for colour, variable in _VARIABLES.items():
        element = element.replace(colour, variable)
    head, end = element[: element.index(">")], element[element.index(">") :]
    points = float(re.findall(r' width="([0-9.]+)pt"', head)[0])
    head = re.sub(r' (width|height)="[0-9.]+pt"', "", head)
    size = f"width: {points:.0f}pt; min-width: {0.7 * points:.0f}pt"
    return f'{head} aria-hidden="true" style="{size}"{end}'


# ---- names and units --------------------------------------------------------------------------


def slug(name: str) -> str:
    """A name from a file as one that ids and files may have."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def operation(name: str) -> str:
    """The operation that a timing belongs to: baseline_dispatch and dispatch_send to dispatch."""
    name = name[len("baseline_") :] if name.startswith("baseline_") else name
    return name if name in COLOURS else name.rsplit("_", 1)[0]


def colour(name: str) -> str:
    return COLOURS.get(operation(name), MUTED)


def marker(name: str) -> str:
    return MARKERS.get(operation(name), "x")


def short(label: str) -> str:
    """A label that leaves room for the picture: 24 characters, without its middle."""
    return label if len(label) <= 24 else f"{label[:9]}…{label[-14:]}"


def tokens_per_rank(tokens: int) -> str:
    return f"{tokens} token{'' if tokens == 1 else 's'} per rank"


def seconds(value: float) -> str:
    """A time with three digits and its unit."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= factor:
            break
    value /= factor
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def ratio(value: float) -> str:
    """A ratio such as 1.05×."""
    return f"{value:.2f}×" if value < 9.995 else f"{value:.0f}×"


def time_axis(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """Times in seconds, with units at the ticks."""
    axis = axes.yaxis if which == "y" else axes.xaxis
    axis.set_major_formatter(EngFormatter(unit="s"))
    axis.set_minor_formatter(NullFormatter())
    axes.grid(axis=which)


def log_axis(axes: Axes) -> None:
    """A logarithmic y axis; ticks at 2 and 5 times the powers of ten if few of these are there."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 200 * low else (1.0, 2.0, 5.0)))


def ratio_axis(axes: Axes) -> None:
    """A logarithmic y axis of ratios."""
    log_axis(axes)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y")


def floor_line(label: str) -> Line2D:
    return Line2D([], [], label=label, **DOTTED)


def legend(figure: Figure, entries: Sequence[Artist], columns: int) -> None:
    """Below the panels."""
    figure.legend(handles=list(entries), loc="outside lower left",
                  ncols=min(len(entries), columns))
