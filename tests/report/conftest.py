"""One browser for all tests of pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report.browser import Browser, find_browser


@pytest.fixture(scope="session", name="browser")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium here to open the page in (Debian: apt-get install chromium)")
    with Browser(path, tmp_path_factory.mktemp("browser")) as browser:
        yield browser
