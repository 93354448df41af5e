"""What cannot be recorded, in words: the line of the user's code, and the ways out."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import FrameType

from engine.core.errors import Problem, UserError
from engine.models.traced.recording import CodeLine
from engine.models.user_code import is_own, shown

_EXPECTED = "a module whose forward does the same torch operations for every microbatch"


class UnrecordableError(Exception):
    """A line of the user's forward cannot be recorded; `path` is the submodule that ran it, empty for the model."""

    def __init__(self, words: str, hint: str, line: CodeLine, path: str):
        super().__init__(words)
        self.words, self.hint, self.line, self.path = words, hint, line, path


def refused(error: UnrecordableError) -> UserError:
    """Returns the user's mistake with its line."""
    return UserError([Problem("model", _EXPECTED, f"{told(error.line)}{error.words}", error.hint)])


def told(line: CodeLine) -> str:
    """Returns a line of code as the beginning of a message, empty if it is not known."""
    if not line.file:
        return ""
    text = linecache.getline(line.file, line.number).strip()
    return f"{shown(line.file)}:{line.number}, in {line.function}: {f'`{text}`: ' if text else ''}"


def own_line() -> CodeLine:
    """Returns the innermost line of the user's code that is running, that of an installed package if there is none."""
    frame = next((each for each in _frames() if is_own(each.f_code.co_filename)), None)
    return CodeLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame else CodeLine()


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
