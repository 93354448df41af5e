"""The checkpoints of a worker: the state of the boundary, every bit and stride, while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.core.checkpoint_rules import KeptMessage, StateShare, UnkeptMessage
from engine.core.errors import StorageError
from engine.core.manifest import Part
from engine.core.protocol.worker_state import Keep
from engine.files.checkpoint_folder import checkpoints_at
from engine.runtime.checkpoint import writer
from engine.runtime.checkpoint import writer as snapshot
from engine.runtime.checkpoint.loader import LayerImage, tensors_of
from engine.runtime.checkpoint.writer import CheckpointWriter, state_of
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.state_hash import hash_tensors
from tests.runtime.small_jobs import ALL_KINDS, NORMED, small_job
from tests.runtime.test_layer_file import unhashed
from tests.runtime.test_state_transfer import JOBS, SLOT, changed, trained

ALONE = NORMED | {"redundancy": "none"}  # no worker can take over: its buffers are live
MOMENTUM = ALONE | {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9}}


def bits(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Any, ...]]:
    return {name: (each.dtype, each.shape, each.stride(), hash_tensors([("", each)])) for name, each in tensors}


def expected(replicas: Replicas) -> dict[int, dict[str, tuple[Any, ...]]]:
    """Returns the state of each layer at the boundary by the names of a checkpoint, in another way than the product."""
    stage = replicas.stages[SLOT]
    found: dict[int, dict[str, tuple[Any, ...]]] = {}
    for index, layer in stage.layers.items():
        named = [(f"weight/{name}", each.detach()) for name, each in layer.named_parameters()]
        for name, state in stage.optimizers[index].state.items():
            named += [(f"optimizer/{name}/{key}", tensor) for key, tensor in state.items()]
        own = stage.buffers()
        for pipeline, kept in enumerate(stage.boundary or (own,)):
            for name, buffer in layer.named_buffers():
                at = next(number for number, each in enumerate(own) if each is buffer)
                named.append((f"buffer/{pipeline}/{name}", kept[at]))
        found[index] = bits((name, tensor.clone() if tensor.is_contiguous() else tensor) for name, tensor in named)
    return found


def disturb(replicas: Replicas) -> None:
    """Changes all that the next step changes."""
    stage = replicas.stages[SLOT]
    with torch.no_grad():
        for buffer in stage.buffers():
            overwrite(buffer, changed(buffer, 1))
        for index, layer in stage.layers.items():
            for parameter in layer.parameters():
                parameter.zero_()
            for named in stage.optimizers[index].state.values():
                for tensor in named.values():
                    tensor.zero_()


class Told:
    """Stands for the control of a worker."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.news = threading.Event()

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def wake(self) -> None:
        self.news.set()

    def wait_until(self, look: Any) -> Any:
        while (found := look()) is None:
            assert self.news.wait(20)
            self.news.clear()
        return found


def written(replicas: Replicas, folder: Path, told: Told | None = None) -> tuple[CheckpointWriter, Told]:
    told = told or Told()
    return CheckpointWriter(told, replicas, str(folder)), told  # type: ignore[arg-type]


def read_back(folder: Path, told: Told, step: int = 7) -> dict[int, dict[str, tuple[Any, ...]]]:
    checkpoints = checkpoints_at(str(folder))
    parts: list[Part] = [each.part for each in told.messages if isinstance(each, KeptMessage) and each.step == step]
    kept = {part.layer: (part, checkpoints._storage.read(f"step-{step:08d}/{part.file}", part.size)) for part in parts}
    return {layer: bits(tensors_of(unhashed(data, part.strides)).items()) for layer, (part, data) in kept.items()}


def check_kept(values: dict[str, Any], folder: Path) -> None:
    """Asserts that a checkpoint has the bits of the boundary though the next step changes all as soon as it may."""
    replicas = trained(small_job(**values), 2)
    wanted = expected(replicas)
    checkpoints, told = written(replicas, folder)
    checkpoints.keep(Keep(7, (StateShare(SLOT),)))
    for buffer in replicas.stages[SLOT].buffers():  # a forward does not wait for the copy
        overwrite(buffer, changed(buffer, 3))
    checkpoints.join_copy()
    disturb(replicas)
    checkpoints.join_writes()
    assert read_back(folder, told) == wanted
    assert not [each for each in told.messages if isinstance(each, UnkeptMessage)]


