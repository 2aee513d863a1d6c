# SPDX-License-Identifier: Apache-2.0
"""A report in a browser that is offline: it loads alone, and what it shows can be read."""

import html
import itertools
import json
import re
import shutil
import subprocess

import pytest
from report_files import make_models, make_result, make_trace, trace_text, write_json

pytest.importorskip("matplotlib", reason="reports need matplotlib")

from libep.report import write_report  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PROGRAM = next((found for found in map(shutil.which, NAMES) if found), None)
if not PROGRAM:
    pytest.skip("no Chromium is installed", allow_module_level=True)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The address of a report with every kind of picture."""
    folder = tmp_path_factory.mktemp("report")
    for i in (1, 2):
        (folder / f"{i}.trace").write_text(trace_text(make_trace(i)))
    result = make_result(3)
    for size in result["sweep"]:  # one operation is far from the floor, one has an outlier
        size["phases"][1].update(mem_us=size["phases"][1]["median_us"] / 20, wire_us=1.0)
        size["phases"][2]["p99_us"] *= 50
    files = [write_json(folder, "before-the-change-of-all-kernels-of-a-branch.json", result),
             write_json(folder, "after-a-very-long-change-of-names.json", make_result(4)),
             write_json(folder, "models.json", make_models(5)),
             write_json(folder, "models-again.json", make_models(6)),
             str(folder / "1.trace"), str(folder / "2.trace")]
    write_report(files, str(folder / "page.html"))
    return (folder / "page.html").as_uri()


# Each picture's name, place and number of lines, and the places of its labels.
PICTURES = """[...page.querySelectorAll("figure svg")].map(svg => {
    const place = e => { const b = e.getBoundingClientRect();
                         return [b.left, b.top, b.right, b.bottom]; };
    const labels = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim());
    return [svg.closest("figure").id, place(svg), svg.querySelectorAll("path").length,
            labels.map(t => [t.textContent, place(t)])]; })"""

# Texts whose contrast with the page's background is below 4.5; those of cells have their own.
PALE = """(() => {
    const light = colour => { const c = colour.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
    const paper = light(view.getComputedStyle(page.body).backgroundColor);
    const contrast = c => (Math.max(c, paper) + 0.05) / (Math.min(c, paper) + 0.05);
    const texts = page.querySelectorAll("svg text, h2, p, td, th, dt, dd, figcaption");
    return [...texts].filter(t => {
        const style = view.getComputedStyle(t), svg = t.closest("svg");
        const colour = svg ? style.fill : style.color;
        return !["rgb(0, 0, 0)", "rgb(255, 255, 255)"].includes(colour) &&
               contrast(light(colour)) < 4.5; }).map(t => t.textContent); })()"""


# Loads the report in a frame of each width, and writes what is asked of it into its own title.
FRAMES = """<!doctype html><title></title><body><script>
async function ask(width) {
    const frame = document.createElement("iframe");
    frame.style = `width: ${width}px; height: 900px; border: 0`;
    frame.src = %(page)r;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    const view = frame.contentWindow, page = view.document;
    return [page.documentElement.scrollWidth, view.performance.getEntriesByType("resource")
        .map(e => e.name).filter(name => !name.startsWith("data:")), %(questions)s];
}
Promise.all([ask(1200), ask(400)]).then(
    answers => { document.title = "answers " + JSON.stringify(answers); },
    error => { document.title = "failed " + error; });
</script>"""


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_page(tmp_path, page, scheme):
    """With colours for a dark and for a light screen, and without a network."""
    questions = ",".join((PICTURES, PALE))
    (tmp_path / "frames.html").write_text(FRAMES % dict(page=page, questions=questions))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND",
               f"--user-data-dir={tmp_path}/profile", "--force-color-profile=srgb",
               f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
               "--virtual-time-budget=60000", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([PROGRAM, *options, (tmp_path / "frames.html").as_uri()], text=True,
                          capture_output=True, timeout=300)
    assert "CONSOLE" not in done.stderr, done.stderr
    answers = re.search("<title>answers (.*?)</title>", done.stdout, re.S)
    assert answers, done.stdout[:1000]
    (width, urls, pictures, pale), (narrow, *_) = json.loads(html.unescape(answers[1]))
    assert [name for name, *_ in pictures] == [
        "compare-times", "compare-sweep", "models1-throughput", "models1-latency", "result1-times",
        "result1-sweep", "result2-times", "result2-sweep", "result3-throughput", "result3-latency",
        "result4-throughput", "result4-latency", "series1-loads", "trace1-loads", "trace2-loads"]
    for name, (left, top, right, bottom), paths, labels in pictures:
        assert right - left > 200 and bottom - top > 100 and paths > 5, name
        for text, (x, y, end, below) in labels:
            inside = x > left - 1 and end < right + 1 and y > top - 1 and below < bottom + 1
            assert inside, (name, text)
        # Labels may cover each other by 2 pixels, of which fonts of other machines may differ.
        for (one, p), (two, q) in itertools.combinations(labels, 2):
            covered = [min(p[i + 2], q[i + 2]) - max(p[i], q[i]) for i in (0, 1)]
            assert min(covered) <= 2, (name, one, two)
    assert pale == [] and urls == []
    # On a narrow screen pictures and tables scroll by themselves; the page does not.
    assert width <= 1200 and narrow <= 400
