"""The page of all figures, and the end of the ten minutes, behind which no test begins."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

import pytest

from engine.files.host_facts import host_facts
from tests.gpu.gpu_session import FACTS, LEAST_S, ROOT, left_s
from tests.gpu.hardware_page import Figure, page


@pytest.fixture(scope="session")
def figures() -> Iterator[list[Figure]]:
    """The results so far; at the end they become a page of docs/hardware."""
    found: list[Figure] = []
    yield found
    facts = host_facts(ROOT)
    name, text = page(date.today(), {each: facts[each] for each in FACTS}, found)
    folder = ROOT / "docs" / "hardware"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)


@pytest.fixture
def in_time(request: pytest.FixtureRequest, figures: list[Figure]) -> None:
    """Skips a test for which no time is left; the page says so."""
    if left_s() < LEAST_S:
        figures.append(Figure(request.node.name, "not tried: the ten minutes are over", 0.0))
        pytest.skip("the ten minutes are over")
