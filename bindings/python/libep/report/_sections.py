# SPDX-License-Identifier: Apache-2.0
"""What a report says: sections of sentences, pictures and tables for the files that were read."""

from __future__ import annotations

from typing import Iterator, Sequence

from ._blocks import Block, Facts, Section, Shown, Text
from ._compare import comparison_sections
from ._heatmaps import FLOOR, Cell, Panel, heatmap
from ._json import printable
from ._loads import loads, series
from ._results import BASELINE, Result, Run, Size, all_tokens, operations
from ._style import tokens_per_rank
from ._sweeps import sweep
from ._tables import (
    config_table,
    experts_table,
    fan_out_table,
    matrix_table,
    models_table,
    ranks_table,
    series_table,
    sizes_table,
    times_table,
    trace_table,
)
from ._times import times
from ._traces import Trace

# ---- one result -------------------------------------------------------------------------------


def _gib(num_bytes: object) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if isinstance(num_bytes, (int, float)) else "?"


def _facts(result: Result) -> Facts:
    machine, config = result.machine, result.runs[0].config
    backend, reason = str(config.get("backend", "?")), str(config.get("backend_reason", ""))
    pairs = [
        ("file", printable(result.path)),
        ("measured", f"{machine.get('date', '?')}, libep {result.version}"),
        ("machine", f"{machine.get('hostname', '?')}: {machine.get('cpu', '?')}, "
                    f"{machine.get('cores', '?')} cores, {_gib(machine.get('memory_bytes'))}"),
        ("ranks", f"{config.get('ranks', '?')} ({config.get('ranks_are', '?')})"),
        ("backend", reason if reason.startswith(backend) else f"{backend}: {reason}"),
    ]
    if "device" in config:
        pairs.append(("GPU", str(config["device"])))
    if len(result.runs) == 1:
        pairs += [("shape", _shape(result.runs[0])), ("routing", str(config.get("routing", "?")))]
    pairs.append(("timed", f"{config.get('iterations', '?')} iterations after "
                           f"{config.get('warmup', '?')} of warm-up, mode "
                           f"{', '.join(dict.fromkeys(run.mode for run in result.runs))}"))
    pairs.append(("wrong elements", "not checked" if result.wrong is None else str(result.wrong)))
    return Facts(pairs)


def _shape(run: Run) -> str:
    config = run.config
    return (f"hidden {config.get('hidden', '?')} {config.get('dtype', '?')}, top-"
            f"{config.get('top_k', '?')} of {config.get('experts', '?')} experts, layout "
            f"{config.get('layout', '?')}, alignment {config.get('alignment', '?')}")


def _warnings(result: Result) -> Iterator[Text]:
    if result.wrong:
        yield Text(f"{result.label}: {result.wrong} elements were wrong. Times of wrong results "
                   f"mean nothing.", True)
    if result.wrong is None:
        yield Text(f"{result.label}: results were not checked (-c 0).", True)
    dropped = [(run, size) for run in result.runs for size in run.sizes
               if size.facts.get("dropped_slots")]
    if dropped:
        run, size = dropped[0]
        where = f"{run.model} {run.mode}, " if run.model else ""
        yield Text(f"{result.label}: the capacity was too small and dropped slots in "
                   f"{len(dropped)} of the sizes, first with {where}{tokens_per_rank(size.tokens)} "
                   f"({size.facts['dropped_slots']:.0f} slots).", True)


TIMES_CAPTION = ("Bars are medians; the line goes on to the 99th percentile (below 100 iterations "
                 "the slowest one), an arrow means that it ends outside the picture. The number "
                 "with × is the median over the floor of the same run.")
SWEEP_CAPTION = ("Both axes are logarithmic. The shade goes up to the 99th percentile, the dotted "
                 "line is the floor of the same run. The last panel has the operations' medians "
                 "over their floors: 1× is the floor. It leaves out prepare, whose floor only "
                 "copies indices.")
MODELS_CAPTION = ("Each cell has the median over the floor of the same run, which gives the "
                  "colour, and the median. Yellow is the floor or better, dark blue is 10 times "
                  "the floor or more. Cells without a colour have no floor, or belong to prepare, "
                  "whose floor only copies indices.")


