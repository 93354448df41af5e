"""The folder of one run, ``results/<time>-<name>-<hex>/``, and the link ``results/latest`` to the newest.

Rules: only its user can open a run folder (mode 0700). The link and run.json are replaced atomically, so a reader never
finds the link missing or the file half written. Only bamboo's own link is replaced: one whose target is the plain name
of a run. A link in a folder of results is not a run. A run folder may come from elsewhere, so its files have maximum
sizes; records are appended, so a large file that consists mostly of holes was never written by a run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Union

from engine.core.errors import NothingMatchedError, Problem, StorageError, UserError, ensure, nearest
from engine.core.history.evidence import EVENTS
from engine.core.history.step_files import FOLDER
from engine.core.units import finite
from engine.files.atomic_write import BLOCK_BYTES, is_hollow, open_below, storage_errors

LATEST = "latest"
RUN_NAME = r"[0-9]{8}-[0-9]{6}-[a-z0-9][a-z0-9._-]*-[0-9a-f]{4}"
CHECKPOINTS_FOLDER = "checkpoints"
HOSTS_FOLDER = "hosts"  # of the records that other hosts have shipped
_MOST_STEP_BYTES = 1 << 26  # of a file of steps, which has about a megabyte
_MOST_FACT_BYTES = 1 << 24  # of run.json and scenario.yaml
_TIME = "%Y%m%d-%H%M%S"
_TWIN = "twin"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of the files of one run."""

    path: Path

    @property
    def events(self) -> Path:
        """The events of the run, one JSON object per line."""
        return self.path / EVENTS

    @property
    def trajectory(self) -> Path:
        """The hashes and losses of the run, one row per (step, layer)."""
        return self.path / "trajectory.csv"

    @property
    def run_json(self) -> Path:
        """The resolved job, the facts of the host and the outcome."""
        return self.path / "run.json"

    @property
    def logs(self) -> Path:
        """The folder of the workers' output."""
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        """The folder of its checkpoints, unless the job names another place."""
        return self.path / CHECKPOINTS_FOLDER

    @property
    def outputs(self) -> Path:
        """The folder of the outputs of a prediction, a file for each microbatch."""
        return self.path / "outputs"

    @property
    def twin(self) -> RunFolder:
        """The folder of its fault-free twin."""
        return RunFolder(self.path / _TWIN)

    @property
    def is_of_twin(self) -> bool:
        """Whether it is the folder of a twin."""
        return self.path.name == _TWIN

    @property
    def is_own(self) -> bool:
        """Whether it belongs to the user of this process."""
        return self.path.stat().st_uid == os.geteuid()


def run_json_text(mapping: Mapping[str, object]) -> str:
    """Returns the text of run.json; a number that is not finite becomes null."""
    return json.dumps(finite(mapping), indent=2, allow_nan=False) + "\n"


def create_run_folder(
    results: Path, name: str, now: datetime, hex4: str, say: Callable[[str], object] = str
) -> RunFolder:
    """Creates a run folder with logs in `results`, and points ``latest`` at it; raises StorageError.

    If ``latest`` cannot be changed, or is not bamboo's, it stays, and `say` gets a line about it.
    """
    folder = RunFolder(results / f"{now:{_TIME}}-{name}-{hex4}")
    ensure(re.fullmatch(RUN_NAME, folder.path.name) is not None, f"no run can be called {folder.path.name!r}")
    try:
        if results.exists() and not results.is_dir():
            raise StorageError(f"results folder {str(results)!r} is a file (choose another with --results)")
        results.mkdir(parents=True, exist_ok=True)
        folder.path.mkdir(mode=0o700)
        folder.logs.mkdir(mode=0o700)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename!r}"
        raise StorageError(f"results folder {str(results)!r} cannot be used: {reason} (try --results)") from error
    try:
        _point_latest(results, folder.path.name)
    except StorageError as error:
        say(f"{error}; this run is {folder.path.name}")
    return folder


def _point_latest(results: Path, target: str) -> None:
    link = results / LATEST
    if os.path.lexists(link) and not latest_name(results):
        hint = "rename it, or choose another folder with --results"
        raise StorageError(f"{str(link)!r} is not a link that bamboo made, and is left alone ({hint})")
    temporary = results / f".bamboo-{os.urandom(8).hex()}.tmp"
    with storage_errors("change", link):
        temporary.symlink_to(target)
        try:
            temporary.replace(link)
        except OSError:
            temporary.unlink()
            raise


