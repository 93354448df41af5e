"""The page of all figures, written with each of them, and the end of the time, behind which no test begins."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from engine.files.host_facts import host_facts
from tests.gpu.gpu_session import FACTS, LEAST_S, ROOT, left_s
from tests.gpu.hardware_page import Figure, page


class WrittenFigures(list[Figure]):
    """Figures that become a page of a folder each time that one is added: the session may be killed before its end."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, facts = folder, host_facts(ROOT)
        self._facts = {each: facts[each] for each in FACTS}

    def append(self, figure: Figure) -> None:
        """Adds a figure."""
        super().append(figure)
        name, text = page(date.today(), self._facts, self)
        self._folder.mkdir(exist_ok=True)
        (self._folder / name).write_text(text)


@pytest.fixture(scope="session")
def figures() -> list[Figure]:
    """The results so far, on a page of docs/hardware."""
    return WrittenFigures(ROOT / "docs" / "hardware")


@pytest.fixture
def in_time(request: pytest.FixtureRequest, figures: list[Figure]) -> None:
    """Skips a test for which no time is left; the page says so."""
    if left_s() < LEAST_S:
        figures.append(Figure(request.node.name, "not tried: the time is over", 0.0))
        pytest.skip("the time is over")
