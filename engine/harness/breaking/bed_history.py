"""The history of a run on a bed: the folders of its hosts, merged, on the clock of this machine and with the strikes.

Rule: the clock of each host of a bed is ahead of this machine's by a known time, so strikes are told exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engine.core.checks.host_losses import HostStrike
from engine.core.evidence.chain import linked_lines
from engine.core.history.process_records import EndedRecord
from engine.core.history.record import Record, StampedRecord
from engine.core.history.record_lines import encoded
from engine.core.history.run_records import JobRecord
from engine.core.history.step_files import FOLDER, moved_entries, step_file
from engine.core.merging.event_order import on_clock
from engine.files.atomic_write import write_atomically
from engine.files.events_file import events_of, recorded
from engine.files.merging.host_folders import collect
from engine.files.run_folder import RunFolder


def write_history(
    folder: RunFolder, folders: Sequence[RunFolder], ahead_ns: Mapping[str, int], strikes: Sequence[HostStrike]
) -> dict[str, Any]:
    """Writes the history of a run into its folder, from the `folders` of its hosts; returns the parts of it as values.

    Raises:
        StorageError: a line is damaged, or the folder cannot be written.
    """
    told = collect(folders, folder.path)
    back_ns = ahead_ns[told["reference"]]
    merged = [*recorded(folder.events)]
    write_atomically(folder.events, linked_lines(map(encoded, _with_strikes(merged, back_ns, strikes))))
    for path in sorted((folder.path / FOLDER).iterdir()):
        if (named := step_file(path.name)) is None:
            continue
        data = path.read_bytes()
        if named.worker is not None:
            write_atomically(path, moved_entries(data, lambda at_ns: at_ns - back_ns))
        else:
            lines = events_of(b"\n" + data, path, -1)
            moved = (_back(each, back_ns) for each in lines if isinstance(each, StampedRecord))
            write_atomically(path, linked_lines(map(encoded, moved)))
    return told


def _with_strikes(merged: Sequence[Record], back_ns: int, strikes: Sequence[HostStrike]) -> Iterator[Record]:
    """Yields the records of the run with those of the strikes, without the end of the agents' command."""
    added = sorted((record for each in strikes for record in each.records()), key=lambda record: record.at_ns)
    for each in merged:
        if isinstance(each, EndedRecord):
            continue
        if not isinstance(each, StampedRecord):
            yield each
            continue
        moved = _back(each, back_ns)
        while added and added[0].at_ns <= moved.at_ns and not isinstance(each, JobRecord):
            yield added.pop(0)
        yield moved
    yield from added


def _back(record: StampedRecord, back_ns: int) -> StampedRecord:
    return on_clock(record, lambda at_ns: at_ns - back_ns)