def latest_name(results: Path) -> str:
    """Returns the name of the run that ``latest`` points to; empty without the link, or if it is not bamboo's own."""
    try:
        target = os.readlink(results / LATEST)
    except OSError:
        return ""
    return target if re.fullmatch(RUN_NAME, target) else ""


def point_latest_to_newest(results: Path) -> None:
    """Points ``latest`` at the newest run if its run is gone, or deletes it; raises StorageError."""
    name, names = latest_name(results), run_names(results)
    if not name or name in names:
        return
    if names:
        _point_latest(results, names[-1])
    else:
        with storage_errors("change", results / LATEST):
            (results / LATEST).unlink()


def find_run(results: Path, run: str | None = None) -> RunFolder:
    """Returns the run whose folder's name is `run` or begins with it; None and ``latest`` stand for the newest run.

    `run` may be the path of a run folder too. The newest run is that of the link, or the last one by name if the link
    is not bamboo's own.

    Raises:
        NothingMatchedError: there is no such run.
        UserError: several names begin with `run`.
    """
    if run and Path(run).is_dir():
        return RunFolder(Path(run).resolve())
    names = run_names(results)
    if run is None or run == LATEST:
        run = latest_name(results) or next(reversed(names), "")
        if not run:
            raise NothingMatchedError(f"no run in {str(results)!r} yet")
    matches = [run] if run in names else [name for name in names if name.startswith(run)]
    if not matches:
        hint = nearest(run, [*names, LATEST]) or f"`bamboo list runs --results {shlex.quote(str(results))}` shows them"
        raise NothingMatchedError(f"no run {run!r} in {str(results)!r}", hint)
    if len(matches) > 1:
        hint = f"{len(matches)} begin so, the newest is {matches[-1]!r}"
        raise UserError([Problem("run", "the name of one run", repr(run), hint)])
    return RunFolder(results / matches[0])


def started_at(name: str) -> datetime:
    """Returns the local time in the name of a run's folder, or of a matrix's."""
    return datetime.strptime(name[:15], _TIME)


def run_names(results: Path) -> list[str]:
    """Returns the names of all run folders, the oldest first; an absent `results` has none, and a link is none."""
    if not results.is_dir():
        return []
    with os.scandir(results) as entries:
        named = [entry for entry in entries if re.fullmatch(RUN_NAME, entry.name)]
        return sorted(entry.name for entry in named if entry.is_dir(follow_symlinks=False))


def kept_copies(run: Path) -> list[Path]:
    """Returns the copies of the folders of other hosts in a run folder."""
    hosts = run / HOSTS_FOLDER
    copies = sorted(hosts.iterdir()) if hosts.is_dir() else []
    return [copy for copy in copies if not copy.is_symlink() and (copy / EVENTS).is_file()]


def refuse_size(path: Path, facts: os.stat_result) -> None:
    """Raises StorageError for a file that is larger than a run writes it, or that consists mostly of holes."""
    size, most = facts.st_size, _MOST_FACT_BYTES if path.suffix in (".json", ".yaml") else None
    if path.parent.name == FOLDER:
        most = _MOST_STEP_BYTES
    if most is not None and size > most:
        raise StorageError(f"{path}: {size:,} bytes, and no run writes more than {most:,} into it")
    if is_hollow(facts):
        there = facts.st_blocks * BLOCK_BYTES
        raise StorageError(f"{path}: {size:,} bytes, of which {there:,} are on the disk: no run wrote it")


# The files that bamboo writes into a folder of results, by name; every other file belongs to the user.
#
# Rules: links are not followed, even if one replaces a folder meanwhile. A file counts by its name and kind, so a
# user's file of another name is never listed.

# The name of an entry, as a pattern -> the entries of the folder, or one of the kinds below.
OwnNames = Mapping[str, Union[str, "OwnNames"]]
FILE, LINK, TREE = "file", "link", "tree"  # a tree: all that is in the folder