def _speedups(size: Size) -> Iterator[Text]:
    if any(t.kind == BASELINE for t in size.timings) and size.facts.get("speedup"):
        yield Text(f"With {tokens_per_rank(size.tokens)} dispatch plus combine are "
                   f"{size.facts['speedup']:.2f} times as fast as the same work without libep.")


def _single(name: str, result: Result, run: Run) -> Iterator[Block]:
    last = run.sizes[-1]
    title = tokens_per_rank(last.tokens)
    yield Shown(times(f"{name}-times", f"Times of the operations with {title}", [""], [last]),
                f"{title}. {TIMES_CAPTION}")
    yield from _speedups(last)
    if len(run.sizes) > 1:
        yield Shown(sweep(f"{name}-sweep", "Times of the operations over the tokens per rank",
                          [result.label], [run]), SWEEP_CAPTION)
    yield times_table(run)
    yield sizes_table(run)
    yield config_table([run])


def _panels(runs: Sequence[Run]) -> list[Panel]:
    panels = []
    for name in operations(runs):
        cells = []
        for run in runs:
            found = [run.size(tokens) for tokens in all_tokens(runs)]
            timings = [size.timing(name) if size else None for size in found]
            cells.append([Cell(t.telling_ratio, t.median_us / 1e6) if t else None for t in timings])
        panels.append(Panel(name, cells))
    return panels


def _models(name: str, result: Result) -> Iterator[Block]:
    for mode in dict.fromkeys(run.mode for run in result.runs):
        runs = [run for run in result.runs if run.mode == mode]
        yield Shown(heatmap(f"{name}-{mode}", f"Times of models in {mode} mode over their floors",
                            _panels(runs), [run.model for run in runs],
                            [str(n) for n in all_tokens(runs)], FLOOR),
                    f"{mode.capitalize()} mode. {MODELS_CAPTION}")
        yield models_table(runs)
        yield config_table(runs)


def _result_section(number: int, result: Result) -> Section:
    name = f"result{number}"
    blocks: list[Block] = [_facts(result), *_warnings(result)]
    if result.runs[0].model:
        blocks += _models(name, result)
    else:
        blocks += _single(name, result, result.runs[0])
    return Section(name, f"Result {result.label}", blocks)


# ---- traces -----------------------------------------------------------------------------------

TRACE_CAPTION = ("A slot is an entry (token, k) that has an expert; shades of experts change from "
                 "rank to rank. A row is a (token, rank) pair: dispatch moves it once, whatever "
                 "number of the rank's experts the token has. Dotted lines are means.")
SERIES_CAPTION = ("Traces from left to right in the order of the command line, such as steps or "
                  "layers. Colours are the load of a rank or an expert over the mean of its trace.")


def _trace_section(number: int, trace: Trace) -> Section:
    name = f"trace{number}"
    if not trace.slots.sum():
        blocks: list[Block] = [Text("No token of this trace has an expert: there is no load to "
                                    "draw.", True)]
    else:
        blocks = [Shown(loads(f"{name}-loads", f"Loads of the trace {trace.label}", trace),
                        TRACE_CAPTION)]
    tables = (trace_table(trace), ranks_table(trace), matrix_table(trace), fan_out_table(trace),
              experts_table(trace))
    return Section(name, f"Routing {trace.label}", blocks + [table for table in tables if table])


def _series_sections(traces: Sequence[Trace]) -> Iterator[Section]:
    for i, form in enumerate(dict.fromkeys(trace.shape for trace in traces), 1):
        alike = [trace for trace in traces if trace.shape == form]
        if len(alike) > 1:
            experts, top_k, ranks = form
            picture = series(f"series{i}-loads", "Imbalance and loads from trace to trace", alike)
            yield Section(f"series{i}", f"Routing over {len(alike)} traces: top-{top_k} of "
                          f"{experts} experts, {ranks} ranks",
                          [Shown(picture, SERIES_CAPTION), series_table(alike)])


def sections(results: Sequence[Result], traces: Sequence[Trace]) -> list[Section]:
    """The whole report: comparisons first, then each file by itself."""
    found = list(comparison_sections(results))
    found += [_result_section(i, result) for i, result in enumerate(results, 1)]
    found += list(_series_sections(traces))
    found += [_trace_section(i, trace) for i, trace in enumerate(traces, 1)]
    return found
