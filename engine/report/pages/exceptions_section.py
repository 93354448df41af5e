"""The section of a run's page about the exceptions that ended workers: the user's own lines first."""

from __future__ import annotations

import html
from collections.abc import Sequence

from engine.core.history.run_records import RaisedRecord
from engine.report.exceptions import exceptions_in_words


def exceptions_section(raised: Sequence[RaisedRecord]) -> str:
    """Returns the section as HTML; workers that raised the same exception share it. A run without any has none."""
    if not raised:
        return ""
    told = "".join(_told(*each) for each in exceptions_in_words(raised))
    return f"<section><h2>Exceptions</h2>{told}</section>"


def _told(sentence: str, raised: RaisedRecord) -> str:
    frames = f"<pre>{html.escape(raised.frames)}</pre>" if raised.frames else ""
    whole = f"<details><summary>The whole traceback</summary><pre>{html.escape(raised.traceback)}</pre></details>"
    return f'<p class="bad">{html.escape(sentence)}</p>{frames}{whole if raised.traceback else ""}'
