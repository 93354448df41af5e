"""Sizes as people write them: ``200MB``, ``1.5GB``; in the program they are whole bytes."""

from __future__ import annotations

import re

from engine.core.duration import whole_units

SIZE_FORM = "a size in B, kB, MB, GB or TB, such as 200MB"
# For the schemas of files: whole bytes, with spaces around them.
SIZE_PATTERN = r"^\s*[0-9]{1,6}(?:(?:\.[0-9]{1,3})?(?:kB|MB|GB|TB)|(?:\.0{1,3})?B)\s*$"
_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_TEXT = re.compile(r"([0-9]{1,6})(?:\.([0-9]{1,3}))?(B|kB|MB|GB|TB)")


def parse_size(text: str) -> int | None:
    """Returns the bytes that `text` spells; None if it is no size, or has a fraction of a byte."""
    return whole_units(text, _TEXT, _UNITS)
