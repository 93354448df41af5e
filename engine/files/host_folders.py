"""Merges the folders of the hosts of one run into a folder with the history of the run: ``RUN/collected``.

Rules: the folders of the hosts are never changed. The merged folder is created anew each time; `bamboo report` and
`bamboo status` read it like any other. Two folders of one host count as one host, whose clock kept running. Other hosts
keep copies of a folder (``RUN/hosts/NAME``); files only grow, so the longest copy of a file counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.codec.records import decoded, encoded
from engine.core.errors import NothingMatchedError, Problem, StorageError, UserError
from engine.core.history.evidence import EVENTS, linked_lines
from engine.core.history.merging import HostRecords, MergedHistory, SharedClock, merged
from engine.core.history.process_records import EndedRecord, HostRecord, SealRecord, StoreRecord, on_clock
from engine.core.history.run_records import AuditRecord, CommitRecord, JobRecord, Record, StampedRecord
from engine.core.history.step_files import ENTRY_BYTES, FOLDER, moved_entries, step_file
from engine.files.atomic_write import make_folder, write_atomically
from engine.files.events_file import events_of, recorded
from engine.files.evidence import chain_flaws, seal_of
from engine.files.linked_lines import add_records
from engine.files.run_folder import RunFolder, find_run, kept_copies, run_names


class HostCopies:
    """The folder of a host and the copies of it that other hosts keep; `path` is the first of them.

    Folders are of the same agent if their events begin with the same line, which has the time of its start.
    """

    def __init__(self, paths: Sequence[Path]):
        self.paths = tuple(paths)
        self.path = paths[0]

    @property
    def events(self) -> Path:
        """The longest file of its events."""
        return max((path / EVENTS for path in self.paths), key=_size)

    def steps(self) -> dict[str, Path]:
        """Returns the longest file of each name in which it has actions or hashes."""
        longest: dict[str, Path] = {}
        for folder in (path / FOLDER for path in self.paths):
            for file in sorted(folder.iterdir()) if folder.is_dir() else ():
                if step_file(file.name):
                    longest[file.name] = max(longest.get(file.name, file), file, key=_size)
        return longest


def by_host(folders: Sequence[Path]) -> list[HostCopies]:
    """Returns the folders, each with its copies."""
    by_line: dict[bytes, list[Path]] = {}
    for path in folders:
        with (path / EVENTS).open("rb") as file:
            by_line.setdefault(file.readline(), []).append(path)
    return [HostCopies(paths) for paths in by_line.values()]


def _size(path: Path) -> int:
    return path.stat().st_size


COLLECTED = "collected"
_COPIED = ("trajectory.csv", "scenario.yaml", "twin/trajectory.csv")
_HEAD_BYTES = 1 << 16  # the job and the host stand in it


def folders_of(results: Path, run: str, paths: Sequence[Path]) -> list[RunFolder]:
    """Returns the folder of a run, those of its other hosts, `paths` or else all in `results`, and the copies.

    Raises NothingMatchedError if there is no such run, or a given folder has no events.
    """
    first = find_run(results, run)
    if not paths:
        run_id = _id_of_folder(first)
        near = [RunFolder(first.path.parent / name) for name in run_names(first.path.parent)]
        others = [folder for folder in near if run_id and folder.path != first.path]
        paths = [folder.path for folder in others if _id_of_folder(folder) == run_id]
    own = list(dict.fromkeys([first.path.resolve(), *(path.resolve() for path in paths)]))
    for path in own:
        if not RunFolder(path).events.is_file():
            raise NothingMatchedError(f"{str(path)!r} is not a run folder: it has no events.jsonl")
    copies = [copy for path in own for copy in kept_copies(path)]
    return [RunFolder(path) for path in dict.fromkeys([*own, *copies])]


def _id_of_folder(folder: RunFolder) -> str:
    """Returns the name of a run in its store; an empty string if its first records do not have it."""
    try:
        with folder.events.open("rb") as file:
            return _run_id([*events_of(file.read(_HEAD_BYTES), folder.events)])
    except (OSError, StorageError):  # a folder of another bamboo, or without events, is not of this run
        return ""


def collect(folders: Sequence[RunFolder], output: Path | None = None) -> dict[str, Any]:
    """Merges the folders of hosts into `output`, by default ``collected`` in the first one; returns its parts.

    Raises:
        UserError: the folders are of different runs.
        StorageError: a line, which the message names, is damaged; or the folder cannot be written.
    """
    copies = {host.path: host for host in by_host([folder.path for folder in folders])}
    files = {path: _whole_records(host.events) for path, host in copies.items()}
    _refuse_other_runs(files)
    nodes = {
        path: next((record.node for record in records if isinstance(record, HostRecord) and record.node), path.name)
        for path, records in files.items()
    }
    hosts = [_host(node, files, nodes, copies) for node in dict.fromkeys(nodes.values())]
    history = merged(hosts, decoded)
    below = folders[0].path if output is None else output
    is_whole, output = output is None, folders[0].path / COLLECTED if output is None else output
    make_folder(output / FOLDER, below)
    own = (record for record in history.records if not isinstance(record, SealRecord))  # which is for a host's folder
    write_atomically(output / "events.jsonl", linked_lines(map(encoded, own)))
    _write_steps(output / FOLDER, nodes, copies, history.clock)
    parts = {"run_dir": str(output), "reference": history.reference, "hosts": _hosts(history, hosts, nodes)}
    _write_rest(output, files, parts)
    if is_whole:
        add_records(output / "events.jsonl", seal_of(output))
    ended = next((record for record in reversed(history.records) if isinstance(record, EndedRecord)), None)
    return parts | {"records": len(history.records), "outcome": ended.outcome if ended else None}


def _whole_records(events: Path) -> list[Record]:
    """Returns the records of a file; raises StorageError if a record was changed or removed."""
    if flaws := chain_flaws(events.parent, events.name)[1]:
        raise StorageError(f"{events.parent}/{flaws[0]}")
    return [*recorded(events)]


def _refuse_other_runs(files: Mapping[Path, Sequence[Record]]) -> None:
    """Raises UserError with each folder whose job or run ID differs from the first."""
    (first, records), *others = files.items()
    run_id, job, problems = _run_id(records), HostRecords("", records).job, []
    for path, theirs in others:
        its_id, its_job = _run_id(theirs), HostRecords("", theirs).job
        if run_id and its_id and its_id != run_id:
            problems.append(Problem("FOLDER", f"a folder of run {run_id!r}", f"one of {its_id!r}", source=str(path)))
        elif job is not None and its_job is not None and job != its_job:
            ours, its = asdict(job), asdict(its_job)
            name = next(name for name in ours if ours[name] != its[name])
            hint = f"{name} is {ours[name]!r} in {first.name}"
            place = f"{path / 'events.jsonl'}"
            problems.append(Problem(name, "the job of the same run", repr(its[name]), hint, place, 1, 1))
    if problems:
        raise UserError(problems)


def _run_id(records: Iterable[Record]) -> str:
    ids = (record.run_id for record in records if isinstance(record, HostRecord | StoreRecord))
    return next(filter(None, ids), "")


def _host(
    node: str, files: Mapping[Path, list[Record]], nodes: Mapping[Path, str], copies: Mapping[Path, HostCopies]
) -> HostRecords:
    """Returns the records of all folders of a host, the oldest folder first."""
    own = sorted((path for path, of in nodes.items() if of == node), key=lambda path: _begin_ns(files[path]))
    is_cut = any(_is_cut(copies[path].events) for path in own)
    return HostRecords(node, [record for path in own for record in files[path]], is_cut)


def _begin_ns(records: Iterable[Record]) -> int:
    return next((record.at_ns for record in records if isinstance(record, StampedRecord)), 0)


def _is_cut(events: Path) -> bool:
    with events.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def _write_steps(
    output: Path, nodes: Mapping[Path, str], copies: Mapping[Path, HostCopies], clock: SharedClock
) -> None:
    """Replaces the files of the steps with those of all hosts, on the shared clock."""
    for old in output.iterdir():
        if step_file(old.name):
            old.unlink()
    sources: dict[str, list[tuple[Path, str]]] = {}
    for path, node in nodes.items():
        for name, file in copies[path].steps().items() if clock.knows(node) else ():
            sources.setdefault(name, []).append((file, node))
    for name, parts in sorted(sources.items()):
        if (kind := step_file(name)) is not None and kind.worker is not None:
            data = b"".join(_actions(file, _clock_of(node, clock)) for file, node in parts)
        else:
            data = _hashes(parts, clock)
        write_atomically(output / name, data)


def _actions(path: Path, on_shared_clock: Callable[[int], int]) -> bytes:
    data = path.read_bytes()
    whole = data[: len(data) // ENTRY_BYTES * ENTRY_BYTES]  # a partial one, left by a crash, would shift later ones
    return moved_entries(whole, on_shared_clock)


def _hashes(parts: Iterable[tuple[Path, str]], clock: SharedClock) -> bytes:
    """Returns the hashes, each once: the worker's host has recorded them, and so has each coordinating host."""
    once: dict[tuple[Any, ...], str] = {}
    for path, node in parts:
        for record in events_of(b"\n" + path.read_bytes(), path, -1):
            if isinstance(record, AuditRecord):
                moved = on_clock(record, _clock_of(node, clock))
                once.setdefault((record.of, record.step, record.pipeline, str(record.rows)), encoded(moved))
    return linked_lines(once.values()).encode()


