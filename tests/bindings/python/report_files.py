# SPDX-License-Identifier: Apache-2.0
"""Results and traces to make reports of, and a reader of the page that shares no code with it."""

import html
import json
import random
import re

OPERATIONS = ("prepare", "dispatch", "combine", "combine_backward", "dispatch_backward")


# ---- made-up results, in the format of ep_bench ------------------------------------------------


def make_phase(numbers, name, floors):
    phase = {"name": name, "median_us": round(numbers.uniform(50, 5000), 3),
             "remote_bytes": numbers.randrange(1, 10**9), "local_bytes": 1,
             "useful_bytes": numbers.randrange(1, 10**9), "wrong": 0}
    phase["p99_us"] = round(phase["median_us"] * numbers.uniform(1, 1.5), 3)
    for bound in floors:
        phase[bound] = round(phase["median_us"] * numbers.uniform(0.2, 1.2), 3)
    return phase


def make_size(numbers, tokens, names=OPERATIONS, floors=("wire_us", "mem_us")):
    """A size with all that a size can have."""
    halves = [f"{name}_{half}" for name in ("dispatch", "combine") for half in ("send", "wait")]
    others = {"baseline": ["baseline_prepare", "baseline_dispatch", "baseline_combine"],
              "collectives": ["baseline_all_gather", "baseline_reduce_scatter"],
              "pairs": ["pair", "baseline_pair"]}
    return {
        "tokens": tokens, "tokens_min": tokens, "wrong": 0, "slots_max": 9 * tokens,
        "slots_min": 7 * tokens, "receive_rows": 10 * tokens, "dropped_slots": 0,
        "library_bytes": 4325360, "promised_bytes": 4325360, "travelled_bytes": 2923848,
        "phases": [make_phase(numbers, name, floors if name != "prepare" else ())
                   for name in names],
        "split_phases": [make_phase(numbers, name, ()) for name in halves],
        "new_handle": {"median_us": 20.5, "destroy_us": 1.5},
        "step": {"median_us": 7000.5, "p99_us": 7100.25, "issue_us": 40.75},
        **{part: {"median_us": 9000.5, "speedup": 2.25 + len(part),
                  "phases": [make_phase(numbers, name, ()) for name in theirs]}
           for part, theirs in others.items()},
    }


def make_config(tokens, mode="throughput", **changes):
    return {"ranks": 4, "ranks_are": "mpi", "backend": "cuda", "backend_reason": "cuda: 4 GPUs",
            "device": "a GPU", "zero_copy": False, "tokens": tokens, "routing": "uniform",
            "hidden": 7168, "dtype": "bf16", "row_bytes": 14336, "top_k": 8, "experts": 256,
            "alignment": 128, "layout": "expert", "mode": mode, "iterations": 20, "warmup": 3,
            "check": True, "seed": 1, **changes}


MACHINE = {"hostname": "node-1", "cpu": "a CPU", "cores": 64, "memory_bytes": 2**38,
           "date": "2026-11-22T12:00:00Z"}


HEAD = {"format": "ep_bench 1", "version": "0.2.0"}


def make_result(seed, sizes=(128, 512, 2048), **changes):
    """A result of one run, with a sweep if there are several sizes."""
    numbers = random.Random(seed)
    made = [make_size(numbers, tokens) for tokens in sizes]
    result = {**HEAD, **made[-1], "config": make_config(sizes[-1], **changes), "machine": MACHINE}
    if len(sizes) > 1:
        result["sweep"] = made
    return result


def make_models(seed, models=("small", "large"), sizes=(128, 256)):
    """A result of --models: both modes of each."""
    numbers = random.Random(seed)
    runs = [{"model": model, "config": make_config(sizes[-1], mode),
             "sweep": [make_size(numbers, tokens, names) for tokens in sizes]}
            for model in models
            for mode, names in (("throughput", OPERATIONS), ("latency", OPERATIONS[1:3]))]
    return {**HEAD, "wrong": None, "machine": MACHINE, "models_file": "m.txt", "models": runs}


def write_json(folder, name, value):
    path = folder / name
    path.write_text(json.dumps(value))
    return str(path)


def timings(size):
    """All timed things of a size, as in the JSON."""
    parts = [size["phases"], size["split_phases"],
             *(size[part]["phases"] for part in ("baseline", "collectives", "pairs"))]
    return [*(timing for part in parts for timing in part), {"name": "step", **size["step"]}]


# ---- traces ------------------------------------------------------------------------------------


def make_trace(seed, ranks=3, experts=7, top_k=4, tokens=(5, 0, 9)):
    """[rank][token][k]: random experts, some of them -1."""
    numbers = random.Random(seed)
    return [[[numbers.choice([-1, *range(experts), 0, 0]) for _ in range(top_k)]
             for _ in range(tokens[rank])] for rank in range(ranks)]


def trace_text(trace, experts=7, top_k=4):
    lines = ["ep-routing 1", f"experts {experts} top_k {top_k} ranks {len(trace)}"]
    for rows in trace:
        lines += [f"tokens {len(rows)}", *(" ".join(map(str, row)) for row in rows)]
    return "\n".join(lines) + "\n"


def write_trace(folder, name, trace):
    (folder / name).write_text(trace_text(trace))
    return str(folder / name)


# ---- the page ----------------------------------------------------------------------------------


def plain(markup):
    """The text of a part of the page."""
    return html.unescape(re.sub("<[^>]*>", "", markup))


class Page:
    """ids: of all elements; references: of links and sources; texts: by section."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as stream:
            self.source = stream.read()
        found = re.findall(r'<section id="([^"]*)">(.*?)</section>', self.source, re.S)
        self._sections, self.texts = dict(found), {name: plain(body) for name, body in found}
        self.ids = re.findall(r'\sid="([^"]*)"', self.source)
        names = r'\s(?:xlink:)?(?:href|src|action|data)="([^"]*)"'
        self.references = re.findall(names, self.source)

    def table(self, section, caption):
        """The rows of the table whose caption begins so, each by the names of the columns."""
        tables = re.findall("<caption>(.*?)</caption>(.*?)</table>", self._sections[section], re.S)
        (rows,) = [rows for name, rows in tables if plain(name).startswith(caption)]
        head, *body = [
            [*map(plain, re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.S))]
            for row in re.findall("<tr>(.*?)</tr>", rows, re.S)
        ]
        return [dict(zip(head, row)) for row in body]

    def path(self, identifier):
        """The points of the first path of an element of a picture."""
        start = self.source.index(f'id="{identifier}"')
        line = re.search(r' d="([^"]*)"', self.source[start:]).group(1)
        return [(float(x), float(y)) for x, y in re.findall(r"[ML] (\S+) (\S+)", line)]
