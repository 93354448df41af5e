"""Builds the double of NCCL with the C compiler of the machine, and tells what processes have done with it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.doubles import nccl_on_host
from tests.doubles.nccl_on_host import FOLDER, PLANTED, library_at

STAND_IN: Final = "_BAMBOO_NCCL_STAND_IN"
EAGER: Final = 64 << 10  # the least bytes of a message that waits for its receive
COMPILER: Final = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
WHY_NOT: Final = "" if COMPILER else "no C compiler, which builds the double of NCCL"
_SOURCE = Path(__file__).with_name("nccl_double.c")
_COUNTS = ("joins", "eager", "rendezvous", "revokes", "aborts", "remote_errors", "broken_off")


@cache
def built() -> bytes:
    """Returns the library, which is built once for each process of the tests."""
    with tempfile.TemporaryDirectory() as name:
        made = library_at(name)
        command = [str(COMPILER), "-O1", "-shared", "-fPIC", "-pthread", str(_SOURCE), "-o", str(made)]
        subprocess.run(command, check=True, timeout=60)
        return made.read_bytes()


class Double:
    """A folder with the double, for the runs of a test."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        library_at(str(folder)).write_bytes(built())
        self._num_copies = 0

    def copy(self) -> Path:
        """Returns a copy of the library; each that is loaded in one process is like that of a process of its own."""
        self._num_copies += 1
        found = self.folder / f"copy-{self._num_copies}"
        found.write_bytes(built())
        return found

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process uses the double."""
        return {STAND_IN: nccl_on_host.__name__, FOLDER: str(self.folder)}

    def has_modes(self, *, tells_deaths: bool = True, eager: int = EAGER) -> None:
        """Has processes that load the library from now on tell the end of a peer by an error, or not."""
        (self.folder / "modes").write_text(f"{tells_deaths:d} {eager}")

    @contextmanager
    def planted(self, mistake: str) -> Iterator[None]:
        """Has the workers that start in the block make a mistake of `planted_nccl.py`."""
        path = self.folder / PLANTED
        path.write_text(mistake)
        yield
        path.unlink()

    @contextmanager
    def in_environment(self) -> Iterator[Double]:
        """Has processes that start in the block use the double."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            yield self

    def forget(self) -> None:
        """Forgets the offences so far."""
        (self.folder / "offences").unlink(missing_ok=True)

    def offences(self) -> list[str]:
        """Returns the calls so far that break a rule of NCCL, each once, without the number of its process."""
        path = self.folder / "offences"
        lines = path.read_text().splitlines() if path.exists() else []
        return list(dict.fromkeys(line.partition(": ")[2] for line in lines))

    def counts(self) -> Mapping[str, int]:
        """Returns what was done so far, in all processes."""
        numbers = memoryview((self.folder / "counts").read_bytes()).cast("Q")
        return dict(zip(_COUNTS, numbers, strict=False))
