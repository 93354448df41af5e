"""The agent's part in checkpoints: it gathers the parts, writes the manifests, and removes old checkpoints.

Rules: the keeper works on the disk, and a thread waits for it, so that no worker and no signal does. Its results are
recorded by the agent's main thread. Without the disk training continues: the user is told, and the checkpoint before
stays. Parts that no manifest names are removed, also those of killed runs: a disk that is full would else stay full.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from engine.codec.values import plain_of, value_of
from engine.core import checkpoint_rules as gathering
from engine.core.checkpoint_rules import (
    AbandonedCheckpoint,
    CompleteCheckpoint,
    Gathered,
    Gathering,
    KeptMessage,
    Resumption,
    UnkeptMessage,
)
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import BambooError, StorageError
from engine.core.history.run_records import KeptRecord, UnkeptRecord
from engine.core.job.update_rules import monitor_rules
from engine.core.manifest import LayerHash, Manifest
from engine.core.monitors import NO_MONITORS, Monitors, is_watched
from engine.files.checkpoint_folder import CheckpointName, NewestGood, RefusedCheckpoint
from engine.runtime.agent.keeper import Keeper
from engine.runtime.agent.orders import LIMIT_S, READ_LIMIT_S
from engine.runtime.agent.run_state import RunState
from engine.runtime.process.recorder import Recorder

_END_S = LIMIT_S  # that the end of a run waits for the last manifest
_READ_S = READ_LIMIT_S


@dataclass(slots=True)
class _UnderWay:
    """A checkpoint under way: its epoch, its loss once its hashes are complete, times and names of its parts."""

    epoch: int
    loss: float = 0.0
    copy_ns: int = 0
    write_ns: int = 0
    sync_ns: int = 0
    monitors: Monitors = NO_MONITORS  # as of the step, and later of its validation
    files: list[str] = field(default_factory=list)


class _Spare(NamedTuple):
    """Parts of a step that no manifest will name."""

    step: int
    files: list[str]


class Checkpoints:
    """The checkpoints of a run at the place of its `keeper`, if it has one; `origin` is the one it begins with."""

    def __init__(self, keeper: Keeper, run_state: RunState, recorder: Recorder, origin: Resumption | None = None):
        self.place, self._keeper = keeper.place, keeper
        # As they are when the workers begin: a user may edit them while training continues.
        self._seen: tuple[Any, Any] = (origin.init if origin else None, None)
        self._begun_by = 0  # the number of the keeper that knows them
        # Another coordinator may have published those of a run that is taken over, and nobody has heard of it.
        self._not_own = run_state.committed + 1 if run_state.losses else -1
        self._run_state = run_state
        self._recorder = recorder
        self._gathering = Gathering()
        self._unkept = -1  # the last step that was given up, maybe before an older one was written
        self._under_way: dict[int, _UnderWay] = {}
        self._orders: queue.SimpleQueue[tuple[CompleteCheckpoint, _UnderWay] | _Spare | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[KeptRecord | UnkeptRecord | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._publish_all, name="checkpoints", daemon=True)
        if self.place:
            keeper.begin()
            self._thread.start()

    def changed_code(self) -> list[str]:
        """Returns the names of the code files of the job that are not as they were when the workers began."""
        return list(self._ask("changed code", limit_s=_END_S)) if self.place else []

    def newest_good(
        self, place: str, run: str, step: int | None, before: int | None
    ) -> tuple[NewestGood, str, Monitors]:
        """Returns a run's newest good checkpoint before a step, its given weights' hash, its monitors, or raises."""
        self._keeper.begin()
        good, init, refused, monitors = self._keeper.ask("newest good", place, run, step, before, limit_s=_READ_S)
        reasons = tuple(RefusedCheckpoint(CheckpointName(*name), reason) for name, reason in refused)
        newest = NewestGood(CheckpointName(*good) if good else None, None, reasons)
        return newest, init, value_of(monitors, Monitors, "monitors") if monitors else NO_MONITORS

    def begin_epoch(self) -> None:
        """Handles a new epoch, from which workers may be missing that had parts to write."""
        self._gathering = gathering.begin_epoch(self._gathering)

    def await_parts(self, step: int, epoch: int) -> None:
        """Awaits the parts of the checkpoint of a step, the last committed one."""
        if not self.place:
            return
        self._gathering = gathering.order(self._gathering, step)
        if step in self._gathering.pending:
            self._under_way.setdefault(step, _UnderWay(epoch)).monitors = self._run_state.monitors

    def validated(self, monitors: Monitors) -> None:
        """Takes the state of the figures after a validation, which the checkpoint of its step keeps."""
        if (checkpoint := self._under_way.get(monitors.validated)) is not None:
            checkpoint.monitors = monitors

    def kept(self, message: KeptMessage) -> None:
        """Takes a part that is on disk."""
        checkpoint = self._under_way.get(message.step)
        if checkpoint is None:  # it came too late
            self._order(_Spare(message.step, [message.part.file]))
            return
        checkpoint.copy_ns += message.copy_ns
        checkpoint.write_ns += message.write_ns
        checkpoint.sync_ns += message.sync_ns
        checkpoint.files.append(message.part.file)
        self._go_on(gathering.add_part(self._gathering, message.step, message.part))

    def unkept(self, message: UnkeptMessage) -> None:
        """Gives up a checkpoint of which a worker cannot write its own share."""
        self._go_on(gathering.give_up(self._gathering, message.step, message.why))

    def close_step(self, step: int, loss: float, rows: Iterable[TrajectoryRow]) -> None:
        """Takes a `ClosedStep`."""
        if (checkpoint := self._under_way.get(step)) is not None:
            checkpoint.loss = loss
        hashes = tuple(LayerHash(row.layer, row.state, row.buffers) for row in rows)
        self._go_on(gathering.close(self._gathering, step, hashes))

    def close(self) -> None:
        """Gives up incomplete checkpoints, waits `_END_S` for the other manifests, and removes spare parts."""
        self._go_on(gathering.give_up_all(self._gathering))
        if self.place:
            self._orders.put(None)
            self._thread.join(_END_S)
            if self._thread.is_alive():
                if name := self._keeper.stop_waiting(_END_S):
                    self._run_state.note(f"{name}, which writes the manifests, survived SIGKILL: left behind")
                self._thread.join(_END_S)  # nobody keeps it waiting any more
        self.record()

    def record(self) -> None:
        """Records what the thread has done, and tells the user of a checkpoint that could not be kept."""
        with contextlib.suppress(queue.Empty):
            while True:
                record = self._results.get_nowait()
                if isinstance(record, str):
                    self._run_state.note(record)
                    continue
                self._recorder.write(record)
                if isinstance(record, KeptRecord):
                    self._run_state.kept = record.step
                    if record.step >= self._unkept:
                        self._run_state.not_kept = ""
                else:
                    self._run_state.not_kept, self._unkept = record.why, record.step
                    self._run_state.note(f"step {record.step} is not kept as a checkpoint: {record.why}")

    def _go_on(self, outcome: Gathered) -> None:
        self._gathering, settled = outcome
        for checkpoint in settled:
            under_way = self._under_way.pop(checkpoint.step)
            if isinstance(checkpoint, AbandonedCheckpoint):
                self._results.put(UnkeptRecord(step=checkpoint.step, why=checkpoint.why))
                self._order(_Spare(checkpoint.step, under_way.files))
            else:
                self._order((checkpoint, under_way))
        self.record()

    def _order(self, order: tuple[CompleteCheckpoint, _UnderWay] | _Spare) -> None:
        with contextlib.suppress(BambooError):  # then the thread tells that there is none
            self._keeper.begin()
        self._orders.put(order)

    def _publish_all(self) -> None:
        with contextlib.suppress(StorageError):  # then each order tells of it
            self._begin()
        while (order := self._orders.get()) is not None:
            if isinstance(order, _Spare):
                self._remove(order)
                continue
            whole, under_way = order
            named = {part.file for part in whole.parts}
            try:
                self._results.put(self._published(whole, under_way))
            except Exception as error:  # training continues
                self._results.put(UnkeptRecord(step=whole.step, why=str(error) or repr(error)))
                self._remove(_Spare(whole.step, under_way.files))
                continue
            self._remove(_Spare(whole.step, [file for file in under_way.files if file not in named]))
            try:
                self._ask("prune", self._run_state.best())
            except StorageError as error:
                self._results.put(f"old checkpoints stay: {error}")
        with contextlib.suppress(StorageError):  # then `bamboo clean` finds the parts
            self._ask("end", self._gathering.begun >= 0)

    def _begin(self, limit_s: float | None = None) -> None:
        if self._begun_by != (number := self._keeper.number):
            self._seen = self._keeper.ask("begin", *self._seen, limit_s=limit_s)
            self._begun_by = number

    def _ask(self, name: str, *arguments: Any, limit_s: float | None = None) -> Any:
        self._begin(limit_s)
        return self._keeper.ask(name, *arguments, limit_s=limit_s)

    def _remove(self, spare: _Spare) -> None:
        if spare.step <= self._not_own:
            return  # at the end of the run, those without a manifest go
        with contextlib.suppress(StorageError):  # `bamboo clean` finds them
            self._ask("remove parts", *spare)

    def _published(self, whole: CompleteCheckpoint, under_way: _UnderWay) -> KeptRecord:
        manifest = Manifest(
            run=self._keeper.run,
            step=whole.step,
            epoch=under_way.epoch,
            loss=under_way.loss,
            job=asdict(self._keeper.job.masked),
            facts={},
            layers=whole.hashes,
            parts=whole.parts,
            names=tuple(self._run_state.layers),
            monitors=under_way.monitors if is_watched(monitor_rules(self._keeper.job)) else None,
        )
        file, size = self._ask("publish", plain_of(manifest))
        times = {each: getattr(under_way, each) for each in ("copy_ns", "write_ns", "sync_ns")}
        return KeptRecord(step=whole.step, manifest=file, bytes=size, parts=len(whole.parts), **times)
