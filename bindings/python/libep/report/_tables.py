# SPDX-License-Identifier: Apache-2.0
"""The figures of the pictures as tables of text: each kind of table is a list of columns, with the
text that an item has there. Numbers have no separators: they can be copied."""

from __future__ import annotations

from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence

import numpy as np

from ._results import BASELINE, OPERATION, SPLIT, STEP, Result, Run, Size, Timing
from ._traces import Trace, imbalance

_MOST_EXPERTS = 2048  # rows of the table of experts
_MOST_COLUMNS = 16  # ranks of the matrix of rows


class Table(NamedTuple):
    """Cells are text already."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: int  # columns from this one on are numbers


Column = tuple[str, Callable[[Any], str]]


def _table(caption: str, numeric: int, columns: Sequence[Column], items: Iterable[Any]) -> Table:
    """Columns of numbers that no item has are left out."""
    rows = [[text(item) for _, text in columns] for item in items]
    kept = [i for i in range(len(columns)) if i < numeric or any(row[i] for row in rows)]
    return Table(caption, [columns[i][0] for i in kept], [[row[i] for i in kept] for row in rows],
                 numeric)


def digits(value: Optional[float], count: int = 0) -> str:
    return "" if value is None else f"{value:.{count}f}"


def _ratio(value: Optional[float], other: Optional[float]) -> str:
    return digits(value / other, 2) if value is not None and other else ""


# ---- results ----------------------------------------------------------------------------------


class Item(NamedTuple):
    """A timing and where it is from."""

    run: Run
    size: Size
    timing: Timing


def _number(key: str, count: int = 1) -> Callable[[Item], str]:
    return lambda item: digits(getattr(item.timing, key), count)


def _rate(key: str) -> Callable[[Item], str]:
    def rate(item: Item) -> str:
        num_bytes = getattr(item.timing, key)
        return _ratio(num_bytes / 1e3, item.timing.median_us) if num_bytes else ""

    return rate


_MODEL: Column = ("model", lambda item: item.run.model)
_TIMES: list[Column] = [
    ("tokens", lambda item: str(item.size.tokens)), ("operation", lambda item: item.timing.name),
    ("median (µs)", _number("median_us")), ("p99 (µs)", _number("p99_us")),
    ("wire (µs)", _number("wire_us")), ("memory (µs)", _number("mem_us")),
    ("floor (µs)", _number("floor_us")), ("time / floor", _number("floor_ratio", 2)),
    ("remote GB/s", _rate("remote_bytes")), ("useful GB/s", _rate("useful_bytes")),
    ("issue (µs)", _number("issue_us")), ("wrong", _number("wrong", 0))]


def _items(runs: Iterable[Run]) -> list[Item]:
    return [Item(run, size, t) for run in runs for size in run.sizes for t in size.timings]


def times_table(run: Run) -> Table:
    """Every timing of every size of a run."""
    return _table("Times, rates per rank", 2, _TIMES, _items([run]))


def models_table(runs: Sequence[Run]) -> Table:
    """Every timing of the models of one mode."""
    return _table(f"Times of models, {runs[0].mode} mode, rates per rank", 3, [_MODEL, *_TIMES],
                  _items(runs))


def _fact(key: str, count: int) -> Callable[[Size], str]:
    return lambda size: digits(size.facts.get(key), count)


_SIZES: list[Column] = [("tokens", lambda size: str(size.tokens))] + [
    (title, _fact(key, count)) for title, key, count in (
        ("fewest tokens", "tokens_min", 0), ("most slots", "slots_max", 0),
        ("fewest slots", "slots_min", 0), ("receive rows", "receive_rows", 0),
        ("dropped slots", "dropped_slots", 0), ("library memory (bytes)", "library_bytes", 0),
        ("promised (bytes)", "promised_bytes", 0), ("travelled (bytes)", "travelled_bytes", 0),
        ("new handle, prepare, dispatch (µs)", "new_handle_us", 1),
        ("empty graph node (µs)", "empty_node_us", 1), ("flag one way (µs)", "flag_us", 1),
        ("speedup", "baseline", 2), ("over collectives", "collectives", 2),
        ("pairs over collectives", "pairs", 2))]


def sizes_table(run: Run) -> Table:
    """What is known of each size as a whole."""
    return _table("Sizes: slots, rows and memory of a rank", 0, _SIZES, run.sizes)


def config_table(runs: Sequence[Run]) -> Table:
    """What runs depend on, by the names of the JSON; only what all of them share."""
    shared = [[key, value_text(value)] for key, value in runs[0].config.items()
              if key != "tokens" and all(run.config.get(key) == value for run in runs)]
    return Table("Configuration", ("option", "value"), shared, 2)


def value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- comparisons ------------------------------------------------------------------------------


def differences_table(results: Sequence[Result], runs: Sequence[Run]) -> Table:
    """What differs between the configurations: a reader sees whether like is compared to like."""
    facts = [{"libep": result.version, **result.machine, **run.config}
             for result, run in zip(results, runs)]
    rows = [[key, *(value_text(fact.get(key, "")) for fact in facts)]
            for key in dict.fromkeys(key for fact in facts for key in fact) if key != "tokens"]
    return Table("What differs between the results", ("option", *(r.label for r in results)),
                 [row for row in rows if len(set(row[1:])) > 1], len(results) + 1)


Compared = tuple[Run, int, list[Timing]]


def _compared(runs: Sequence[Run]) -> Iterable[Compared]:
    """The timings that all runs have, by size and operation."""
    for size in runs[0].sizes:
        others = [run.size(size.tokens) for run in runs[1:]]
        for first in size.timings:
            found = [first, *(t for s in others if s for t in (s.timing(first.name),) if t)]
            if len(found) == len(runs):
                yield runs[-1], size.tokens, found


def _median(i: int) -> Callable[[Compared], str]:
    return lambda item: digits(item[2][i].median_us, 1)


def _to_first(i: int) -> Callable[[Compared], str]:
    return lambda item: _ratio(item[2][i].median_us, item[2][0].median_us)


def comparison_table(labels: Sequence[str], groups: Sequence[Sequence[Run]]) -> Table:
    """Medians of the sizes and operations that all runs of a group have, and ratios to the first.

    A group has a run for each label; with --models it is those of one model and mode.
    """
    columns: list[Column] = [("model", lambda item: item[0].model),
                             ("mode", lambda item: item[0].mode)] if groups[0][0].model else []
    numeric = len(columns) + 2
    columns += [("tokens", lambda item: str(item[1])),
                ("operation", lambda item: item[2][0].name)]
    columns += [(f"{label} (µs)", _median(i)) for i, label in enumerate(labels)]
    columns += [(f"{label} / {labels[0]}", _to_first(i)) for i, label in enumerate(labels) if i]
    return _table("Medians compared", numeric, columns,
                  [item for runs in groups for item in _compared(runs)])


def curve_table(title: str, points: Sequence[tuple[float, Size]]) -> Table:
    """Medians over an option."""
    columns: list[Column] = [(title, lambda point: value_text(point[0]))]

    def median(name: str) -> Callable[[tuple[float, Size]], str]:
        def text(point: tuple[float, Size]) -> str:
            timing = point[1].timing(name)
            return digits(timing.median_us, 1) if timing else ""

        return text

    for name in dict.fromkeys(t.name for _, size in points for t in size.timings
                              if t.kind in (OPERATION, SPLIT, BASELINE, STEP)):
        columns.append((f"{name} (µs)", median(name)))
    return _table(f"Medians over {title}", 0, columns, points)


# ---- traces -----------------------------------------------------------------------------------


def trace_table(trace: Trace) -> Table:
    """A trace in numbers."""
    tokens, slots = int(trace.tokens.sum()), int(trace.slots.sum())
    rows, local = int(trace.rows.sum()), int(trace.rows.trace())
    entries = tokens * trace.top_k
    sent, received = trace.rows.sum(axis=1), trace.rows.sum(axis=0)
    busiest = int(trace.expert_slots.argmax())

    def share(part: int, whole: int) -> str:
        return f" ({100 * part / whole:.1f} %)" if whole else ""

    listed = [
        ("ranks, experts, top-k", f"{trace.num_ranks}, {trace.num_experts}, {trace.top_k}"),
        ("tokens", f"{tokens} (per rank {trace.tokens.min()} to {trace.tokens.max()})"),
        ("slots: entries with an expert", f"{slots}{share(slots, entries)}"),
        ("masked entries", f"{trace.masked}{share(trace.masked, entries)}"),
        ("rows: (token, rank) pairs", f"{rows}"),
        ("rows that travel", f"{rows - local}{share(rows - local, rows)}"),
        ("slots for each row", _ratio(slots, rows)),
        ("imbalance of experts (max / mean)", f"{imbalance(trace.expert_slots):.2f}"),
        ("busiest expert", f"{busiest} on rank {trace.owner[busiest]}, "
                           f"{trace.expert_slots[busiest]} slots"),
        ("experts without a token", f"{int((trace.expert_slots == 0).sum())}"),
        ("imbalance of ranks (max / mean)", f"{imbalance(trace.rank_slots):.2f}"),
        ("imbalance of rows sent (max / mean)", f"{imbalance(sent):.2f}"),
        ("imbalance of rows received (max / mean)", f"{imbalance(received):.2f}")]
    return Table("The trace in numbers", ("figure", "value"), listed, 2)


def _counts(caption: str, columns: Sequence[str], *values: Iterable[Any]) -> Table:
    """A column for each list of values, whole numbers but where they are text."""
    rows = [[str(cell) for cell in row] for row in zip(*values)]
    return Table(caption, columns, rows, 0)


def _over_mean(load: np.ndarray) -> list[str]:
    return [digits(value / (load.mean() or 1.0), 2) for value in load]


def trace_tables(trace: Trace) -> list[Table]:
    """All tables of a trace."""
    own, own_rows, ranks = trace.slots.diagonal(), trace.rows.diagonal(), range(trace.num_ranks)
    load, total = trace.expert_slots, int(trace.fan_out.sum()) or 1
    order = np.argsort(-load, kind="stable")[:_MOST_EXPERTS]
    most = f" (the first {_MOST_EXPERTS} of {trace.num_experts})"
    found = [trace_table(trace), _counts(
        "Load of ranks", ("rank", "experts", "tokens", "slots received", "over mean",
                          "slots of its own tokens", "rows sent", "rows received",
                          "rows that stay"),
        ranks, np.bincount(trace.owner, minlength=trace.num_ranks), trace.tokens,
        trace.rank_slots, _over_mean(trace.rank_slots), own, trace.rows.sum(axis=1) - own_rows,
        trace.rows.sum(axis=0) - own_rows, own_rows)]
    if trace.num_ranks <= _MOST_COLUMNS:
        found.append(_counts("Rows from rank to rank", ("from \\ to", *map(str, ranks)), ranks,
                             *trace.rows.T))
    found.append(_counts("Ranks of a token", ("ranks", "tokens", "share (%)"),
                         range(len(trace.fan_out)), trace.fan_out,
                         [digits(100 * count / total, 1) for count in trace.fan_out]))
    found.append(_counts("Experts, busiest first" + (most if len(order) < len(load) else ""),
                         ("expert", "rank", "slots", "over mean"), order, trace.owner[order],
                         load[order], np.array(_over_mean(load))[order]))
    return found


def series_table(traces: Sequence[Trace]) -> Table:
    columns: list[Column] = [
        ("trace", lambda trace: trace.label), ("tokens", lambda trace: str(trace.tokens.sum())),
        ("slots", lambda trace: str(trace.slots.sum())),
        ("experts: max / mean", lambda trace: digits(imbalance(trace.expert_slots), 2)),
        ("ranks: max / mean", lambda trace: digits(imbalance(trace.rank_slots), 2)),
        ("experts without a token", lambda trace: str(int((trace.expert_slots == 0).sum())))]
    return _table("Traces in order", 1, columns, traces)
