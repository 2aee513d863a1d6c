# SPDX-License-Identifier: Apache-2.0
"""A report in a browser that is offline: it loads alone, and what it shows can be read."""

import html
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


PICTURES = """[...page.querySelectorAll("figure svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    return [svg.closest("figure").id, box.width, box.height,
            svg.querySelectorAll("path").length]; })"""

# Pairs of labels of a picture that cover each other by more than 2 pixels, of which fonts of other
# machines may differ.
OVERLAPS = """[...page.querySelectorAll("figure svg")].flatMap(svg => {
    const all = [...svg.querySelectorAll("text")].filter(t => t.textContent.trim())
        .map(t => [t.textContent, t.getBoundingClientRect()]);
    return all.flatMap(([a, p], i) => all.slice(i + 1).filter(([b, q]) =>
        Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2 &&
        Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 2)
        .map(([b, q]) => svg.closest("figure").id + ": " + a + " | " + b)); })"""

# Labels outside their picture.
OUTSIDE = """[...page.querySelectorAll("figure svg")].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter(t => {
        const p = t.getBoundingClientRect();
        return p.left < box.left - 1 || p.right > box.right + 1 || p.top < box.top - 1 ||
               p.bottom > box.bottom + 1; })
        .map(t => svg.closest("figure").id + ": " + t.textContent); })"""

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
    questions = ",".join((PICTURES, OVERLAPS, OUTSIDE, PALE))
    (tmp_path / "frames.html").write_text(FRAMES % dict(page=page, questions=questions))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND",
               f"--user-data-dir={tmp_path}/profile", "--force-color-profile=srgb",
               f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
               "--virtual-time-budget=60000", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([PROGRAM, *options, (tmp_path / "frames.html").as_uri()], text=True,
                          capture_output=True, timeout=120)
    assert "CONSOLE" not in done.stderr, done.stderr
    answers = re.search("<title>answers (.*?)</title>", done.stdout, re.S)
    assert answers, done.stdout[:1000]
    (width, urls, pictures, *faults), (narrow, *_) = json.loads(html.unescape(answers[1]))
    assert [name for name, *_ in pictures] == [
        "compare-times", "compare-sweep", "models1-throughput", "models1-latency", "result1-times",
        "result1-sweep", "result2-times", "result2-sweep", "result3-throughput", "result3-latency",
        "result4-throughput", "result4-latency", "series1-loads", "trace1-loads", "trace2-loads"]
    for name, across, down, paths in pictures:
        assert across > 200 and down > 100 and paths > 5, name
    assert faults == [[], [], []] and urls == []
    # On a narrow screen pictures and tables scroll by themselves; the page does not.
    assert width <= 1200 and narrow <= 400
