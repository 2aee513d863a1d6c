# SPDX-License-Identifier: Apache-2.0
"""What a report says: sections of sentences, pictures and tables for the files that were read."""

from __future__ import annotations

from typing import Callable, Iterator, NamedTuple, Optional, Sequence

from matplotlib.colors import Normalize

from ._bars import bars
from ._curves import Series, curves
from ._heatmaps import CHANGE, FLOOR, Cell, Panel, heatmap
from ._input import printable
from ._loads import loads, series
from ._page import Block, Facts, Section, Shown, Text
from ._results import BASELINES, OPERATION, Result, Run, Size, names, sizes_of
from ._style import Picture, tokens_per_rank
from ._tables import (
    comparison_table, config_table, curve_table, differences_table, models_table, series_table,
    sizes_table, times_table, trace_tables)
from ._traces import Trace

TOKENS = "tokens per rank"


def _over_tokens(label: str, run: Run) -> Series:
    return Series(label, [(size.tokens, size) for size in run.sizes])


def _all_tokens(runs: Sequence[Run]) -> list[int]:
    return sorted({size.tokens for size in sizes_of(runs)})


CellOf = Callable[[Run, int, str], Optional[Cell]]


def _heatmap(name: str, alt: str, runs: Sequence[Run], tokens: Sequence[int], cell: CellOf,
             colours: tuple[str, Normalize]) -> Picture:
    """A panel for each operation: models by tokens."""
    panels = [Panel(op, [[cell(run, n, op) for n in tokens] for run in runs])
              for op in names(sizes_of(runs), OPERATION)]
    return heatmap(name, alt, panels, [run.model for run in runs], [str(n) for n in tokens],
                   colours)


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
    pairs.append(("wrong elements", "not checked" if result.wrong is None else f"{result.wrong:.0f}"))
    return Facts(pairs)


def _shape(run: Run) -> str:
    config = run.config
    return (f"hidden {config.get('hidden', '?')} {config.get('dtype', '?')}, top-"
            f"{config.get('top_k', '?')} of {config.get('experts', '?')} experts, layout "
            f"{config.get('layout', '?')}, alignment {config.get('alignment', '?')}")


def _warnings(result: Result) -> Iterator[Text]:
    if result.wrong:
        yield Text(f"{result.label}: {result.wrong:.0f} elements were wrong. Times of wrong results "
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
    said = [text.format(f"{size.facts[part]:.2f}") for part, text in BASELINES.items()
            if size.facts.get(part)]
    if said:
        yield Text(f"With {tokens_per_rank(size.tokens)} {'; '.join(said)}.")


def _single(name: str, result: Result, run: Run) -> Iterator[Block]:
    last = run.sizes[-1]
    title = tokens_per_rank(last.tokens)
    yield Shown(bars(f"{name}-times", f"Times of the operations with {title}", [""], [last]),
                f"{title}. {TIMES_CAPTION}")
    yield from _speedups(last)
    if len(run.sizes) > 1:
        yield Shown(curves(f"{name}-sweep", "Times of the operations over the tokens per rank",
                           TOKENS, [_over_tokens(result.label, run)]), SWEEP_CAPTION)
    yield times_table(run)
    yield sizes_table(run)
    yield config_table([run])


def _floor_cell(run: Run, tokens: int, name: str) -> Optional[Cell]:
    timing = run.timing(tokens, name)
    return Cell(timing.telling_ratio, timing.median_us / 1e6) if timing else None


def _models(name: str, result: Result) -> Iterator[Block]:
    for mode in dict.fromkeys(run.mode for run in result.runs):
        runs = [run for run in result.runs if run.mode == mode]
        yield Shown(_heatmap(f"{name}-{mode}", f"Times of models in {mode} mode over their floors",
                             runs, _all_tokens(runs), _floor_cell, FLOOR),
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


# ---- several results: the others are compared to the first of the command line -----------------

BARS_CAPTION = ("Bars are medians, floors those of each result. “first” is the time over that "
                "of the first result: below 1× is faster.")
LINES_CAPTION = ("Solid lines are the last result, others are dashed. The last panel has the "
                 "medians over those of the first result: below 1× is faster.")
CURVE_CAPTION = ("Results are points of one line, in the order of the number that alone differs "
                 "among them. The shade goes up to the 99th percentile, the dotted line is the "
                 "floor.")
CHANGE_CAPTION = ("Each cell has the median of {new} over that of {old}, which gives the colour, "
                  "and the median of {new}. Purple is faster, orange is slower, by a factor of 2 "
                  "or more at full strength.")

# Numbers that are no axis: what follows from others, and how it was measured.
_NO_AXIS = ("tokens", "row_bytes", "seed", "iterations", "warmup")


def _common_sizes(runs: Sequence[Run]) -> list[int]:
    """Numbers of tokens that all runs have, with an operation that all of them have."""
    return [tokens for tokens in _all_tokens(runs)
            if set.intersection(*({t.name for t in size.timings} if size else set()
                                  for size in (run.size(tokens) for run in runs)))]


class _Axis(NamedTuple):
    """The one number that differs among results, and the results in its order."""

    title: str
    results: Sequence[Result]
    points: Sequence[tuple[float, Size]]


def _find_axis(results: Sequence[Result]) -> Optional[_Axis]:
    runs = [result.runs[0] for result in results]
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.config)
            if key not in _NO_AXIS and len({repr(run.config.get(key)) for run in runs}) > 1]
    common = _common_sizes(runs)
    if not keys and not common and all(len(run.sizes) == 1 for run in runs):
        title, key, tokens = TOKENS, "tokens", None
    elif len(keys) == 1 and common:
        title, key, tokens = f"{keys[0]}, {tokens_per_rank(common[-1])}", keys[0], common[-1]
    else:
        return None
    values = [run.config.get(key) for run in runs]
    if any(type(value) not in (int, float) for value in values) or len({*values}) < len(values):
        return None
    sizes = [run.size(run.sizes[0].tokens if tokens is None else tokens) for run in runs]
    order = sorted(range(len(runs)), key=lambda i: float(values[i] or 0))
    return _Axis(title, [results[i] for i in order],
                 [(float(values[i] or 0), size) for i in order for size in (sizes[i],) if size])


