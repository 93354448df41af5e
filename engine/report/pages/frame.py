"""The frame of every page: a heading, a timeline to zoom in, and the sections of the caller; no network is needed.

Rules: every text from outside is escaped for HTML. The page's content security policy allows only the scripts that it
names by their hashes, and no network access. Data and programs are compressed, because Plotly alone has 1.2 MB:
`plotly-basic.min.js` is the file of the npm package plotly.js-basic-dist-min 4.1.1.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template
from typing import Any

import pandas as pd

from engine.core.scalar import finite
from engine.report.formats import cell_text
from engine.report.pages.words import word

Tile = tuple[str, str, str]  # title, figure, unit
_TEXT_COLUMNS = {"what", "text", "reason"}
_MOODS = {"passed": "good", "failed": "bad", "invalid": "open", "not judged": "open"}  # of the results of checks
_SIGNS = {"good": "\u2713 ", "bad": "\u2717 ", "open": ""}
_LONG = 150  # characters of a sentence for which a large type is too large


@dataclass(frozen=True, slots=True)
class Heading:
    """The top of a page, and the note below its timeline; `mood` is good, bad or open.

    `when` says when it happened, `weights` has the mood and the text of the line on the comparison with the twin, and
    `facts` are lines about the job and the machine.
    """

    command: str
    name: str
    mood: str
    sentence: str
    tiles: Sequence[Tile]
    note: str = ""
    when: str = ""
    facts: Sequence[str] = ()
    weights: tuple[str, str] = ("", "")


def framed(heading: Heading, sections: str, data: dict[str, Any]) -> str:
    """Returns a page as HTML: `sections` is HTML; `data` holds the `timeline` and `charts` that the scripts draw."""
    plotly, program, unpack = asset("plotly-basic.min.js"), asset("timeline.js") + asset("page.js"), asset("unpack.js")
    return Template(asset("frame.html")).substitute(
        policy=policy(plotly, program, unpack),
        title=html.escape(f"{heading.name}: {heading.sentence}"),
        css=asset("page.css"),
        command=heading.command,
        name=html.escape(heading.name),
        when=html.escape(heading.when),
        facts=facts_html(heading.facts),
        weights=_weights(*heading.weights),
        mood=f"{heading.mood} long" if len(heading.sentence) > _LONG else heading.mood,
        headline=re.sub(r"(\d) (ms|s|%|units?)(?!\w)", r"\1&nbsp;\2", html.escape(heading.sentence)),
        tiles=tiles_html(heading.tiles),
        note=heading.note,
        sections=sections,
        data=_compressed(json.dumps(finite(data), separators=(",", ":"))),
        plotly=_compressed(plotly),
        program=_compressed(program),
        unpack=unpack,
    )


def asset(name: str) -> str:
    """Returns the text of a file in the folder of this module."""
    return files("engine.report.pages").joinpath(name).read_text(encoding="utf-8")


def html_table(table: pd.DataFrame) -> str:
    """Returns a table as HTML, every cell escaped."""
    numeric = [pd.api.types.is_numeric_dtype(dtype) for dtype in table.dtypes]
    head = "".join(
        f'<th class="{"number" if number else ""}">{word(str(name))}</th>'
        for name, number in zip(table.columns, numeric, strict=True)
    )
    rows = []
    for values in table.itertuples(index=False, name=None):
        cells = []
        for name, value, number in zip(table.columns, values, numeric, strict=True):
            kind = "number" if number else "text" if name in _TEXT_COLUMNS else ""
            kind = _MOODS.get(str(value), "") if name == "result" else kind
            cells.append(
                f'<td class="{kind}" data-name="{html.escape(str(name))}">{html.escape(cell_text(value))}</td>'
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table class="rows"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _weights(mood: str, text: str) -> str:
    return f'<p class="weights {mood}">{_SIGNS[mood]}{html.escape(text)}</p>' if text else ""


def facts_html(facts: Sequence[str]) -> str:
    """Returns the lines about the job and the machine as HTML."""
    return "".join(f'<p class="facts">{html.escape(each)}</p>' for each in facts)


def tiles_html(tiles: Sequence[Tile]) -> str:
    """Returns the tiles of a heading as HTML."""
    return "".join(
        f"<div><dt>{word(name)}</dt><dd>{html.escape(figure)} <small>{html.escape(unit)}</small></dd></div>"
        for name, figure, unit in tiles
    )


def policy(*scripts: str) -> str:
    """Returns the content security policy of a page that may run these scripts only."""
    hashes = (base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _compressed(text: str) -> str:
    """Returns base64 of a text under gzip; it has no character that could end its HTML element."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
