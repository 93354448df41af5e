"""Exceptions of the user's code: the place in the job that raised one, and the user's own line.

Rules: the innermost place counts. A line is the user's own if it is not part of bamboo, torch or Python; the innermost
one outside installed packages comes first. An exception of bamboo about a result, such as a wrong shape, has no such
line: then the function that returned the result is named instead.

An exception is the user's code as well: its text may raise, take long or fill megabytes, and 100,000 others may be
linked to it. Its description never raises, waits at most `_PATIENCE_S` for each text, and says where a text was cut.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from traceback import FrameSummary, walk_stack
from types import FrameType
from typing import Any

import torch

from engine.codec.values import cut
from engine.core.errors import WorkerException
from engine.core.texts import counted, printable

_MOST_OF_NAME, _MOST_OF_ERROR, _MOST_OF_FRAMES, _MOST_OF_TRACEBACK = 1_000, 4_000, 4_000, 20_000  # bytes in a message
_MOST_FRAMES, _MOST_LINKED = 1_000, 100  # frames of an exception; exceptions that hang on one as causes or members
_PATIENCE_S = 1.0
_PLACE, _CALLED, _HINT = "_bamboo_place", "_bamboo_called", "_bamboo_hint"  # attributes of an exception
_MICROBATCH = "_bamboo_microbatch"
IMPORT = "the import of"  # begins a place
_RAISES = re.compile(r"\b(raise|assert)\b")
_PYTHON = Path(sysconfig.get_path("stdlib"))
_PACKAGES = ("site-packages", "dist-packages")
_TORCH = Path(torch.__file__).parent
_FOLDED = (Path(__file__).parents[1], Path(__file__).parents[2] / "bamboo_cli", _TORCH)

# Code of the user may raise anything, `SystemExit` too: it ends one worker.
RAISED = BaseException


class CodeExit(Exception):
    """The user's code called `sys.exit`; the text is the whole message."""


def blame(error: BaseException, place: str, called: Callable[..., object] | None = None, hint: str = "") -> None:
    """Marks an exception with the place in the job that raised it; an inner place that is known already stays.

    `called` is the user's function whose result is wrong; its first line counts if no frame is the user's. `hint`
    explains an exception that no `raise` statement of Python made: torch's own words lack the values of the job.
    """
    with contextlib.suppress(Exception):  # its class may refuse attributes
        if _PLACE not in vars(error):
            vars(error).update({_PLACE: place, _CALLED: called, _HINT: hint})
            error.add_note(f"in {place}")


def blame_microbatch(error: BaseException, microbatch: str) -> None:
    """Marks an exception with the name of the microbatch that was computed."""
    with contextlib.suppress(Exception):
        vars(error)[_MICROBATCH] = microbatch
        error.add_note(f"in {microbatch}")


@contextlib.contextmanager
def running(place: str, called: Callable[..., object] | None = None, hint: str = "") -> Iterator[None]:
    """Marks an exception in the user's code as `blame` does; an attempt to end the process becomes an exception."""
    try:
        yield
    except SystemExit as end:
        error = CodeExit(f"SystemExit: {end}").with_traceback(end.__traceback__)
        blame(error, place, called)
        raise error from None
    except RAISED as error:
        blame(error, place, called, hint)
        raise


def exception_of(error: BaseException) -> WorkerException:
    """Returns an exception as data, without characters that would steer a terminal; its texts fit into a message."""
    frames = traceback.extract_tb(error.__traceback__, -_MOST_FRAMES)
    marks = _marks(error)
    file, line, function = _own_line(frames, marks.get(_CALLED))
    words: object = error
    if isinstance(error, SyntaxError) and type(error.filename) is str and is_own(error.filename):
        file, line, function = shown(error.filename), error.lineno if type(error.lineno) is int else 0, ""
        words = error.msg
    text = _text(error, words)
    is_of_torch = isinstance(error, Exception) and not _has_raise_statement(frames)  # or of another part in C
    if (hint := marks.get(_HINT, "")) and is_of_torch:
        text = f"{text.rstrip('.')}: {hint}"
    return WorkerException(
        _beginning(text, _MOST_OF_ERROR),
        _beginning(str(marks.get(_PLACE, "")) + _script(marks, frames), _MOST_OF_NAME),
        _beginning(file, _MOST_OF_NAME),
        line,
        _beginning(function, _MOST_OF_NAME),
        _beginning("\n".join(_folded(frames)), _MOST_OF_FRAMES),
        _ends(_whole(error, text), _MOST_OF_TRACEBACK),
        str(marks.get(_MICROBATCH, "")),
    )


def running_line(frame: FrameType) -> str:
    """Returns the line of the user that a thread is in, such as ``mine.py:28, in forward``; empty if there is none."""
    stack = [
        FrameSummary(f.f_code.co_filename, line, f.f_code.co_name, lookup_line=False) for f, line in walk_stack(frame)
    ]
    file, line, function = _own_line(stack[::-1], None)
    return _beginning(f"{file}:{line}, in {function}" if file else "", _MOST_OF_NAME)


def log_exception(error: BaseException) -> None:
    """Writes an exception to stderr, which is the worker's log."""
    _log(_whole(error, _text(error, error)))


def log_stack(title: str, frame: FrameType) -> None:
    """Writes the stack of a thread to the worker's log."""
    _log(f"{title}\n{''.join(traceback.format_stack(frame, _MOST_FRAMES))}")


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # the disk may be full, and the worker does not depend on its log
        print(text.encode(errors="backslashreplace").decode(), file=sys.stderr, end="", flush=True)


def _marks(error: BaseException) -> dict[str, Any]:
    try:
        return dict(vars(error))
    except Exception:  # its class may hide them
        return {}


