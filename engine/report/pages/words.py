"""The words of a page with their definitions, which the page shows under the mouse and to a keyboard.

Rule: definitions come from the glossary of `engine`; only words of charts that no code uses are defined here.
"""

from __future__ import annotations

import html
import re

import engine

_LINE = re.compile(r"^([a-z-]+): (.+)$", re.MULTILINE)
_OF_CHARTS = {
    "waiting": "the time in which a worker waits for a tensor of another worker, with its receipt.",
    "redone": "the forwards and backwards that were computed a second time, because their results were gone.",
    "step": "one optimizer step of the whole job.",
}
_SAME = {
    "training stalled": "stall",
    "peak stashed activations": "stash",
    "took over": "heir",
    "waits, % of the time": "bubble",
    "stages": "stage",
    "blocks": "block",
    "actions": "action",
    "last action": "action",
    "redundant forwards": "redundancy",
    "recoveries": "recovery",
}
_DEFINED = dict(_LINE.findall(engine.__doc__ or "")) | _OF_CHARTS  # python -OO leaves no glossary


def definition(text: str) -> str:
    """Returns the definition of a word, or of the first known word of a list such as ``reduce, log``; else nothing."""
    words = (_SAME.get(each, each) for each in (text, *text.split(", ")))
    return next((_DEFINED[each] for each in words if each in _DEFINED), "")


def word(text: str) -> str:
    """Returns a word as HTML that tells its definition, or the escaped text if it has none."""
    told = definition(text)
    if not told:
        return html.escape(text)
    return f'<abbr tabindex="0" data-told="{html.escape(told)}">{html.escape(text)}</abbr>'
