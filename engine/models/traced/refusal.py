"""What cannot be recorded, in words: the line of the user's code, and the ways out."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import FrameType

from engine.core.errors import Problem, UserError
from engine.models.traced.recording import CodeLine
from engine.models.user_code import is_own, shown

SUBMODULE = "put the line into a submodule, which then runs as it is, or return a list of layers or a Model"
REGISTER = "make the tensor once, in the constructor, and register it as a buffer"
DRAW = (
    "draw from torch's default generator, in each forward, and choose with torch.where: a dropped layer is "
    "`y = layer(x)` with `x = torch.where(torch.rand(()) < p, x, y)`, or a submodule that draws, branches and calls it"
)
_BRANCH = (
    "the way of the forward may not depend on values: compute both ways and choose with torch.where, put the line into "
    "a submodule, which then runs as it is, or return an nn.Sequential, a list of layers or a Model"
)
_ASSERTION = (
    "leave the assertion out, as a loss that is not finite ends the run by itself, or put it with the layer that it "
    "checks into a submodule, which then runs as it is"
)
_NUMBER = (
    "leave it out if it is for a log: the run reports losses, and --metrics in validations. Keep it a tensor in "
    "arithmetic, choose with torch.where in place of a branch, or put the line into a submodule, which runs as it is"
)
_NUMBERS = frozenset({"item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__"})
_EXPECTED = "a module whose forward does the same torch operations for every microbatch"


class UnrecordableError(Exception):
    """A line of the user's forward cannot be recorded; `path` is the submodule that ran it, empty for the model."""

    def __init__(self, words: str, hint: str, line: CodeLine, path: str):
        super().__init__(words)
        self.words, self.hint, self.line, self.path = words, hint, line, path


def refused(error: UnrecordableError) -> UserError:
    """Returns the user's mistake with its line."""
    return UserError([Problem("model", _EXPECTED, f"{told(error.line)}{error.words}", error.hint)])


def way_out(name: str, line: CodeLine) -> str:
    """Returns what to do about a line that takes a value out of a tensor by the function `name` of torch."""
    if _text_of(line).startswith("assert "):
        return _ASSERTION
    return _NUMBER if name in _NUMBERS else _BRANCH


def told(line: CodeLine) -> str:
    """Returns a line of code as the beginning of a message, empty if it is not known."""
    if not line.file:
        return ""
    text = _text_of(line)
    return f"{shown(line.file)}:{line.number}, in {line.function}: {f'`{text}`: ' if text else ''}"


def _text_of(line: CodeLine) -> str:
    return linecache.getline(line.file, line.number).strip()


def own_line() -> CodeLine:
    """Returns the innermost line of the user's code that is running, that of an installed package if there is none."""
    frame = next((each for each in _frames() if is_own(each.f_code.co_filename)), None)
    return CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else CodeLine()


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
