"""Requests to a launcher while its job runs: files ``<kind>-<hex>.json`` in its run folder.

Rules: a request is read once, answered by a record, and removed. It must be a regular file of this user without access
for others. Its size and its depth are bounded, and so is the number of requests of a look. No content of a file ends
the launcher: its reader catches every error.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from engine.core.errors import BambooError

MAX_BYTES = 65_536
REQUEST = "request-"  # the beginning of the name of a request for faults
_ENDING = ".json"
_MOST_DEEP = 8  # brackets in brackets; a fault has four
_MOST_FILES, _MOST_ANSWERS = 4096, 16  # of a look
_MOST_OF_REASON = 500  # characters
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?')


@dataclass(frozen=True, slots=True)
class RequestFile:
    """One request that waits for its answer."""

    path: Path

    @property
    def name(self) -> str:
        """The name of its file, by which its sender knows the answer."""
        return self.path.name

    def text(self) -> str:
        """Returns its text; raises ValueError if another user may have written it, or OSError."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                raise ValueError("expected a regular file of this user with mode 0600")
            data = os.read(fd, MAX_BYTES + 1)
        finally:
            os.close(fd)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES} bytes")
        return data.decode()


class RequestFiles:
    """The requests of one kind in the folder of one run; `beginning` is that of their names."""

    def __init__(self, folder: Path, beginning: str):
        self._folder, self._beginning = folder, beginning
        self._left_there: set[str] = set()  # the names of answered requests that could not be removed

    def new(self) -> list[RequestFile]:
        """Returns the requests to answer now; those of a folder that cannot be read wait."""
        try:
            with os.scandir(self._folder) as entries:
                names = [each.name for each in islice(entries, _MOST_FILES)]
        except OSError:
            return []
        found = (each for each in names if each.startswith(self._beginning) and each.endswith(_ENDING))
        waiting = sorted(each for each in found if each not in self._left_there)
        return [RequestFile(self._folder / each) for each in waiting[:_MOST_ANSWERS]]

    def remove(self, request: RequestFile) -> bool:
        """Removes an answered request; one that stays there is not answered again. Returns False if it was gone."""
        for remove in (os.unlink, os.rmdir):  # it may be an empty folder of its name
            try:
                remove(request.path)
            except FileNotFoundError:
                return False
            except OSError:
                continue
            return True
        self._left_there.add(request.name)
        return True


def reason_of(error: Exception) -> str:
    """Returns why a request is refused, in words."""
    is_told = isinstance(error, (BambooError, OSError, ValueError))
    return (str(error) if is_told else f"it cannot be read ({type(error).__name__})")[:_MOST_OF_REASON]


def json_of(text: str) -> Any:
    """Returns the values of a JSON text; raises ValueError if they are too deep, or for NaN or Infinity."""
    depth = 0
    for each in _TEXTS.sub("", text):
        depth += (each in "[{") - (each in "]}")
        if depth > _MOST_DEEP:
            raise ValueError(f"expected at most {_MOST_DEEP} brackets in brackets")
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"expected a finite number, found {name}")
