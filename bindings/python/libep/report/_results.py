# SPDX-License-Identifier: Apache-2.0
"""Results of ep_bench (--json), read and checked. docs/benchmarking.md describes the format."""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Optional

from .._version import __version__
from ._input import Node

OPERATION, SPLIT, BASELINE, STEP = "operation", "split phase", "without libep", "step"

# Comparisons that a size may have, and what a page says of them.
BASELINES = {"baseline": "dispatch plus combine are {} times as fast as the same work without libep",
             "collectives": "dispatch plus combine are {} times as fast as all-gather plus reduce-scatter",
             "pairs": "pairs in a row are {} times as fast as pairs of those collectives"}


class Timing(NamedTuple):
    """The time of one call, or of a whole step, in one size of a run."""

    name: str
    kind: str  # OPERATION, SPLIT, BASELINE or STEP
    median_us: float
    p99_us: float
    remote_bytes: Optional[float]  # per rank
    useful_bytes: Optional[float]
    wire_us: Optional[float]
    mem_us: Optional[float]
    issue_us: Optional[float]
    wrong: Optional[float]

    @property
    def floor_us(self) -> Optional[float]:
        """The larger bound, or None where none was measured."""
        return max(self.wire_us or 0.0, self.mem_us or 0.0) or None

    @property
    def bound(self) -> str:
        """Which bound is the floor: wire, memory, or none."""
        if self.floor_us is None:
            return ""
        return "wire" if self.floor_us == self.wire_us else "memory"

    @property
    def floor_ratio(self) -> Optional[float]:
        return self.median_us / self.floor_us if self.floor_us else None

    @property
    def telling_ratio(self) -> Optional[float]:
        """floor_ratio but for prepare, whose floor on the host only copies indices: it takes
        hundreds of times as long, and a scale that shows this shows nothing else."""
        return None if self.name == "prepare" else self.floor_ratio


class Size(NamedTuple):
    """What was measured with one number of tokens per rank."""

    tokens: int
    timings: tuple[Timing, ...]
    facts: dict[str, Optional[float]]  # numbers of the size as a whole, by their key in the JSON

    def timing(self, name: str) -> Optional[Timing]:
        return next((t for t in self.timings if t.name == name), None)


class Run(NamedTuple):
    """One configuration and its sizes, in ascending order of tokens."""

    model: str  # "" but for --models
    config: dict[str, Any]
    sizes: tuple[Size, ...]

    @property
    def mode(self) -> str:
        return str(self.config.get("mode", ""))

    def size(self, tokens: int) -> Optional[Size]:
        return next((s for s in self.sizes if s.tokens == tokens), None)

    def timing(self, tokens: int, name: str) -> Optional[Timing]:
        size = self.size(tokens)
        return size.timing(name) if size else None


class Result(NamedTuple):
    """One file."""

    path: str
    label: str  # how the page calls the file
    version: str
    wrong: Optional[float]  # None: not checked
    machine: dict[str, Any]
    runs: tuple[Run, ...]  # one, or with --models one for each model and mode


def names(sizes: Iterable[Size], *kinds: str) -> list[str]:
    """The names of timings of some kinds, each once."""
    return list(dict.fromkeys(t.name for size in sizes for t in size.timings if t.kind in kinds))


def sizes_of(runs: Iterable[Run]) -> list[Size]:
    return [size for run in runs for size in run.sizes]


# ---- reading ----------------------------------------------------------------------------------

FACTS = ("tokens_min", "slots_max", "slots_min", "receive_rows", "dropped_slots", "library_bytes",
         "promised_bytes", "travelled_bytes", "empty_node_us", "flag_us")


def _timing(node: Node, kind: str, name: str = "") -> Timing:
    return Timing(name or node["name"].text(), kind, node["median_us"].number(),
                  node["p99_us"].number(), *map(node.optional, Timing._fields[4:]))


def _compared(node: Node) -> Timing:
    """A baseline's time, or that of libep's pairs beside it."""
    return _timing(node, STEP if node["name"].text() == "pair" else BASELINE)


def _timings(node: Node) -> tuple[Timing, ...]:
    found = [_timing(phase, OPERATION) for phase in node["phases"].items()]
    if "split_phases" in node:
        found += [_timing(phase, SPLIT) for phase in node["split_phases"].items()]
    for part in BASELINES:
        if part in node:
            found += map(_compared, node[part]["phases"].items())
    if "step" in node:
        found.append(_timing(node["step"], STEP, "step"))
    return tuple(found)


def _size(node: Node) -> Size:
    facts = {key: node.optional(key) for key in FACTS}
    if "new_handle" in node:
        facts["new_handle_us"] = node["new_handle"].optional("median_us")
    for part in BASELINES:
        if part in node:
            facts[part] = node[part].optional("speedup")
    return Size(node["tokens"].count(), _timings(node), facts)


def _run(node: Node, model: str = "") -> Run:
    sizes = node["sweep"].items() if "sweep" in node else [node]
    read = sorted((_size(size) for size in sizes), key=lambda size: size.tokens)
    return Run(model, node["config"].scalars(), tuple(read))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


FORMAT = "ep_bench 1"


def read_result(path: str, label: str, node: Node) -> Result:
    """The result in a JSON file. ReportError unless ep_bench wrote it."""
    found = node.value if isinstance(node.value, dict) else {}
    if "version" not in found or not found.keys() & {"format", "phases", "models"}:
        raise node.refuse("a result of ep_bench (an object with version and phases or models)")
    version = node["version"].text()
    if _numbers(version) > _numbers(__version__):
        node.hint = (f"; libep {version} wrote the file, and this is {__version__}, which is "
                     f"older")
    if "format" in node and node["format"].text() != FORMAT:
        raise node["format"].refuse(f'"{FORMAT}"')
    if "models" in node:
        runs = tuple(_run(m, m["model"].text() or "?") for m in node["models"].items())
    else:
        runs = (_run(node),)
    return Result(path, label, version, node.optional("wrong"), node["machine"].scalars(), runs)