_TEMPORARY_NAME = r"\.bamboo-[0-9a-f]{16}\.tmp"
TEMPORARY: OwnNames = {rf"{_TEMPORARY_NAME}|\..+\.[0-9]+\.tmp|request-[0-9a-f]+\.json": FILE}
TEMPORARY_LINK: OwnNames = {_TEMPORARY_NAME: LINK}
_LOGS: OwnNames = {r"(worker-[0-9]+|store|etcd|(etcd-)?h[0-9]+)\.log|worker-[0-9]+\.out": FILE, "etcd": TREE}
_STEPS: OwnNames = {r"actions-[0-9]+-[0-9]+\.bin|hashes-[0-9]+\.jsonl": FILE}
CHECKPOINTS: OwnNames = {
    r"step-[0-9]{8,12}": {
        r"layer-[0-9]{4,8}(\.shard-[0-9]+-of-[0-9]+)?\.[0-9a-f]{16}\.safetensors|manifest-[0-9a-f]{16}\.json": FILE,
        _TEMPORARY_NAME: FILE,
    }
}
_SESSION: OwnNames = {r"events\.jsonl": FILE, "logs": _LOGS, FOLDER: _STEPS}
_OF_HOST: OwnNames = {
    r"(run\.json|trajectory\.csv|scenario\.yaml|report\.html)": FILE,
    CHECKPOINTS_FOLDER: CHECKPOINTS,
    "twin": {r"trajectory\.csv": FILE, **_SESSION, **TEMPORARY},
    "collected": {
        "twin": {r"trajectory\.csv": FILE, **TEMPORARY},
        r"(run\.json|trajectory\.csv|scenario\.yaml|report\.html)": FILE,
        **_SESSION,
        **TEMPORARY,
    },
    HOSTS_FOLDER: {r"[A-Za-z0-9][A-Za-z0-9._-]*": {r"events\.jsonl": FILE, FOLDER: _STEPS}},
    **_SESSION,
    **TEMPORARY,
}
RUN: OwnNames = {  # `bed` has the folders of the hosts of a bed, which write as any others
    "bed": {r"h[0-9]+": {RUN_NAME: _OF_HOST, LATEST: LINK, **TEMPORARY_LINK}},
    **_OF_HOST,
}
# The run of another launcher's job: `job` is the folder that its command may fill.
_OF_COMMAND: OwnNames = {
    r"events\.jsonl": FILE,
    "logs": {r"command\.log": FILE},
    "progress": {r"[0-9]+-[0-9]+(\.fingerprints)?\.jsonl": FILE},
    "job": TREE,
    **TEMPORARY,
}
EXTERNAL_RUN: OwnNames = {r"run\.json|report\.html": FILE, "twin": _OF_COMMAND, **_OF_COMMAND}
TWINS: OwnNames = {r"[0-9a-f]{32}\.csv": FILE, **TEMPORARY}
_CELLS: OwnNames = {RUN_NAME: RUN, "twins": TWINS, rf"{LATEST}|{_TEMPORARY_NAME}": LINK, r".+\.yaml": FILE}
MATRIX: OwnNames = {
    r"(results\.jsonl|report\.html|shrunk-.+\.yaml|lane-[0-9]+\.log)": FILE,
    "runs": _CELLS,
    **TEMPORARY,
}


def own_files(folder: Path, form: OwnNames) -> Iterator[Path]:
    """Yields bamboo's files in a folder, and each inner folder after the files in it; not `folder` itself."""
    for entry in sorted(os.scandir(folder), key=attrgetter("name")):
        kind = next((kind for name, kind in form.items() if re.fullmatch(name, entry.name)), None)
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if kind == TREE:
                for inner, folders, files in os.walk(path, topdown=False):  # which does not follow links
                    yield from (Path(inner, name) for name in (*files, *folders))
                yield path
            elif isinstance(kind, Mapping):
                yield from own_files(path, kind)
                yield path
        elif (kind == LINK and entry.is_symlink()) or (kind == FILE and entry.is_file(follow_symlinks=False)):
            yield path


def delete_entry(path: Path, below: Path) -> None:
    """Deletes a file, a link or an empty folder; raises OSError if a part of its path after `below` is a link."""
    with open_below(path.parent, below) as folder:
        is_folder = stat.S_ISDIR(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode)
        (os.rmdir if is_folder else os.unlink)(path.name, dir_fd=folder)


def delete_tree(path: Path, below: Path) -> None:
    """Deletes a folder with its contents, as far as possible; nothing if a part of its path is a link."""
    with contextlib.suppress(OSError), open_below(path.parent, below) as folder:
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=folder)


def disk_bytes(path: Path) -> int:
    """Returns the bytes that an entry takes on disk, without the entries of a folder; 0 if it is gone."""
    try:
        return path.lstat().st_blocks * BLOCK_BYTES
    except OSError:
        return 0
