# SPDX-License-Identifier: Apache-2.0
"""Reports: the figures of tables and pictures against the files that they come from."""

import json
import math
import os
import subprocess

import pytest
from report_files import (
    OPERATIONS, Page, make_models, make_result, make_trace, timings, write_json, write_trace
)  # fmt: skip

pytest.importorskip("matplotlib", reason="reports need matplotlib")

from libep.report import write_report  # noqa: E402


@pytest.fixture
def report(tmp_path):
    """Make a page of files, and read it."""

    def make(*paths, **options):
        output = str(tmp_path / "page.html")
        write_report(paths, output, **options)
        return Page(output)

    return make


def text(value, digits=1):
    return "" if value is None else f"{value:.{digits}f}"


def floor(timing):
    return max((timing[key] for key in ("wire_us", "mem_us") if key in timing), default=None)


def check_times(rows, sizes):
    """The rows of a table of times."""
    expected = [(size, timing) for size in sizes for timing in timings(size)]
    assert len(rows) == len(expected)
    for row, (size, timing) in zip(rows, expected):
        bound, median = floor(timing), timing["median_us"]
        rates = [timing[key] / median / 1e3 if key in timing else None
                 for key in ("remote_bytes", "useful_bytes")]
        figures = {
            "tokens": str(size["tokens"]), "operation": timing["name"],
            "median (µs)": text(median), "p99 (µs)": text(timing["p99_us"]),
            "wire (µs)": text(timing.get("wire_us")), "memory (µs)": text(timing.get("mem_us")),
            "floor (µs)": text(bound), "time / floor": text(bound and median / bound, 2),
            "remote GB/s": text(rates[0], 2), "useful GB/s": text(rates[1], 2),
            **({"model": size["model"]} if "model" in size else {}),
        }
        assert {name: row[name] for name in figures} == figures


def medians(size):
    """The medians of a size, by operation."""
    return {timing["name"]: timing["median_us"] for timing in timings(size)}


# ---- results -----------------------------------------------------------------------------------


def test_result(report, tmp_path, seed):
    """One file: its facts, the table of times, bars as long as medians, sweeps as points."""
    result = make_result(seed, (16, 64, 128, 4096), routing="zipf:0.5", num_sms=24)
    folder = tmp_path / "pictures"
    page = report(write_json(tmp_path, "a.json", result), pictures=str(folder))
    check_times(page.table("result1", "Times"), result["sweep"])
    facts = """node-1|64 cores|256.0 GiB|2026-11-22T12:00:00Z|libep 0.2.0|cuda: 4 GPUs|zipf:0.5|
top-8 of 256 experts|are 10.25 times as fast as the same|are 13.25 times as fast as all|
pairs in a row are 7.25 times as fast""".replace("\n", "").split("|")
    facts += [f"{t['median_us'] / floor(t):.2f}× floor" for t in timings(result) if floor(t)]
    assert [fact for fact in facts if fact not in page.texts["result1"]] == []
    options = {row["option"]: row["value"] for row in page.table("result1", "Configuration")}
    assert options["num_sms"] == "24" and options["zero_copy"] == "no"
    sizes = page.table("result1", "Sizes")
    assert [row["tokens"] for row in sizes] == ["16", "64", "128", "4096"]
    assert sizes[0]["most slots"] == str(9 * 16)
    assert sizes[2]["library memory (bytes)"] == "4325360"
    check_bars(page, result)
    for name in OPERATIONS:
        check_points(page, result, name)
    assert sorted(os.listdir(folder)) == ["result1-sweep.svg", "result1-times.svg"]
    for name in os.listdir(folder):
        content = (folder / name).read_text(encoding="utf-8")
        assert content.startswith("<?xml") and "var(--" not in content


@pytest.mark.parametrize("change, sentence", [
    ({"wrong": 3}, "3 elements were wrong"),
    ({"wrong": None}, "were not checked"),
    ({"dropped_slots": 17}, "2048 tokens per rank (17 slots)"),
    ({}, None),
])
def test_warnings(report, tmp_path, seed, change, sentence):
    page = report(write_json(tmp_path, "a.json", {**make_result(seed, (2048,)), **change}))
    assert ("class=warning" in page.source) == (sentence is not None)
    assert sentence is None or sentence in page.texts["result1"]


