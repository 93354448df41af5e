"""A name that a user's file does not have is found before anything starts; a doubt refuses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.errors import Problem
from engine.core.job.job import Job
from engine.files.jobs.user_files import missing_name, names_in
from engine.harness.job_checks import missing_modules

MINE = """
import torch, os.path
from torch import nn as layers
try:
    from fast import Quick
except ImportError:
    Quick = None
class Net(layers.Module): ...
def data(): ...
async def later(): ...
if torch:
    a, (b, *c) = 1, (2, 3)
for number in (): ...
with open(__file__) as handle: ...
annotated: int = 3
def setter():
    global late
    late = 1
match annotated:
    case [first, *rest]: ...
    case {"k": 1, **others}: ...
"""
NAMES = "torch os layers Quick Net data later a b c number handle annotated late first rest others setter".split()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(MINE)


def test_every_way_to_give_a_name_counts() -> None:
    assert names_in(MINE) == frozenset(NAMES)


@pytest.mark.parametrize(
    "more",
    [
        "from x import *",
        "def __getattr__(name): ...",
        "globals()['Nett'] = 1",
        "exec('Nett = 1')",
        "import sys\nsys.modules",
    ],
)
def test_a_file_that_may_make_names_has_every_name(more: str) -> None:
    assert names_in(MINE + more) is None


def test_a_typo_is_told_with_the_nearest_name() -> None:
    found = missing_name("model", "own_net:Nett")
    assert found == Problem("model", "a name that own_net.py has", "'own_net:Nett'", "did you mean 'Net'?")
    assert missing_modules(Job(model="own_net:Nett", data="own_net:data")) == [found]


@pytest.mark.parametrize(
    "factory", ["own_net:Net", "own_net:late", "torch:whatever", "own_pack.net:Nett", "broken:Net"]
)
def test_nothing_is_refused_that_may_be_there(tmp_path: Path, factory: str) -> None:
    (tmp_path / "broken.py").write_text("class Net(:")
    assert missing_name("model", factory) is None
