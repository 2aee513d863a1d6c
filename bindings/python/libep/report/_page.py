# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML file. It has no script and loads nothing: its policy forbids both."""

from __future__ import annotations

import os
from html import escape
from string import Template
from typing import NamedTuple, Sequence, Union

from .._version import __version__
from ._style import Picture
from ._tables import Table

# ---- the parts that a report is made of ---------------------------------------------------------


class Text(NamedTuple):
    """A sentence; a warning is shown as one."""

    text: str
    warning: bool = False


class Shown(NamedTuple):
    """A picture and the sentence below it."""

    picture: Picture
    caption: str


class Facts(NamedTuple):
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


Block = Union[Text, Shown, Facts, Table]


class Section(NamedTuple):
    name: str  # the anchor
    title: str
    blocks: Sequence[Block]


# ---- as HTML ------------------------------------------------------------------------------------
_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="libep $version">
<title>libep report: $files</title>
<style>
$style</style>
</head>
<body>
<h1>libep report</h1>
<nav aria-label="Sections"><ul>
$links
</ul></nav>
<main>
$main
</main>
</body>
</html>
""")


def _cells(table: Table, tag: str, cells: Sequence[str]) -> str:
    def cell(i: int, text: str) -> str:
        number = ' class="number"' if i >= table.numeric else ""
        return f"<{tag}{number}>{escape(text)}</{tag}>"

    return "<tr>" + "".join(cell(i, text) for i, text in enumerate(cells)) + "</tr>"


def _table(block: Table) -> str:
    if not block.rows:
        return f"<p>{escape(block.caption)}: nothing.</p>"
    rows = "\n".join(_cells(block, "td", row) for row in block.rows)
    # tabindex: a table that scrolls can be reached without a mouse.
    return (f'<div class="table" tabindex="0"><table><caption>{escape(block.caption)}</caption>\n'
            f'<thead>{_cells(block, "th", block.columns)}</thead>\n<tbody>\n{rows}\n</tbody>'
            f"</table></div>")


def _block(block: Block) -> str:
    if isinstance(block, Text):
        return f'<p{" class=warning" if block.warning else ""}>{escape(block.text)}</p>'
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Facts):
        return "<dl>\n" + "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
                                    for name, value in block.pairs) + "\n</dl>"
    picture = block.picture
    return (f'<figure id="{escape(picture.name)}">'
            f'<div class="picture" role="img" aria-label="{escape(picture.alt)}">'
            f"{picture.svg}</div>\n<figcaption>{escape(block.caption)}</figcaption></figure>")


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return (f'<section id="{escape(section.name)}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n'
            f"</section>")


def _title(labels: Sequence[str]) -> str:
    more = len(labels) - 3
    return ", ".join(labels[:3]) + (f" and {more} more" if more > 0 else "")


def page(labels: Sequence[str], sections: Sequence[Section]) -> str:
    """The text of the file."""
    style = os.path.join(os.path.dirname(__file__), "page.css")
    with open(style, encoding="utf-8") as stream:
        css = stream.read()
    links = "\n".join(f'<li><a href="#{escape(s.name)}">{escape(s.title)}</a></li>'
                      for s in sections)
    return _PAGE.substitute(version=escape(__version__), files=escape(_title(labels)),
                            style=css, links=links, main="\n".join(map(_section, sections)))
