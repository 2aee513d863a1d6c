# SPDX-License-Identifier: Apache-2.0
"""The figures of the pictures as tables of text. Numbers have no separators: they can be copied."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Optional, Sequence

import numpy as np

from ._results import Result, Run, Size, Timing
from ._traces import Trace, imbalance

_MOST_EXPERTS = 2048  # rows of the table of experts
_MOST_COLUMNS = 16  # ranks of the matrix of rows


class Table(NamedTuple):
    """Cells are text already."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: int  # columns from this one on are numbers


def micros(value: Optional[float]) -> str:
    """Microseconds, as ep_bench prints them."""
    return "" if value is None else f"{value:.1f}"


def _ratio(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.2f}"


def _whole(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.0f}"


def _rate(num_bytes: Optional[int], median_us: float) -> str:
    return f"{num_bytes / median_us / 1e3:.2f}" if num_bytes and median_us else ""


# ---- results ----------------------------------------------------------------------------------

_TIMES = ("tokens", "operation", "median (µs)", "p99 (µs)", "wire (µs)", "memory (µs)",
          "floor (µs)", "time / floor", "remote GB/s", "useful GB/s", "issue (µs)", "wrong")


def _time_row(size: Size, timing: Timing) -> list[str]:
    return [str(size.tokens), timing.name, micros(timing.median_us), micros(timing.p99_us),
            micros(timing.wire_us), micros(timing.mem_us), micros(timing.floor_us),
            _ratio(timing.floor_ratio), _rate(timing.remote_bytes, timing.median_us),
            _rate(timing.useful_bytes, timing.median_us), micros(timing.issue_us),
            _whole(timing.wrong)]


def _without_empty(table: Table) -> Table:
    """Leave out the columns of numbers that no row has."""
    kept = [i for i in range(len(table.columns))
            if i < table.numeric or any(row[i] for row in table.rows)]
    return table._replace(columns=[table.columns[i] for i in kept],
                          rows=[[row[i] for i in kept] for row in table.rows])


def times_table(run: Run) -> Table:
    """Every timing of every size of a run."""
    rows = [_time_row(size, timing) for size in run.sizes for timing in size.timings]
    return _without_empty(Table("Times, rates per rank", _TIMES, rows, 2))


def models_table(runs: Sequence[Run]) -> Table:
    """Every timing of the models of one mode."""
    rows = [[run.model, *_time_row(size, timing)] for run in runs for size in run.sizes
            for timing in size.timings]
    mode = runs[0].mode
    return _without_empty(Table(f"Times of models, {mode} mode, rates per rank",
                                ("model", *_TIMES), rows, 3))


_SIZES = (("tokens_min", "fewest tokens"), ("slots_max", "most slots"),
          ("slots_min", "fewest slots"), ("receive_rows", "receive rows"),
          ("dropped_slots", "dropped slots"), ("library_bytes", "library memory (bytes)"),
          ("promised_bytes", "promised (bytes)"), ("travelled_bytes", "travelled (bytes)"))
_COSTS = (("new_handle_us", "new handle, prepare, dispatch (µs)"),
          ("empty_node_us", "empty graph node (µs)"), ("flag_us", "flag one way (µs)"))


def sizes_table(run: Run) -> Table:
    """What is known of each size as a whole."""
    columns = ["tokens"] + [text for _, text in _SIZES + _COSTS] + ["speedup"]
    rows = [[str(size.tokens)] + [_whole(size.facts.get(key)) for key, _ in _SIZES] +
            [micros(size.facts.get(key)) for key, _ in _COSTS] +
            [_ratio(size.facts.get("speedup"))] for size in run.sizes]
    return _without_empty(Table("Sizes: slots, rows and memory of a rank", columns, rows, 0))


def config_table(runs: Sequence[Run]) -> Table:
    """What runs depend on, by the names of the JSON; only what all of them share."""
    shared = [(key, value) for key, value in runs[0].config.items()
              if key != "tokens" and all(run.config.get(key) == value for run in runs)]
    return Table("Configuration", ("option", "value"),
                 [[key, value_text(value)] for key, value in shared], 2)


def value_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- comparisons ------------------------------------------------------------------------------


def differences_table(labels: Sequence[str], results: Sequence[Result], runs: Sequence[Run]
                      ) -> Table:
    """What differs between the configurations: a reader sees whether like is compared to like."""
    facts = [{"libep": result.version, **result.machine, **run.config}
             for result, run in zip(results, runs)]
    keys = [key for key in dict.fromkeys(key for fact in facts for key in fact)
            if key != "tokens" and len({value_text(fact.get(key, "")) for fact in facts}) > 1]
    rows = [[key, *(value_text(fact.get(key, "")) for fact in facts)] for key in keys]
    return Table("What differs between the results", ("option", *labels), rows, len(labels) + 1)