def _clock_of(node: str, clock: SharedClock) -> Callable[[int], int]:
    return lambda at_ns: clock.at(node, at_ns).at_ns


def _hosts(history: MergedHistory, hosts: Iterable[HostRecords], nodes: Mapping[Path, str]) -> list[dict[str, Any]]:
    """Returns the folders, records, time uncertainty and incompleteness of each host."""
    entries = []
    for host in hosts:
        within_ms = None
        if history.clock.knows(host.node):
            times = (history.clock.at(host.node, record.at_ns) for record in host.of(StampedRecord))
            within_ms = max((time.within_ns for time in times), default=0) / 1e6
        own = [str(path) for path, node in nodes.items() if node == host.node]
        why = list(history.incomplete.get(host.node, ()))
        more = {"records": len(host.records), "within_ms": within_ms, "incomplete": why}
        entries.append({"node": host.node, "folders": own, **more})
    nodes_there = {entry["node"] for entry in entries}
    for node, why_absent in history.incomplete.items():
        if node not in nodes_there:
            absent = {"records": 0, "within_ms": None, "incomplete": list(why_absent)}
            entries.append({"node": node, "folders": [], **absent})
    return entries


def _write_rest(output: Path, files: Mapping[Path, Sequence[Record]], parts: dict[str, Any]) -> None:
    """Writes run.json with the hosts, and the files that only the last coordinating host has."""
    by_end = sorted(files, key=lambda path: sum(isinstance(record, CommitRecord | JobRecord) for record in files[path]))
    plain: dict[str, Any] = {}
    for path in by_end:
        if (path / "run.json").is_file():
            plain = json.loads((path / "run.json").read_text(encoding="utf-8"))
        for name in _COPIED:
            if (path / name).is_file():
                make_folder((output / name).parent, output)
                write_atomically(output / name, (path / name).read_bytes())
    write_atomically(output / "run.json", json.dumps(plain | {"collected": parts}, indent=2) + "\n")