def _text(error: BaseException, words: object) -> str:
    if isinstance(error, CodeExit):
        return str(error)
    problems: list[str] = []
    text = _patiently(lambda: f"{type(error).__name__}: {words}".removesuffix(": "), problems)
    return text if text is not None else f"{type(error).__name__}: its text cannot be had: {problems[0]}"


def _whole(error: BaseException, text: str) -> str:
    """Returns the traceback of an exception with its causes; with its text alone if they are too many, or raise."""
    problems: list[str] = []
    if _num_linked(error) <= _MOST_LINKED:
        whole = _patiently(lambda: "".join(traceback.format_exception(error)), problems)
        if whole is not None:
            return whole
    else:
        problems.append(f"more than {_MOST_LINKED} others hang on it")
    lines = traceback.format_tb(error.__traceback__, -_MOST_FRAMES)
    return "".join(["Traceback (most recent call last):\n", *lines, text, f"\n(alone: {problems[0]})\n"])


def _num_linked(error: BaseException) -> int:
    """Returns the number of causes, contexts and members of an exception; stops to count above `_MOST_LINKED`."""
    ids: set[int] = set()
    left = [error]
    while left and len(ids) <= _MOST_LINKED + 1:
        linked = left.pop()
        if id(linked) not in ids:
            ids.add(id(linked))
            left += [other for other in (linked.__cause__, linked.__context__) if other is not None]
            left += BaseExceptionGroup.exceptions.__get__(linked) if isinstance(linked, BaseExceptionGroup) else ()
    return len(ids) - 1


def _patiently(make: Callable[[], str], problems: list[str]) -> str | None:
    """Returns a text that code of the user's makes; None, with the problem, if it raises or takes long."""
    results: list[str] = []

    def run() -> None:
        try:
            results.append(make())
        except RAISED as other:
            problems.append(type(other).__name__)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        thread.join(_PATIENCE_S)
    except (RuntimeError, MemoryError):  # there is no memory for a thread
        run()
    problems.append(f"it takes longer than {_PATIENCE_S:g} s")
    return results[0] if results else None


def _beginning(text: str, most: int) -> str:
    note = f"... (of {len(text)} characters; the log of the worker has them)"
    return cut(printable(text[: 2 * most]), most, note)


def _ends(text: str, most: int) -> str:
    """Returns the beginning and the end of a text: a traceback has its frames first, and the exception last."""
    note = f"\n... (of {len(text)} characters; the log of the worker has them) ...\n"
    shown = printable(text if len(text) <= most else f"{text[:most]}{text[-most:]}")
    beginning = cut(shown, most // 2, note)
    return shown if beginning == shown else beginning + cut(shown[::-1], most // 2, "")[::-1]


def _own_line(frames: Sequence[FrameSummary], called: Callable[..., object] | None) -> tuple[str, int, str]:
    """Returns file, line and function of the innermost frame of the user, else the first line of `called`."""
    own = [each for each in frames if is_own(each.filename)]
    nearest = [each for each in own if not _is_installed(each.filename)] or own
    if nearest:
        return shown(nearest[-1].filename), nearest[-1].lineno or 0, nearest[-1].name
    code = getattr(inspect.unwrap(getattr(called, "forward", called)), "__code__", None) if called else None
    if code is None or not is_own(code.co_filename):
        return "", 0, ""
    return shown(code.co_filename), code.co_firstlineno, code.co_name


def _script(marks: dict[str, Any], frames: Sequence[FrameSummary]) -> str:
    """Returns what is wrong with an import that runs a function of the same file, as a script without a guard does."""
    own = [each for each in frames if is_own(each.filename) and not _is_installed(each.filename)]
    calls = [then.name for each, then in pairwise(own) if (each.name, each.filename) == ("<module>", then.filename)]
    if not calls or not str(marks.get(_PLACE, "")).startswith(IMPORT):
        return ""
    return f', which calls {calls[-1]} (a script guards that by `if __name__ == "__main__":`)'


def _has_raise_statement(frames: Sequence[FrameSummary]) -> bool:
    """Returns whether Python code raised the exception on purpose, outside of torch: its words say enough."""
    last = frames[-1] if frames else None
    return last is not None and bool(_RAISES.search(last.line or "")) and not Path(last.filename).is_relative_to(_TORCH)


@functools.cache
def is_own(filename: str) -> bool:
    """Returns whether a file is of the user, or of an installed package other than torch and bamboo."""
    path = Path(filename)
    if filename.startswith("<") or any(path.is_relative_to(folder) for folder in _FOLDED):
        return False
    return not path.is_relative_to(_PYTHON) or _is_installed(filename)


def _is_installed(filename: str) -> bool:
    return any(folder in Path(filename).parts for folder in _PACKAGES)


def shown(filename: str) -> str:
    """Returns a path as short as it can be: from site-packages, or from the current folder, if it lies below."""
    _, installed, package = filename.rpartition("/site-packages/")
    try:
        return package if installed else str(Path(filename).relative_to(Path.cwd()))
    except (ValueError, OSError):  # it lies elsewhere, or the current folder is gone
        return filename


def _folded(frames: Sequence[FrameSummary]) -> Iterator[str]:
    """Yields the lines of the user's frames with their source, innermost first, and the number of the other frames."""
    own = [each for each in reversed(frames) if is_own(each.filename)]
    for frame in own:
        yield f"{shown(frame.filename)}:{frame.lineno}, in {frame.name}"
        if frame.line:
            yield f"    {frame.line}"
    if folded := len(frames) - len(own):
        yield f"... {counted(folded, 'frame')} of bamboo and torch"