def _comparison_rows(runs: Sequence[Run]) -> Iterator[list[str]]:
    for size in runs[0].sizes:
        others = [run.size(size.tokens) for run in runs[1:]]
        for first in size.timings:
            found = [other.timing(first.name) if other else None for other in others]
            known = [first, *(timing for timing in found if timing)]
            if len(known) == len(runs):
                yield [runs[0].model, str(size.tokens), first.name,
                       *(micros(t.median_us) for t in known),
                       *(_ratio(t.median_us / first.median_us if first.median_us else None)
                         for t in known[1:])]


def comparison_table(labels: Sequence[str], groups: Sequence[Sequence[Run]]) -> Table:
    """Medians of the sizes and operations that all runs of a group have, and ratios to the first.

    A group has a run for each label; with --models it is those of one model and mode.
    """
    columns = ["model", "mode", "tokens", "operation", *(f"{label} (µs)" for label in labels),
               *(f"{label} / {labels[0]}" for label in labels[1:])]
    rows = [[row[0], runs[-1].mode, *row[1:]] for runs in groups for row in _comparison_rows(runs)]
    if not groups[0][0].model:
        columns, rows = columns[2:], [row[2:] for row in rows]
    return Table("Medians compared", columns, rows, 4 if groups[0][0].model else 2)


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
        ("slots for each row", f"{slots / rows:.2f}" if rows else ""),
        ("imbalance of experts (max / mean)", f"{imbalance(trace.expert_slots):.2f}"),
        ("busiest expert", f"{busiest} on rank {trace.owner[busiest]}, "
                           f"{trace.expert_slots[busiest]} slots"),
        ("experts without a token", f"{int((trace.expert_slots == 0).sum())}"),
        ("imbalance of ranks (max / mean)", f"{imbalance(trace.rank_slots):.2f}"),
        ("imbalance of rows sent (max / mean)", f"{imbalance(sent):.2f}"),
        ("imbalance of rows received (max / mean)", f"{imbalance(received):.2f}"),
    ]
    return Table("The trace in numbers", ("figure", "value"), listed, 2)


def ranks_table(trace: Trace) -> Table:
    """Load and traffic of each rank."""
    own, own_rows = trace.slots.diagonal(), trace.rows.diagonal()
    sent, received = trace.rows.sum(axis=1), trace.rows.sum(axis=0)
    mean = trace.rank_slots.mean() or 1.0
    rows = [[str(r), str(int((trace.owner == r).sum())), str(trace.tokens[r]),
             str(trace.rank_slots[r]), _ratio(trace.rank_slots[r] / mean), str(own[r]),
             str(sent[r] - own_rows[r]), str(received[r] - own_rows[r]), str(own_rows[r])]
            for r in range(trace.num_ranks)]
    return Table("Load of ranks", ("rank", "experts", "tokens", "slots received", "over mean",
                           "slots of its own tokens", "rows sent", "rows received",
                           "rows that stay"), rows, 0)


def matrix_table(trace: Trace) -> Optional[Table]:
    """Rows from rank to rank, unless there are too many ranks for a page."""
    if trace.num_ranks > _MOST_COLUMNS:
        return None
    rows = [[str(source), *map(str, line)] for source, line in enumerate(trace.rows)]
    return Table("Rows from rank to rank", ("from \\ to", *map(str, range(trace.num_ranks))),
                 rows, 0)


def fan_out_table(trace: Trace) -> Table:
    total = int(trace.fan_out.sum()) or 1
    rows = [[str(n), str(count), f"{100 * count / total:.1f}"]
            for n, count in enumerate(trace.fan_out)]
    return Table("Ranks of a token", ("ranks", "tokens", "share (%)"), rows, 0)


def experts_table(trace: Trace) -> Table:
    """Experts, busiest first."""
    mean = trace.expert_slots.mean() or 1.0
    order = np.argsort(-trace.expert_slots, kind="stable")[:_MOST_EXPERTS]
    rows = [[str(e), str(trace.owner[e]), str(trace.expert_slots[e]),
             _ratio(trace.expert_slots[e] / mean)] for e in order]
    caption = "Experts, busiest first"
    if trace.num_experts > _MOST_EXPERTS:
        caption += f" (the first {_MOST_EXPERTS} of {trace.num_experts})"
    return Table(caption, ("expert", "rank", "slots", "over mean"), rows, 0)


def series_table(traces: Sequence[Trace]) -> Table:
    rows = [[trace.label, str(trace.tokens.sum()), str(trace.slots.sum()),
             f"{imbalance(trace.expert_slots):.2f}", f"{imbalance(trace.rank_slots):.2f}",
             str(int((trace.expert_slots == 0).sum()))] for trace in traces]
    return Table("Traces in order", ("trace", "tokens", "slots", "experts: max / mean",
                                     "ranks: max / mean", "experts without a token"), rows, 1)
