"""Fixtures of the simulation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation import plans


@pytest.fixture
def fresh_answers() -> Iterator[None]:
    """Forgets plans before and after a test that plants a bug in them."""
    plans.forget()
    yield
    plans.forget()
