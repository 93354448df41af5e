"""Text from elsewhere for a terminal: no character of it moves the cursor, changes colours or hides text."""

from __future__ import annotations

import re

_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?")  # CSI, OSC, other escapes
_KEPT = frozenset("\n\t")
_FIRST_SPACE, _ENDS = "\xa0", "\u2028\u2029"  # spaces of Unicode, but not its ends of lines and paragraphs


def printable(text: str) -> str:
    """Returns a text without escape sequences, and with ``?`` for each control character but tab and newline."""
    text = _SEQUENCES.sub("", text)
    return text if text.isprintable() else "".join(each if _is_harmless(each) else "?" for each in text)


def _is_harmless(character: str) -> bool:
    is_space = character.isspace() and character >= _FIRST_SPACE and character not in _ENDS
    return is_space or character.isprintable() or character in _KEPT
