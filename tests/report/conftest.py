"""One browser for all tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report.browser import Browser, find_browser


@pytest.fixture(scope="session", name="chromium")
def _chromium() -> str:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here to open the page in (Debian: apt-get install chromium)")
    return path


@pytest.fixture(scope="session", name="browser")
def _browser(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(chromium, tmp_path_factory.mktemp("browser")) as browser:
        yield browser
