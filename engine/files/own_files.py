"""The files that bamboo writes into a folder of results, by name; every other file belongs to the user.

Rules: links are not followed, also where one takes the place of a folder meanwhile. A file counts by its name and
kind, so a user's file of another name is never listed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Union

from engine.core.history.step_files import FOLDER
from engine.files.atomic_write import open_below
from engine.files.run_folder import CHECKPOINTS_FOLDER, HOSTS_FOLDER, LATEST, RUN_NAME

# The name of an entry, as a pattern -> the entries of the folder, or one of the kinds below.
OwnNames = Mapping[str, Union[str, "OwnNames"]]
FILE, LINK, TREE = "file", "link", "tree"  # a tree: all that is in the folder

_TEMPORARY_NAME = r"\.bamboo-[0-9a-f]{16}\.tmp"
TEMPORARY: OwnNames = {rf"{_TEMPORARY_NAME}|\..+\.[0-9]+\.tmp|request-[0-9a-f]+\.json": FILE}
TEMPORARY_LINK: OwnNames = {_TEMPORARY_NAME: LINK}
_LOGS: OwnNames = {r"(worker-[0-9]+|store|etcd|(etcd-)?h[0-9]+)\.log": FILE, "etcd": TREE}
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
TWINS: OwnNames = {r"[0-9a-f]{32}\.csv": FILE, **TEMPORARY}
_CELLS: OwnNames = {RUN_NAME: RUN, "twins": TWINS, rf"{LATEST}|{_TEMPORARY_NAME}": LINK, r".+\.yaml": FILE}
MATRIX: OwnNames = {
    r"(results\.jsonl|report\.html|shrunk-.+\.yaml|lane-[0-9]+\.log)": FILE,
    "runs": _CELLS,
    **TEMPORARY,
}


def own_files(folder: Path, form: OwnNames) -> Iterator[Path]:
    """Yields the files of bamboo in a folder, and each of its folders behind the files in it; not `folder` itself."""
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        kind = next((kind for name, kind in form.items() if re.fullmatch(name, entry.name)), None)
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if kind == TREE:
                yield from _tree(path)
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
    """Deletes a folder and all that is in it, as far as possible; nothing if a part of its path is a link."""
    with contextlib.suppress(OSError), open_below(path.parent, below) as folder:
        shutil.rmtree(path.name, ignore_errors=True, dir_fd=folder)


def disk_bytes(path: Path) -> int:
    """Returns the bytes that an entry takes on disk, without the entries of a folder; 0 if it is gone."""
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _tree(folder: Path) -> Iterator[Path]:
    for inner, folders, files in os.walk(folder, topdown=False):  # it does not follow links
        yield from (Path(inner, name) for name in (*files, *folders))
    yield folder
