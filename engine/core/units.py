"""Values as people write them in files and flags: plain scalars, and durations such as ``250ms``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

# Plain values, as files and flags spell them.

Scalar = str | int | float | bool
Args = dict[str, Scalar]

MOST_FLOAT = (2 - 2**-23) * 2.0**127  # the greatest float32; torch raises on greater ones


def described(default: Any, text: str, **more: Any) -> Any:
    """Returns a field of a dataclass that files give, with its help text; `...` is no default, `dict` an empty one."""
    if default is dict:
        return field(default_factory=dict, metadata={"help": text}, **more)
    return field(**({} if default is ... else {"default": default}), metadata={"help": text}, **more)


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


# Durations as people write them: ``250ms``, ``5s``, ``2m``; in the program they are whole nanoseconds.
#
# Spans of training may be in epochs, as ``1epoch`` or ``0.5epochs``.

DURATION_FORM = "a duration such as 250ms, 5s or 2m"
# For the schemas of files, so that an editor knows the form too: whole nanoseconds, with spaces around them.
DURATION = (
    r"[0-9]{1,12}(?:(?:\.[0-9]{1,9})?[smh]"
    r"|(?:\.(?:[0-9]{1,6}|[0-9]{6}0{1,3}))?ms|(?:\.(?:[0-9]{1,3}|[0-9]{3}0{1,6}))?us)"
)
DURATION_PATTERN = rf"^\s*{DURATION}\s*$"

EPOCHS = r"(?![0.]+\s?e)[0-9]{1,6}(?:\.[0-9]{1,3})?\s?epochs?"  # the same for epochs
EPOCHS_PATTERN = rf"^\s*{EPOCHS}\s*$"
MILLI = 1000  # thousandths of an epoch

_UNITS_NS = {"us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}
_EPOCHS = re.compile(r"([0-9]{1,6})(?:\.([0-9]{1,3}))?\s?(epochs?)")
_TEXT = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,9}))?(us|ms|s|m|h)")


def parse_duration(text: str) -> int | None:
    """Returns the nanoseconds that `text` spells, exactly; None if it is no duration or has a fraction of 1 ns."""
    return whole_units(text, _TEXT, _UNITS_NS)


def parse_epochs(text: str) -> int | None:
    """Returns the thousandths of an epoch that `text` spells; None if it spells no epochs, or none of them."""
    return whole_units(text, _EPOCHS, {"epoch": MILLI, "epochs": MILLI}) or None


def whole_units(text: str, form: re.Pattern[str], units: Mapping[str, int]) -> int | None:
    """Returns the quantity that `text` spells, exactly; None if it has not the form, or is no whole number.

    The groups of the form are the digits before and behind the point, and the unit.
    """
    match = form.fullmatch(text.strip())
    if match is None:
        return None
    fraction = match[2] or ""
    whole, rest = divmod(int(match[1] + fraction) * units[match[3]], 10 ** len(fraction))
    return None if rest else whole


def duration_text(time_ns: int) -> str:
    """Returns nanoseconds as text that `parse_duration` reads, in the largest unit in which they are whole."""
    if not time_ns:
        return "0s"
    for unit in ("h", "m", "s", "ms", "us"):
        if time_ns % _UNITS_NS[unit] == 0:
            return f"{time_ns // _UNITS_NS[unit]}{unit}"
    return f"{time_ns / 1000}us"