def check_bars(page, result):
    """All begin at one common zero."""
    scales = []
    for name, median in medians(result).items():
        xs = [x for x, _ in page.path(f"result1-times-bar-{name.replace('_', '-')}-0")]
        scales.append((min(xs), (max(xs) - min(xs)) / median))
    assert max(zero for zero, _ in scales) - min(zero for zero, _ in scales) < 0.01
    assert max(scale for _, scale in scales) == pytest.approx(min(s for _, s in scales), rel=1e-3)


def check_logarithmic(places, values):
    """On a logarithmic axis ratios are distances."""
    for place, value in zip(places, values):
        along = math.log(value / values[0]) / math.log(values[-1] / values[0])
        expected = places[0] + along * (places[-1] - places[0])
        assert place == pytest.approx(expected, abs=0.01)


def check_points(page, result, name):
    points = page.path(f"result1-sweep-median-{name.replace('_', '-')}-0")
    assert len(points) == len(result["sweep"])
    xs, ys = zip(*points)
    check_logarithmic(xs, [size["tokens"] for size in result["sweep"]])
    check_logarithmic(ys, [medians(size)[name] for size in result["sweep"]])


def test_models(report, tmp_path, seed):
    """Two files of --models: the tables of the first, and the comparison of what both have."""
    result, new = make_models(seed), make_models(seed + 1, ("large", "other"))
    page = report(write_json(tmp_path, "old.json", result), write_json(tmp_path, "new.json", new))
    assert {"result1-throughput", "result1-latency"} <= set(page.ids)
    for mode in ("throughput", "latency"):
        sizes = [dict(size, model=run["model"]) for run in result["models"]
                 if run["config"]["mode"] == mode for size in run["sweep"]]
        check_times(page.table("result1", f"Times of models, {mode}"), sizes)
    runs = [[run for run in file["models"] if run["model"] == "large"] for file in (result, new)]
    expected = [
        ["large", run["config"]["mode"], *row]
        for run, other in zip(*runs) for pair in zip(run["sweep"], other["sweep"])
        for row in compared(*pair)
    ]  # fmt: skip
    assert [[*row.values()] for row in page.table("models1", "Medians compared")] == expected


# ---- comparisons -------------------------------------------------------------------------------


def compared(old, new):
    """The rows of a comparison of two results of a size."""
    before, after = medians(old), medians(new)
    return [
        [str(old["tokens"]), name, text(before[name]), text(after[name]),
         text(after[name] / before[name], 2)] for name in before if name in after
    ]  # fmt: skip


def test_comparison(report, tmp_path, seed):
    old = make_result(seed, (128, 512, 2048))
    new = make_result(seed + 1, (64, 512, 2048), zero_copy=True)
    del new["sweep"][2]["split_phases"][1]
    page = report(write_json(tmp_path, "old.json", old), write_json(tmp_path, "new.json", new))
    rows = [list(row.values()) for row in page.table("compare", "Medians compared")]
    assert rows == [row for i in (1, 2) for row in compared(old["sweep"][i], new["sweep"][i])]
    assert page.table("compare", "What differs") == [
        {"option": "zero_copy", "old.json": "no", "new.json": "yes"}]


def test_comparison_without_common_sizes(report, tmp_path, seed):
    files = [write_json(tmp_path, f"{name}.json", make_result(seed + i, sizes))
             for i, (name, sizes) in enumerate((("old", (128, 512)), ("other", (256,)),
                                                ("new", (128, 1024))))]
    page = report(*files)
    sentence = "other.json is not compared: it has no number of tokens in common with old.json, new"
    assert sentence in page.texts["compare"]
    rows = page.table("compare", "Medians compared")
    assert {row["tokens"] for row in rows} == {"128"} and "new.json / old.json" in rows[0]
    page = report(*files[:2])
    assert "other.json is not compared" in page.texts["compare"]
    assert "compare-times" not in page.ids


