"""Files that mean harm: none runs code, touches a file, takes long or much memory, or ends in a traceback."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import pytest

from engine.core.errors import ExitCode
from tests.cli.any_command import called, confined
from tests.security.hostile_yaml import KEYS, LARGE, hostile_files

MOST_CPU_S = 5.0
MOST_KIB = 500 * 1024  # beyond what the tests before it have taken
EVIL = "from pathlib import Path\nPath(__file__).with_name('imported').touch()\nattr = print\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    here = tmp_path / "over" / "here"
    here.mkdir(parents=True)
    (here / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(here)
    confined(here, monkeypatch)
    return here


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def validated(folder: Path, text: str) -> float:
    """Returns the seconds of CPU of the check of a file, which is the only change in the folders."""
    file = folder / "file.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    before, from_s, from_kib = {*folder.parents[1].rglob("*")}, time.process_time(), peak_kib()
    ended = called("validate", "file.yaml")
    seconds = time.process_time() - from_s
    assert ended.code in (ExitCode.OK, ExitCode.USAGE), (ended, text[:300])
    assert "Traceback" not in ended.text and len(ended.text) < 500_000, text[:300]
    assert {*folder.parents[1].rglob("*")} == before, text[:300]
    assert "evil" not in sys.modules
    assert seconds < MOST_CPU_S and peak_kib() - from_kib < MOST_KIB, (seconds, text[:300])
    return seconds


def test_a_hundred_hostile_files_do_no_harm(folder: Path) -> None:
    for text in hostile_files(seed=1, number=100):
        validated(folder, text)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_thousand_hostile_files_do_no_harm(seed: int, folder: Path) -> None:
    for text in (*hostile_files(seed, number=1000), *LARGE):
        validated(folder, text)


def test_sixty_thousand_unknown_keys_take_two_seconds_at_most(folder: Path) -> None:
    assert validated(folder, KEYS) < 2.0


def test_a_file_with_many_mistakes_tells_a_hundred(folder: Path) -> None:
    (folder / "file.yaml").write_text("".join(f"stages{each}: 1\n" for each in range(3000)))
    first, *_, last = called("run", "--dry-run", "file.yaml").problems
    assert str(first).startswith("file.yaml:1:1: stages0: expected a field of the job (did you mean 'stages'?)")
    assert str(last) == "file.yaml: expected at most 100 mistakes, found more (mend the others first)"