@pytest.mark.parametrize("name", JOBS)
def test_a_checkpoint_has_every_bit_and_stride_of_the_boundary(name: str, tmp_path: Path) -> None:
    check_kept(JOBS[name], tmp_path / "kept")


@pytest.mark.parametrize("values", [ALONE, MOMENTUM, ALL_KINDS | {"redundancy": "none"}])
def test_live_buffers_are_copied_at_once(values: dict[str, Any], tmp_path: Path) -> None:
    check_kept(values, tmp_path / "kept")


def test_planted_live_buffers_that_are_not_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    buffers_of = snapshot._buffers_of

    def live(stage: Any, *where: Any) -> Any:
        monkeypatch.setattr(snapshot, "copies_of", lambda named: named)
        found = buffers_of(stage, *where)
        monkeypatch.setattr(snapshot, "copies_of", copies_of)
        return found

    def late(state: snapshot.LayerState, *image: Any) -> Any:
        time.sleep(0.3)  # the forwards of the next step change the buffers meanwhile
        return copied(state, *image)

    copies_of, copied = snapshot.copies_of, snapshot.LayerState.copied
    monkeypatch.setattr(snapshot, "_buffers_of", live)
    monkeypatch.setattr(snapshot.LayerState, "copied", late)
    with pytest.raises(AssertionError):
        check_kept(ALONE, tmp_path / "kept")


def test_planted_lost_strides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = lambda tensors: LayerImage([(n, t.contiguous()) for n, t in tensors])  # noqa: E731
    monkeypatch.setattr(snapshot, "LayerImage", plain)
    with pytest.raises(AssertionError):
        check_kept(ALL_KINDS, tmp_path / "kept")


def test_planted_a_missing_moment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = snapshot._own_tensors
    without = lambda *words: ((name, each) for name, each in own(*words) if "momentum" not in name)  # noqa: E731
    monkeypatch.setattr(snapshot, "_own_tensors", without)
    with pytest.raises(AssertionError):
        check_kept(MOMENTUM, tmp_path / "kept")


def test_planted_a_step_that_does_not_wait_for_the_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(CheckpointWriter, "join_copy", lambda self: None)
    begin = threading.Event()
    copied = snapshot.LayerState.copied
    monkeypatch.setattr(snapshot.LayerState, "copied", lambda *words: (begin.wait(20), copied(*words))[1])
    join = CheckpointWriter.join_writes

    def joined(self: CheckpointWriter) -> None:
        begin.set()
        join(self)

    monkeypatch.setattr(CheckpointWriter, "join_writes", joined)
    with pytest.raises(AssertionError):
        check_kept(ALONE, tmp_path / "kept")


def test_buffers_that_two_modules_share_are_written_once() -> None:
    replicas = trained(small_job(**NORMED), 1)
    for state in state_of(StateShare(SLOT), replicas.stages):
        names = [name for name, _ in (*state.live, *state.fixed)]
        assert len(names) == len(set(names))
        layer = replicas.stages[SLOT].layers[state.layer]
        assert sum(name.startswith("buffer/0/") for name in names) == len(list(layer.buffers()))


def test_a_disk_that_refuses_is_told_and_the_next_checkpoint_is_written(tmp_path: Path) -> None:
    replicas = trained(small_job(**NORMED), 1)
    checkpoints, told = written(replicas, tmp_path / "kept")
    (tmp_path / "kept").write_text("no folder")
    checkpoints.keep(Keep(6, (StateShare(SLOT),)))
    checkpoints.join_writes()
    (unkept,) = told.messages
    assert isinstance(unkept, UnkeptMessage)
    assert unkept.step == 6
    (tmp_path / "kept").unlink()
    checkpoints.keep(Keep(7, (StateShare(SLOT),)))
    checkpoints.join_writes()
    assert read_back(tmp_path / "kept", told) == expected(replicas)


