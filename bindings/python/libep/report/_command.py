# SPDX-License-Identifier: Apache-2.0
"""python -m libep.report: read the files, make the page, write it whole or not at all."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Optional, Sequence

from ._input import ReportError, parse, printable

if TYPE_CHECKING:
    from ._page import Section
    from ._results import Result
    from ._traces import Trace

# matplotlib is optional and takes a moment to load, so the modules that need it are imported where
# they are used: a refused command line does not wait for it.


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(f"the report needs matplotlib, which cannot be imported ({error}): "
                          "install it, for example with pip install matplotlib", 1) from None


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        raise ReportError(f"{path}: cannot read it: {error.strerror}") from None


def _labels(paths: Sequence[str]) -> list[str]:
    """What the page calls the files: their names, with folders where names are equal."""
    names = [os.path.basename(path) for path in paths]
    labels = [name if names.count(name) == 1 else path for name, path in zip(names, paths)]
    return [printable(label if labels.count(label) == 1 else f"{label} ({i})")
            for i, label in enumerate(labels, 1)]


def _read(paths: Sequence[str]) -> tuple[list[Result], list[Trace]]:
    from ._results import read_result
    from ._traces import MAGIC, read_trace

    results, traces = [], []
    for path, label in zip(paths, _labels(paths)):
        content = _content(path)
        if content.startswith(MAGIC):
            traces.append(read_trace(path, label, content))
        else:
            results.append(read_result(path, label, parse(path, content)))
    return results, traces


def _write(path: str, text: str) -> None:
    """The file appears whole or not at all."""
    folder = os.path.dirname(path) or "."
    try:
        handle, temporary = tempfile.mkstemp(prefix=".report-", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)  # mkstemp lets the owner alone read it
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ReportError(f"{path}: cannot write it: {error.strerror}", status=1) from None


def _refuse_overwriting(paths: Sequence[str], output: str) -> None:
    for path in paths:
        if os.path.exists(output) and os.path.exists(path) and os.path.samefile(path, output):
            raise ReportError(f"{output}: expected a file for the page, got one that is to be read")


def _write_pictures(folder: str, found: Sequence[Section]) -> None:
    from ._page import Shown

    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ReportError(f"{folder}: cannot make the folder: {error.strerror}", 1) from None
    for section in found:
        for block in section.blocks:
            if isinstance(block, Shown):
                _write(os.path.join(folder, block.picture.name + ".svg"), block.picture.file)


def write_report(paths: Sequence[str], output: str, pictures: Optional[str] = None) -> None:
    """Read results and traces of ep_bench, and write the page `output`.

    `pictures` names a folder that gets each picture as an SVG file, too. ReportError if a file is
    refused, matplotlib is missing, or the output cannot be written.
    """
    _require_matplotlib()
    _refuse_overwriting(paths, output)
    from ._page import page
    from ._sections import sections

    results, traces = _read(paths)
    found = sections(results, traces)
    text = page([r.label for r in results] + [t.label for t in traces], found)
    if pictures is not None:
        _write_pictures(pictures, found)
    _write(output, text)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m libep.report",
        description="Make one page with pictures and tables of results (ep_bench --json) and "
        "routing traces (ep_bench --save-routing).")
    parser.add_argument("files", nargs="+", metavar="FILE",
                        help="a result or a trace; results are compared with the first one")
    parser.add_argument("-o", "--output", required=True, metavar="PAGE", help="the HTML file")
    parser.add_argument("--pictures", metavar="FOLDER",
                        help="also write each picture there as an SVG file")
    given = parser.parse_args(arguments)
    try:
        write_report(given.files, given.output, given.pictures)
    except ReportError as error:
        print(f"libep.report: {error}", file=sys.stderr)
        return error.status
    return 0