# Where one number differs among the results, they are points of a curve, in its order.
@pytest.mark.parametrize("key, values", [
    ("num_sms", (24, 8, 132, 64)), ("tokens", (512, 128, 8192)), ("hidden", (4096, 7168))])
def test_curve_over_an_option(report, tmp_path, seed, key, values):
    files, found = [], []
    for i, value in enumerate(values):
        result = make_result(seed + i, (value if key == "tokens" else 256,))
        result["config"] = {**result["config"], key: value, "row_bytes": 2 * value}
        found.append(medians(result)["combine"])
        files.append(write_json(tmp_path, f"{value}.json", result))
    page = report(*files)
    assert "compare-curve" in page.ids and "compare-times" not in page.ids
    order = sorted(range(len(values)), key=lambda i: values[i])
    rows = page.table("compare", "Medians over")
    assert [list(row.values())[0] for row in rows] == [str(values[i]) for i in order]
    assert [row["combine (µs)"] for row in rows] == [text(found[i]) for i in order]
    points = page.path("compare-curve-median-combine-0")
    assert len(points) == len(values) and points == sorted(points)
    check_logarithmic([x for x, _ in points], sorted(values))


# ---- traces ------------------------------------------------------------------------------------

OWNERS = 0, 0, 0, 1, 1, 2, 2  # of the experts: one more for the first ranks


def test_trace(report, tmp_path, seed):
    trace, ranks = make_trace(seed), range(3)
    page = report(write_trace(tmp_path, "t.trace", trace))
    experts, fan_out = [0] * 7, [0] * 4
    slots, rows = ([[0] * 3 for _ in ranks] for _ in "12")
    for source, tokens in enumerate(trace):
        for live in ([e for e in token if e >= 0] for token in tokens):
            owners = [OWNERS[e] for e in live]
            for expert, owner in zip(live, owners):
                experts[expert] += 1
                slots[source][owner] += 1
            for owner in set(owners):
                rows[source][owner] += 1
            fan_out[len(set(owners))] += 1
    table = {int(row["expert"]): row for row in page.table("trace1", "Experts")}
    for expert, count in enumerate(experts):
        found = [table[expert][name] for name in ("slots", "rank", "over mean")]
        mean = sum(experts) / 7
        assert found == [str(count), str(OWNERS[expert]), text(count / mean, 2)]
    matrix = page.table("trace1", "Rows from")
    assert [[row[str(r)] for r in ranks] for row in matrix] == [[*map(str, r)] for r in rows]
    fans = page.table("trace1", "Ranks of a token")
    assert [int(row["tokens"]) for row in fans] == fan_out
    received = [sum(slots[s][r] for s in ranks) for r in ranks]
    names = "slots received", "slots of its own tokens", "rows sent", "rows received"
    for r, row in enumerate(page.table("trace1", "Load of ranks")):
        sent, came = sum(rows[r]) - rows[r][r], sum(rows[s][r] for s in ranks) - rows[r][r]
        assert [int(row[name]) for name in names] == [received[r], slots[r][r], sent, came]
    numbers = {row["figure"]: row["value"] for row in page.table("trace1", "The trace")}
    assert numbers["imbalance of experts (max / mean)"] == text(7 * max(experts) / sum(experts), 2)
    assert numbers["imbalance of ranks (max / mean)"] == text(3 * max(received) / sum(received), 2)
    assert numbers["masked entries"].startswith(f"{14 * 4 - sum(experts)} ")


def test_series_of_traces(report, tmp_path, seed):
    traces = [make_trace(seed + i) for i in range(3)]
    page = report(*[write_trace(tmp_path, f"{i}.trace", trace) for i, trace in enumerate(traces)])
    for row, trace in zip(page.table("series1", "Traces in order"), traces):
        live = [e for tokens in trace for token in tokens for e in token if e >= 0]
        most = max(live.count(e) for e in range(7))
        assert row["slots"] == str(len(live))
        assert row["experts: max / mean"] == text(7 * most / len(live), 2)
        assert row["experts without a token"] == str(7 - len(set(live)))


