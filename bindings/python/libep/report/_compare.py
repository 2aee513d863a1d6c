# SPDX-License-Identifier: Apache-2.0
"""Several results side by side: the others are compared to the first of the command line."""

from __future__ import annotations

from typing import Iterator, Optional, Sequence

from ._blocks import Block, Section, Shown, Text
from ._heatmaps import CHANGE, Cell, Panel, heatmap
from ._results import Result, Run, all_tokens, operations
from ._style import tokens_per_rank
from ._sweeps import sweep
from ._tables import comparison_table, differences_table
from ._times import times

BARS_CAPTION = ("Bars are medians, floors those of each result. “first” is the time over that "
                "of the first result: below 1× is faster.")
LINES_CAPTION = ("Solid lines are the last result, others are dashed. The last panel has the "
                 "medians over those of the first result: below 1× is faster.")
CHANGE_CAPTION = ("Each cell has the median of {new} over that of {old}, which gives the colour, "
                  "and the median of {new}. Purple is faster, orange is slower, by a factor of 2 "
                  "or more at full strength.")


def common_sizes(runs: Sequence[Run]) -> list[int]:
    """Numbers of tokens that all runs have, with an operation that all of them have."""
    return [tokens for tokens in all_tokens(runs)
            if all(run.size(tokens) for run in runs) and _common_names(runs, tokens)]


def _common_names(runs: Sequence[Run], tokens: int) -> set[str]:
    sizes = [run.size(tokens) for run in runs]
    return set.intersection(*({t.name for t in size.timings} for size in sizes if size))


def _comparable(results: Sequence[Result]) -> list[Result]:
    """The first result, and each that has a size in common with all that are taken before it."""
    taken = [results[0]]
    for result in results[1:]:
        if common_sizes([r.runs[0] for r in (*taken, result)]):
            taken.append(result)
    return taken


def _single_blocks(given: Sequence[Result]) -> Iterator[Block]:
    yield differences_table([r.label for r in given], given, [r.runs[0] for r in given])
    results = _comparable(given)
    labels, runs = [r.label for r in results], [r.runs[0] for r in results]
    for result in given:
        if result not in results:
            yield Text(f"{result.label} is not compared: it has no number of tokens in common "
                       f"with {', '.join(labels)}.", True)
    if len(results) == 1:
        return
    common = common_sizes(runs)
    sizes = [size for size in (run.size(common[-1]) for run in runs) if size]
    title = tokens_per_rank(common[-1])
    yield Shown(times("compare-times", f"Times of {', '.join(labels)} with {title}", labels,
                      sizes), f"{title}. {BARS_CAPTION}")
    if len(all_tokens(runs)) > 1:
        yield Shown(sweep("compare-sweep", f"Times of {', '.join(labels)} over the tokens",
                          labels, runs), LINES_CAPTION)
    yield comparison_table(labels, [runs])


def _cell(new: Run, old: Run, tokens: int, name: str) -> Optional[Cell]:
    sizes = new.size(tokens), old.size(tokens)
    timings = [size.timing(name) if size else None for size in sizes]
    if not timings[0] or not timings[1] or not timings[1].median_us:
        return None
    return Cell(timings[0].median_us / timings[1].median_us, timings[0].median_us / 1e6)


def _pairs(old: Result, new: Result) -> list[tuple[Run, Run]]:
    """The runs of the same model and mode."""
    known = {(run.model, run.mode): run for run in old.runs}
    found = [(known.get((run.model, run.mode)), run) for run in new.runs]
    return [(first, run) for first, run in found if first and common_sizes([first, run])]


def _models_blocks(name: str, old: Result, new: Result) -> Iterator[Block]:
    yield differences_table([old.label, new.label], [old, new], [old.runs[0], new.runs[0]])
    pairs = _pairs(old, new)
    if not pairs:
        yield Text(f"{old.label} and {new.label} have no model, mode and number of tokens in "
                   f"common, so their times are not compared.", True)
    for mode in dict.fromkeys(run.mode for _, run in pairs):
        mine = [pair for pair in pairs if pair[1].mode == mode]
        tokens = sorted({n for pair in mine for n in common_sizes(pair)})
        panels = [Panel(op, [[_cell(run, first, n, op) for n in tokens] for first, run in mine])
                  for op in operations(run for _, run in mine)]
        yield Shown(heatmap(f"{name}-{mode}", f"Times of {new.label} over those of {old.label}",
                            panels, [run.model for _, run in mine], [str(n) for n in tokens],
                            CHANGE),
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
