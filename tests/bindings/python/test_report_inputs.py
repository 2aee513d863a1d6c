# SPDX-License-Identifier: Apache-2.0
"""Reports: refused inputs. Each has a sentence and an exit status, and leaves no file behind."""

import json
import os
import subprocess
import sys

import pytest
from report_files import make_result, make_trace, trace_text, write_json

pytest.importorskip("matplotlib", reason="reports need matplotlib")

from libep.report._command import main  # noqa: E402


@pytest.fixture
def refuse(tmp_path, capsys):
    """Run the command on a file of this content; its output must stay as it was."""

    def run(content, *sentences, status=2):
        path = tmp_path / "input"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        output = tmp_path / "out" / "page.html"
        output.parent.mkdir(exist_ok=True)
        output.write_text("before")
        assert main([str(path), "-o", str(output)]) == status
        said = capsys.readouterr().err
        assert said.startswith("libep.report: ") and said.count("\n") == 1, said
        for sentence in (str(path), *sentences):
            assert sentence in said
        assert output.read_text() == "before" and os.listdir(output.parent) == ["page.html"]

    return run


def changed(way, value):
    """A result with another value at a place such as sweep.0.phases."""
    result = make_result(1)
    *parents, last = [int(part) if part.isdigit() else part for part in way.split(".")]
    node = result
    for part in parents:
        node = node[part]
    if value is KeyError:
        del node[last]
    else:
        node[last] = value
    return json.dumps(result)


RESULTS = [
    (b"", "got an empty file"),
    (b" \n", "got an empty file"),
    (b"\x7fELF\xff\xfe", "got bytes that are no text"),
    ("hello\nworld", ":1: expected a JSON result of ep_bench or a routing trace"),
    (json.dumps(make_result(1))[:500], "expected a JSON result of ep_bench or a routing trace"),
    ("[" * 100000, "got JSON that is too large to read"),
    ("{}", "expected a result of ep_bench (an object with version and phases or models), got an "
           "empty object"),
    ("[1]", "got a list"),
    ('{"name": "x", "private": true}', "got an object with name, private"),
    (changed("format", "ep_moe 1"), 'expected format to be "ep_bench 1", got "ep_moe 1"'),
    (changed("format", "ep_bench 2"), 'expected format to be "ep_bench 1", got "ep_bench 2"'),
    (changed("format", 1), "expected format to be a text, got 1"),
    (changed("config", KeyError), "expected config to be an object, got nothing"),
    (changed("machine", 3), "expected machine to be an object, got 3"),
    (changed("sweep", []), "expected sweep to be a list that is not empty, got an empty list"),
    (changed("sweep.1.phases", []), "expected sweep[1].phases to be a list that is not empty"),
    (changed("sweep.1.phases.0", 7), "expected sweep[1].phases[0] to be an object, got 7"),
    (changed("sweep.0.tokens", 1.5), "expected sweep[0].tokens to be a whole number, got 1.5"),
    (changed("sweep.0.phases.2.median_us", KeyError),
     "expected sweep[0].phases[2].median_us to be a number, got nothing"),
    (changed("sweep.0.phases.2.median_us", "fast"), 'to be a number, got "fast"'),
    (changed("sweep.0.phases.2.median_us", True), "to be a number, got true"),
    (changed("sweep.0.phases.2.median_us", -1), "to be a number from 0 to 1e+18, got -1"),
    (changed("sweep.0.phases.2.p99_us", float("nan")), "to be a number from 0 to 1e+18, got NaN"),
    (changed("sweep.0.phases.2.p99_us", 10**400), "to be a number from 0 to 1e+18, got 1000"),
    (changed("sweep.0.phases.2.name", None), "phases[2].name to be a text, got nothing"),
    ('{"version": "0.2.0", "models": []}', "expected models to be a list that is not empty"),
]


def test_result_without_a_format(tmp_path):
    """From ep_bench before there was one."""
    path = write_json(tmp_path, "old.json", {**make_result(1), "format": None})
    assert main([str(path), "-o", str(tmp_path / "page.html")]) == 0