def test_a_third_copy_finds_no_room_while_two_wait_for_a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(writer, "_ROOM_S", 0.05)
    replicas = trained(small_job(**NORMED), 1)
    checkpoints, told = written(replicas, tmp_path / "kept")
    before = set(threading.enumerate())  # of other tests of this process
    disk = checkpoints._last.written
    disk.clear()  # as if it did not answer
    for step in (5, 6, 7, 8):
        checkpoints.keep(Keep(step, (StateShare(SLOT),)))
        checkpoints.join_copy()
        monkeypatch.setattr(writer, "_ROOM_S", 60.0 if step == 7 else 0.05)  # the next one does not wait again
    assert [(type(each), each.step) for each in told.messages] == [(UnkeptMessage, 7), (UnkeptMessage, 8)]
    threads = [each for each in set(threading.enumerate()) - before if each.name == "checkpoint"]
    for each in threads:
        each.join(0.1)
    assert sum(each.is_alive() for each in threads) == 2, "no thread stays for a checkpoint that is not kept"
    disk.set()
    checkpoints.join_writes()
    steps = [each.step for each in told.messages if isinstance(each, KeptMessage)]
    assert (set(steps), steps) == ({5, 6}, sorted(steps)), "a newer checkpoint that is whole replaces an older one"


def test_a_copy_waits_for_room_only_while_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoints, _ = written(trained(small_job(**ALONE), 1), tmp_path)
    checkpoints._room = threading.Semaphore(0)
    alarm = threading.Timer(0.1, checkpoints._room.release)
    alarm.start()
    with checkpoints._given_room():
        alarm.join()
    assert checkpoints._room.acquire(blocking=False)
    for room_s in (0.0, 3600.0):  # the second time it does not wait
        monkeypatch.setattr(writer, "_ROOM_S", room_s)
        with pytest.raises(StorageError, match="were not written within"), checkpoints._given_room():
            pass


def test_no_step_waits_for_a_store_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replicas = trained(small_job(**NORMED), 1)
    checkpoints, told = written(replicas, tmp_path / "kept")
    (tmp_path / "kept").write_text("no folder")
    checkpoints.keep(Keep(4, (StateShare(SLOT),)))
    checkpoints.join_writes()
    disk = checkpoints._last.written
    disk.clear()  # the next two try again, and a call takes its time
    for step in (5, 6, 7):
        checkpoints.keep(Keep(step, (StateShare(SLOT),)))
        checkpoints.join_copy()  # would wait for longer than this test may take
    assert [(type(each), each.step) for each in told.messages] == [(UnkeptMessage, 4), (UnkeptMessage, 7)]
    disk.set()
    checkpoints.join_writes()


def test_a_step_waits_for_the_copy_of_its_own_checkpoint_though_an_older_one_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replicas = trained(small_job(**NORMED), 1)
    checkpoints, told = written(replicas, tmp_path / "kept")
    disk, room, copied = checkpoints._last.written, threading.Event(), snapshot.LayerState.copied
    disk.clear()  # the older one is copied, and waits for it
    checkpoints.keep(Keep(5, (StateShare(SLOT),)))
    checkpoints.join_copy()
    monkeypatch.setattr(snapshot.LayerState, "copied", lambda *words: (room.wait(20), copied(*words))[1])
    checkpoints.keep(Keep(6, (StateShare(SLOT),)))
    waits = threading.Thread(target=checkpoints.join_copy)
    waits.start()
    disk.set()
    told.wait_until(lambda: any(each.step == 5 for each in told.messages) or None)
    waits.join(0.1)
    assert waits.is_alive()
    room.set()
    waits.join()
    checkpoints.join_writes()
    assert {type(each) for each in told.messages} == {KeptMessage}


def test_the_memory_of_a_copy_serves_the_next_checkpoint_soon_after(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replicas = trained(small_job(**ALL_KINDS), 1)
    checkpoints, told = written(replicas, tmp_path / "kept")

    def keep(step: int) -> list[int]:
        checkpoints.keep(Keep(step, (StateShare(SLOT),)))
        checkpoints.join_writes()
        assert read_back(tmp_path / "kept", told, step) == expected(replicas)
        disturb(replicas)
        return [id(each) for each in checkpoints._spare.values()]

    assert keep(1) == [], "the only checkpoint leaves no memory behind"
    second = keep(2)
    assert second
    assert keep(3) == second
    monkeypatch.setattr(writer, "_OFTEN_S", 0.0)
    assert keep(4) == []


def test_the_times_of_a_checkpoint_are_told_apart(tmp_path: Path) -> None:
    replicas = trained(small_job(**NORMED), 1)
    checkpoints, told = written(replicas, tmp_path / "kept")
    checkpoints.keep(Keep(7, (StateShare(SLOT),)))
    checkpoints.join_writes()
    first, *others = told.messages
    assert first.copy_ns > 0
    assert all(each.copy_ns == 0 for each in others)
    assert all(each.write_ns > 0 and each.sync_ns > 0 for each in told.messages)
