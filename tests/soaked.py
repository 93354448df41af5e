"""Rows of parametrized tests that `make soak-tests` has, and `make test` has not."""

from __future__ import annotations

from typing import Any

import pytest


def soaked(*values: Any) -> Any:
    """Returns the values of such a row."""
    return pytest.param(*values, marks=pytest.mark.soak)