def test_trace_without_experts(report, tmp_path):
    path = tmp_path / "t.trace"
    path.write_text("ep-routing 1\nexperts 4 top_k 2 ranks 2\ntokens 1\n-1 -1\ntokens 0\n")
    page = report(str(path))
    assert "No token of this trace has an expert" in page.texts["trace1"]
    assert page.table("trace1", "Ranks of a token")[0]["tokens"] == "1"


# ---- the page as a whole -----------------------------------------------------------------------


# Every reference is to a part of the page, and every part has a name of its own. The same files
# make the same page.
def test_page_refers_to_nothing_outside(report, tmp_path, seed):
    results = {"old": make_result(seed), "new": make_result(seed + 1, (1, 128, 512)),
               "zero": make_result(seed + 2, (0, 1, 128))}
    results.update({name: make_models(seed + i, ("small",), (128,)) for i, name in enumerate("mn")})
    paths = [write_json(tmp_path, f"{name}.json", result) for name, result in results.items()]
    paths += [write_trace(tmp_path, f"{i}.trace", make_trace(seed + i)) for i in range(2)]
    page = report(*paths)
    assert report(*paths).source == page.source
    assert len(page.ids) == len(set(page.ids))
    assert page.references
    for reference in page.references:
        inside = reference.startswith("#") and reference[1:] in page.ids
        assert inside or reference.startswith("data:image/png;base64,"), reference
    assert "@import" not in page.source and "<script" not in page.source
    urls = [part.split(")")[0] for part in page.source.split("url(")[1:]]
    assert urls and all(url[0] == "#" and url[1:] in page.ids for url in urls)


def test_texts_of_files_are_escaped(report, tmp_path, seed):
    result = make_result(seed, device="<b>&amp; $x^$", backend_reason="caf\u00c3\u00a9",
                         routing="\ud800\x00.")
    result["phases"][0]["name"] = '<i id="x">'
    del result["sweep"]
    page = report(write_json(tmp_path, "<u>.json", result))
    for tag in ("<b>", "<i ", "<u>"):
        assert tag not in page.source
    assert "<b>&amp; $x^$" in page.texts["result1"] and "café" in page.texts["result1"]
    assert "??." in page.texts["result1"]


# What ep_bench of this build writes is what the report reads.
@pytest.mark.skipif(not os.environ.get("EP_BENCH"), reason="EP_BENCH does not name ep_bench")
def test_true_results(report, tmp_path):
    small = ["--threads", "2", "--hidden", "64", "-n", "2", "-w", "0"]
    runs = {"a": ["-b", "0", "-e", "8"], "b": ["--mode", "latency", "--split", "--tokens", "4"],
            "m": ["--models", "-b", "8", "-e", "8"]}
    paths = []
    for name, options in runs.items():
        paths.append(str(tmp_path / f"{name}.json"))
        shape = small if name != "m" else [small[0], small[1], *small[4:]]
        more = ["--save-routing", str(tmp_path / "b.trace")] if name == "b" else []
        subprocess.run([os.environ["EP_BENCH"], *shape, *options, *more, "--json", paths[-1]],
                       check=True, stdout=subprocess.DEVNULL, timeout=300)
    page = report(*paths, str(tmp_path / "b.trace"))
    with open(paths[0]) as stream:
        result = json.load(stream)
    rows = page.table("result1", "Times")
    assert len(rows) == sum(len(size["phases"]) for size in result["sweep"])
    for row, phase in zip(rows, (p for size in result["sweep"] for p in size["phases"])):
        assert row["median (µs)"] == text(phase["median_us"])
        assert (row["time / floor"] == "") == ("floor_ratio" not in phase)
        if "floor_ratio" in phase:  # of rounded times, and rounded for the table
            ratio = float(row["time / floor"])
            assert ratio == pytest.approx(phase["floor_ratio"], rel=1e-4, abs=0.006)
    assert "class=warning" not in page.source
    slots = sum(int(row["slots received"]) for row in page.table("trace1", "Load of ranks"))
    assert slots == 2 * 4 * 8