def test_result_of_a_newer_version(refuse):
    result = {**make_result(1), "version": "99.1.0", "sweep": "elsewhere"}
    refuse(json.dumps(result), "expected sweep to be a list", "; libep 99.1.0 wrote the file, and "
           "this is ", "which is older")


WHOLE = trace_text(make_trace(1))


HEAD = "ep-routing 1\nexperts 4 top_k 2 ranks 1\n"
TRACES = [
    ("ep-routing", ':1: expected "ep-routing VERSION", got the end of the file in the middle'),
    ("ep-routing 2\n", ":1: expected version 1 of the format, got version 2, which this libep does "
                       "not know"),
    ("ep-routing 1 2\n", ':1: expected "ep-routing VERSION", got "ep-routing 1 2"'),
    ("ep-routing 1\n", ':2: expected "experts E top_k K ranks R", got the end of the file'),
    ("ep-routing 1\nexperts E top_k K ranks R\n", ':2: expected "experts E top_k K ranks R"'),
    ("ep-routing 1\nexperts 0 top_k 1 ranks 1\n", ":2: expected experts from 1 to 16777216, got 0"),
    ("ep-routing 1\nexperts 1 top_k 33 ranks 1\n", ":2: expected top_k from 1 to 32, got 33"),
    ("ep-routing 1\nexperts 1 top_k 1 ranks 1025\n", ":2: expected ranks from 1 to 1024"),
    (WHOLE[:-1], "in the middle of a line"),
    (WHOLE[: WHOLE.rindex("\n", 0, -1) + 1], "expected a token's indices, got the end of the file"),
    (WHOLE + "1\n", "expected the end of the file, got more lines"),
    (WHOLE + "1", "expected the end of the file, got more text"),
    (HEAD + "tokens x\n", ':3: expected "tokens T"'),
    (HEAD + "tokens -1\n", ":3: expected tokens from 0"),
    (HEAD + "tokens 1\n0\n", ':4: expected 2 expert indices'),
    (HEAD + "tokens 1\n0 4\n",
     ':4: expected an expert index less than 4, got "4"'),
    (HEAD + "tokens 1\n0 1_0\n", ":4: expected 2 expert indices"),
    (HEAD.encode() + b"tokens 1\n0 \xff\x00\n", 'got "0 ??"'),
]


@pytest.mark.parametrize("content, sentence", RESULTS + TRACES)
def test_refused(refuse, content, sentence):
    refuse(content, sentence)


@pytest.mark.parametrize("path, output, status, sentence", [
    ("missing.json", "page.html", 2,
     "{path}: cannot read it: No such file or directory"),
    ("a.json", "missing/page.html", 1, "{output}: cannot write it: No such file or directory"),
    ("a.json", "folder", 1, "{output}: cannot write it: Is a directory"),
    ("a.json", "a.json", 2, "expected a file for the page, got one that is to be read"),
])
def test_files(tmp_path, capsys, path, output, status, sentence):
    before = open(write_json(tmp_path, "a.json", make_result(1, (128,)))).read()
    (tmp_path / "folder").mkdir()
    path, output = str(tmp_path / path), str(tmp_path / output)
    assert main([path, "-o", output]) == status
    assert sentence.format(path=path, output=output) in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a.json", "folder"]
    assert (tmp_path / "a.json").read_text() == before and os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize("arguments", [[], ["a.json"], ["-o", "page.html"]])
def test_command_line(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and "required" in capsys.readouterr().err


# A module of this name that cannot be imported stands in for none at all.
def test_without_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')\n")
    path = write_json(tmp_path, "a.json", make_result(1, (128,)))
    output = str(tmp_path / "page.html")
    search = [str(tmp_path), *sys.path]
    run = subprocess.run([sys.executable, "-m", "libep.report", path, "-o", output], text=True,
                         env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
                         stderr=subprocess.PIPE)
    assert run.returncode == 1 and not os.path.exists(output)
    assert run.stderr == ("libep.report: the report needs matplotlib, which cannot be imported (No "
                          "module named matplotlib): install it, for example with "
                          "pip install matplotlib\n")
