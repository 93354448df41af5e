"""Faults of the disk under checkpoints: a worker adds them to its own disk, and confirms them when they act."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from engine.core.errors import StorageError
from engine.files.checkpoint_disk import DiskTroubles
from engine.files.checkpoint_folder import checkpoints_at
from engine.runtime.faults.registry import WorkerFaultContext, registered
from tests.files.made_checkpoints import save


def strike(name: str, troubles: DiskTroubles | None, told: list[str], **given: Any) -> None:
    kind = registered()[name]
    parameters = kind.kind.with_defaults(given)
    none = cast(Any, None)
    kind.strike(WorkerFaultContext("f", parameters, None, none, told.append, none, none, none, troubles))


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        ("disk-full", {"room": 300}, "No space left on device"),
        ("disk-error", {}, "Input/output error"),
        ("disk-error", {"call": "write"}, "Input/output error"),
    ],
)
def test_a_disk_that_fails_costs_one_checkpoint(tmp_path: Path, name: str, given: dict[str, Any], reason: str) -> None:
    troubles, told = DiskTroubles(), list[str]()
    folder = checkpoints_at(tmp_path, troubles=troubles)
    strike(name, troubles, told, **given)
    with pytest.raises(StorageError, match=reason):
        save(folder, 1)
    assert len(told) == 1
    newer = save(folder, 1)
    assert folder.newest_good().name == newer
    assert len(told) == 1


def test_damage_is_silent_until_it_is_read(tmp_path: Path) -> None:
    troubles, told = DiskTroubles(), list[str]()
    folder = checkpoints_at(tmp_path, troubles=troubles)
    older = save(folder, 0)
    strike("damage", troubles, told, byte=250)
    save(folder, 1)
    assert len(told) == 1
    found = folder.newest_good()
    assert found.name == older
    assert told[0].split()[3] in found.refused[0].reason


def test_a_job_without_checkpoints_gives_no_sign() -> None:
    told = list[str]()
    strike("disk-full", None, told)
    assert told == []
