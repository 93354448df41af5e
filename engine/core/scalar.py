"""Plain values, as files and flags spell them."""

from __future__ import annotations

Scalar = str | int | float | bool
Args = dict[str, Scalar]

MOST_FLOAT = (2 - 2**-23) * 2.0**127  # the greatest float32; torch raises on greater ones
