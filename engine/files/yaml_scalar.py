"""The value of an unquoted YAML scalar by the core schema of YAML 1.2, and the scalars on which YAML readers disagree.

YAML 1.1 reads ``yes`` as true, ``1:30`` as 90 and ``010`` as 8; version 1.2 reads text, text and 10. Such a scalar is
refused, because either reading would surprise some users.
"""

from __future__ import annotations

import re

YamlScalar = bool | int | float | str | None
_CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


_INTEGER = re.compile(r"[-+]?[0-9]{1,99}|0o[0-7]{1,99}|0x[0-9a-fA-F]{1,99}")  # a longer one is text, or refused
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SURPRISES = (
    (re.compile(r"y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF"), "write true or false, or quote it"),
    (re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"), "quote it: YAML 1.1 counts in sixties here"),
    (re.compile(r"[-+]?0[0-9]+"), "write it without the leading 0, or as 0o17 for octal, or quote it"),
    (re.compile(r"[-+]?(0b[01_]+|[0-9]+_[0-9_.]*)"), "write plain digits, or quote it"),
    (re.compile(r"[-+]?[0-9.]{100,}|0o[0-7]{100,}|0x[0-9a-fA-F]{100,}"), "quote it: too long for a number"),
)


def plain_value(text: str) -> YamlScalar:
    """Returns the value of an unquoted scalar by the core schema of YAML 1.2."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def surprise(text: str) -> str:
    """Returns how to write an unquoted scalar on which YAML readers disagree; an empty string for any other."""
    return next((hint for pattern, hint in _SURPRISES if pattern.fullmatch(text)), "")
