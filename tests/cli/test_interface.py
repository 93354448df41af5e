"""The interface of the program is the one that is written down: nobody changes an option or a record by accident."""

from __future__ import annotations

from pathlib import Path

from tests.cli.interface import interface


def test_the_interface_is_the_one_that_is_written_down() -> None:
    written = Path(__file__).with_name("interface.txt").read_text(encoding="utf-8")
    assert interface().splitlines() == written.splitlines(), "python -m tests.cli.interface > tests/cli/interface.txt"
