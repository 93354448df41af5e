"""Plain values, as files and flags spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Scalar = str | int | float | bool
Args = dict[str, Scalar]

MOST_FLOAT = (2 - 2**-23) * 2.0**127  # the greatest float32; torch raises on greater ones


_MOST_DIGITS = 18  # fewer than the 4300 from which Python refuses to read a number


def whole_number(text: str) -> int | None:
    """Returns the number that a text of digits spells; None for any other text, and for one that is too long."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def finite(value: Any) -> Any:
    """Returns plain values with None in place of each number that is not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