def _comparable(results: Sequence[Result]) -> list[Result]:
    """The first result, and each that has a size in common with all that are taken before it."""
    taken = [results[0]]
    for result in results[1:]:
        if _common_sizes([r.runs[0] for r in (*taken, result)]):
            taken.append(result)
    return taken


def _single_blocks(given: Sequence[Result]) -> Iterator[Block]:
    axis = _find_axis(given)
    if axis:
        given = axis.results
    yield differences_table(given, [r.runs[0] for r in given])
    if axis:
        yield Shown(curves("compare-curve", f"Times over {axis.title}", axis.title,
                           [Series("", axis.points)]), f"{axis.title}. {CURVE_CAPTION}")
        yield curve_table(axis.title, axis.points)
    results = _comparable(given)
    labels, runs = [r.label for r in results], [r.runs[0] for r in results]
    for result in given:
        if result not in results and not axis:
            yield Text(f"{result.label} is not compared: it has no number of tokens in common "
                       f"with {', '.join(labels)}.", True)
    if len(results) == 1:
        return
    common = _common_sizes(runs)
    title = tokens_per_rank(common[-1])
    if not axis:
        sizes = [size for size in (run.size(common[-1]) for run in runs) if size]
        yield Shown(bars("compare-times", f"Times of {', '.join(labels)} with {title}", labels,
                         sizes), f"{title}. {BARS_CAPTION}")
    if len(_all_tokens(runs)) > 1:
        yield Shown(curves("compare-sweep", f"Times of {', '.join(labels)} over the tokens", TOKENS,
                           list(map(_over_tokens, labels, runs))), LINES_CAPTION)
    yield comparison_table(labels, [runs])


def _models_blocks(name: str, old: Result, new: Result) -> Iterator[Block]:
    known = {(run.model, run.mode): run for run in old.runs}
    pairs = [(known[key], run) for run in new.runs for key in ((run.model, run.mode),)
             if key in known and _common_sizes([known[key], run])]

    def change(run: Run, tokens: int, op: str) -> Optional[Cell]:
        first = known[run.model, run.mode].timing(tokens, op)
        timing = run.timing(tokens, op)
        if not timing or not first or not first.median_us:
            return None
        return Cell(timing.median_us / first.median_us, timing.median_us / 1e6)

    yield differences_table([old, new], [old.runs[0], new.runs[0]])
    if not pairs:
        yield Text(f"{old.label} and {new.label} have no model, mode and number of tokens in "
                   f"common, so their times are not compared.", True)
    for mode in dict.fromkeys(run.mode for _, run in pairs):
        mine = [pair for pair in pairs if pair[1].mode == mode]
        tokens = sorted({n for pair in mine for n in _common_sizes(pair)})
        yield Shown(_heatmap(f"{name}-{mode}", f"Times of {new.label} over those of {old.label}",
                             [run for _, run in mine], tokens, change, CHANGE),
                    f"{mode.capitalize()} mode. "
                    + CHANGE_CAPTION.format(new=new.label, old=old.label))
    if pairs:
        yield comparison_table([old.label, new.label], pairs)


def comparison_sections(results: Sequence[Result]) -> Iterator[Section]:
    """Single runs are compared all together, results of --models each with the first."""
    single = [result for result in results if not result.runs[0].model]
    models = [result for result in results if result.runs[0].model]
    if len(single) > 1:
        yield Section("compare", "Comparison: " + ", ".join(r.label for r in single),
                      list(_single_blocks(single)))
    for i, new in enumerate(models[1:], 1):
        yield Section(f"models{i}", f"Comparison: {models[0].label}, {new.label}",
                      list(_models_blocks(f"models{i}", models[0], new)))


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
    return Section(name, f"Routing {trace.label}", [*blocks, *trace_tables(trace)])


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
