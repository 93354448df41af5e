"""Exceptions of the user's code as data: the place, the user's own line, and the frames that count."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from engine.codec.messages import decode, encode
from engine.core.errors import WorkerException
from engine.core.messages import RaisedMessage
from engine.models.user_code import blame, exception_of
from engine.runtime.process.link import packet

MINE = """
import json
from torch import nn

class Broken(nn.Module):
    def forward(self, x):
        return self.cached(x)

    def cached(self, x):
        raise RuntimeError("my own bug: cache is corrupt")

class Strict(nn.Module):
    def forward(self, x):
        return nn.functional.linear(x, x[:, :3])

def settings():
    return json.loads("{")
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The user's module, in the current folder."""
    (tmp_path / "mine_of_user_code.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_of_user_code", raising=False)
    return importlib.import_module("mine_of_user_code")


def exception_in(call: object, *args: object, place: str = "layer 2 (fc2)") -> WorkerException:
    """Returns the exception of a call, blamed on a place."""
    try:
        call(*args)  # type: ignore[operator]
    except Exception as error:
        blame(error, place)
        return exception_of(error)
    raise AssertionError("it raised nothing")


def test_the_users_own_line_is_the_innermost_one_and_frames_of_torch_are_only_counted(mine: object) -> None:
    found = exception_in(mine.Broken(), torch.ones(2, 4))  # type: ignore[attr-defined]
    assert (found.file, found.line, found.function) == ("mine_of_user_code.py", 10, "cached")
    assert found.in_step(4) == (
        "raised RuntimeError: my own bug: cache is corrupt, in layer 2 (fc2) of step 4 "
        "(mine_of_user_code.py:10, in cached)"
    )
    assert "in layer 2 (fc2), before step 0 (mine" in found.in_step(-1)
    assert found.in_verdict() == "raised RuntimeError: my own bug: cache is corrupt, in layer 2 (fc2)"
    lines = found.frames.splitlines()
    assert lines[0] == "mine_of_user_code.py:10, in cached"
    assert lines[1].strip() == 'raise RuntimeError("my own bug: cache is corrupt")'
    assert lines[2] == "mine_of_user_code.py:7, in forward"
    assert re.fullmatch(r"\.\.\. \d+ frames of bamboo and torch", lines[-1])
    assert "_call_impl" in found.traceback
    assert found.traceback.rstrip().endswith("in layer 2 (fc2)")


@pytest.mark.parametrize(("call", "line"), [("Strict", 14), ("settings", 17)], ids=["torch", "python"])
def test_a_frame_of_torch_or_of_python_is_never_the_users_line(mine: object, call: str, line: int) -> None:
    made = getattr(mine, call)
    found = exception_in(made(), torch.ones(2, 4)) if call == "Strict" else exception_in(made)
    assert (found.file, found.line) == ("mine_of_user_code.py", line)


def test_without_a_frame_of_the_user_the_function_whose_result_is_wrong_stands_for_it(mine: object) -> None:
    error = TypeError("another shape")
    blame(error, "layer 0 (0)", mine.Strict())  # type: ignore[attr-defined]
    assert exception_of(error).at_start() == (
        "in layer 0 (0): TypeError: another shape (mine_of_user_code.py:13, in forward)"
    )
    error = TypeError("another shape")
    blame(error, "layer 0 (0)", nn.Linear(2, 2))
    assert exception_of(error).at_start() == "in layer 0 (0): TypeError: another shape"


def test_the_innermost_place_counts() -> None:
    error = ValueError("no")
    blame(error, "the loss")
    blame(error, "layer 3 (3)")
    assert exception_of(error).place == "the loss"
    assert error.__notes__ == ["in the loss"]


def test_the_longest_exception_fits_into_a_message_and_comes_back() -> None:
    error = ValueError("\N{SNOWMAN}\N{GRINNING FACE}" * 50_000)
    blame(error, "the data")
    message = RaisedMessage(7, 3, exception_of(error))
    assert decode(packet(message)) == message
    assert encode(message) == packet(message)


def test_no_character_of_an_exception_steers_the_terminal() -> None:
    error = ValueError("\x1b[2J\x1b]0;title\x07 cleared\r\n\tnext")
    assert exception_of(error).error == "ValueError:  cleared?\n\tnext"
    assert exception_of(error).in_step(0) == "raised ValueError: cleared? next, in step 0"


def test_an_exception_that_cannot_say_its_text_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise KeyError("text")

    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    try:
        raise Mute
    except Mute as error:
        found = exception_of(error)
    assert found.error == "Mute: its text cannot be had: KeyError"
    assert found.file == __file__


def test_a_sentence_is_bounded() -> None:
    assert len(WorkerException("E: " + "x" * 900, "the loss").in_verdict()) < 350
