"""The agent's part in checkpoints: it gathers the parts, writes the manifests, and removes old checkpoints.

Rules: manifests are written by a thread, so that no worker waits for a disk. Its results are recorded by the agent's
main thread. Without the disk training goes on: the user is told, and the checkpoint before stays. Parts that no
manifest names are removed, also those of killed runs: a disk that is full would else stay full.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.checkpoints import gathering
from engine.core.checkpoints.gathering import Gathered, Gathering, GivenUp, Whole
from engine.core.checkpoints.keeping import keeps_any
from engine.core.checkpoints.manifest import LayerHash, Manifest, owner_of
from engine.core.checkpoints.part_messages import KeptMessage, UnkeptMessage
from engine.core.checkpoints.resumption import Resumption
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.config.bit_fields import bit_facts
from engine.core.config.job import Job
from engine.core.errors import StorageError
from engine.core.history.run_records import KeptRecord, UnkeptRecord
from engine.core.membership.state import State
from engine.core.message_codec import ToWorker
from engine.files.checkpoints.checkpoint_folder import checkpoints_at
from engine.files.checkpoints.claims import sweep
from engine.files.checkpoints.place_text import is_url
from engine.files.host_facts import host_facts
from engine.files.jobs.code_files import code_files
from engine.files.jobs.data_files import data_files
from engine.files.jobs.given_weights import weights_hash
from engine.files.run_folder import CHECKPOINTS_FOLDER
from engine.runtime.agent.run_state import RunState
from engine.runtime.ipc.recorder import Recorder

_END_S = 30.0  # that the end of a run waits for the last manifest


def place_of(job: Job, run: str) -> str:
    """Returns the folder or the URL of the checkpoints of a job that runs in the folder `run`; empty if it keeps none.

    A path is absolute. Without a folder of the run there are none.
    """
    if not run or not keeps_any(job.checkpoint_every):
        return ""
    if is_url(job.checkpoints):
        return job.checkpoints
    return str(Path(job.checkpoints or Path(run, CHECKPOINTS_FOLDER)).absolute())


@dataclass(slots=True)
class _UnderWay:
    """A checkpoint under way: its epoch, its loss once its hashes are complete, times and names of its parts."""

    epoch: int
    loss: float = 0.0
    copy_ns: int = 0
    write_ns: int = 0
    sync_ns: int = 0
    files: list[str] = field(default_factory=list)


class _Spare(NamedTuple):
    """Parts of a step that no manifest will name."""

    step: int
    files: list[str]


class Checkpoints:
    """The checkpoints of the job that runs in the folder `run`; without one there are none.

    `origin` is the checkpoint that the workers begin with. Raises UserError for a URL that cannot be used, and
    StorageError for given weights that cannot be read.
    """

    def __init__(self, job: Job, run: str, run_state: RunState, recorder: Recorder, origin: Resumption | None = None):
        self.place = place_of(job, run)
        self._job = job
        self._run = Path(run).absolute().name
        self._folder = checkpoints_at(self.place, run=self._run)
        # As they are when the workers begin: a user may edit them while training goes on.
        self._init = origin.init if origin else weights_hash(job.init if self.place else "")
        self._code = code_files(job) if self.place else ()
        # Another coordinator may have published those of a run that is taken over, and nobody has heard of it.
        self._not_own = run_state.committed + 1 if run_state.losses else -1
        self._run_state = run_state
        run_state.on_rows = self.close_step
        self._recorder = recorder
        self._gathering = Gathering()
        self._unkept = -1  # the last step that was given up, maybe before an older one was written
        self._under_way: dict[int, _UnderWay] = {}
        self._orders: queue.SimpleQueue[tuple[Whole, _UnderWay] | _Spare | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[KeptRecord | UnkeptRecord | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def changed_code(self) -> list[str]:
        """Returns the names of the code files of the job that are not as they were when the workers began."""
        now = code_files(self._job) if self.place else ()
        return sorted({name for name, _, _ in set(self._code) ^ set(now)})

    def await_parts(self, told: ToWorker, known: State) -> None:
        """Awaits the parts of a checkpoint, if a message to the workers orders one of the last commit."""
        if not self.place:
            return
        self._gathering = gathering.order(self._gathering, told, known.committed)
        if known.committed in self._gathering.pending:
            self._under_way.setdefault(known.committed, _UnderWay(known.epoch))

    def kept(self, told: KeptMessage) -> None:
        """Takes a part that is on disk."""
        found = self._under_way.get(told.step)
        if found is None:  # it came too late
            self._order(_Spare(told.step, [told.part.file]))
            return
        found.copy_ns += told.copy_ns
        found.write_ns += told.write_ns
        found.sync_ns += told.sync_ns
        found.files.append(told.part.file)
        self._go_on(gathering.add_part(self._gathering, told.step, told.part))

    def unkept(self, told: UnkeptMessage) -> None:
        """Gives up a checkpoint of which a worker cannot write its own share."""
        self._go_on(gathering.give_up(self._gathering, told.step, told.why))

    def close_step(self, step: int, loss: float, rows: Iterable[TrajectoryRow]) -> None:
        """Takes the hashes of a step, which are complete and agree; there are no `rows` otherwise."""
        if (found := self._under_way.get(step)) is not None:
            found.loss = loss
        hashes = tuple(LayerHash(row.layer, row.state, row.buffers) for row in rows)
        self._go_on(gathering.close(self._gathering, step, hashes))

    def close(self) -> None:
        """Gives up the checkpoints that are not whole, and waits for the manifests of the others, at most `_END_S`.

        Then removes the parts of this run without a manifest.
        """
        self._go_on(gathering.give_up_all(self._gathering))
        if self._thread is not None:
            self._orders.put(None)
            self._thread.join(_END_S)
        if self._gathering.begun >= 0:
            with contextlib.suppress(StorageError):  # then they stay
                self._folder.remove_orphans(lambda owner: owner == owner_of(self._run))
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

    def _go_on(self, found: Gathered) -> None:
        self._gathering, settled = found
        for each in settled:
            under_way = self._under_way.pop(each.step)
            if isinstance(each, GivenUp):
                self._results.put(UnkeptRecord(step=each.step, why=each.why))
                self._order(_Spare(each.step, under_way.files))
            else:
                self._order((each, under_way))
        self.record()

    def _order(self, order: tuple[Whole, _UnderWay] | _Spare) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._publish_all, name="checkpoints", daemon=True)
            self._thread.start()
        self._orders.put(order)

    def _publish_all(self) -> None:
        fixed: Mapping[str, Any] = {}
        with contextlib.suppress(StorageError):  # then the parts of killed runs stay
            if self._job.checkpoints:
                sweep(self.place)
        while (order := self._orders.get()) is not None:
            if isinstance(order, _Spare):
                self._remove(order)
                continue
            whole, under_way = order
            named = {part.file for part in whole.parts}
            try:
                fixed = fixed or self._fixed()
                self._results.put(self._published(fixed, whole, under_way))
            except Exception as error:  # training goes on
                self._results.put(UnkeptRecord(step=whole.step, why=str(error) or repr(error)))
                self._remove(_Spare(whole.step, under_way.files))
                continue
            self._remove(_Spare(whole.step, [file for file in under_way.files if file not in named]))
            try:
                self._folder.prune(self._job.keep, self._run)
            except StorageError as error:
                self._results.put(f"old checkpoints stay: {error}")

    def _remove(self, spare: _Spare) -> None:
        if spare.step <= self._not_own:
            return  # at the end of the run, those without a manifest go
        with contextlib.suppress(StorageError):  # `bamboo clean` finds them
            self._folder.remove_parts(*spare)

    def _fixed(self) -> dict[str, Any]:
        """Returns the parts of a manifest that are the same in all of a run; it reads the files of the data once."""
        files = {"data_files": data_files(self._job), "code_files": self._code}
        return {"facts": bit_facts(host_facts(Path.cwd())), "init": self._init, **files}

    def _published(self, fixed: Mapping[str, Any], whole: Whole, under_way: _UnderWay) -> KeptRecord:
        manifest = Manifest(
            run=self._run,
            step=whole.step,
            epoch=under_way.epoch,
            loss=under_way.loss,
            job=asdict(self._job.masked),
            layers=whole.hashes,
            parts=whole.parts,
            names=tuple(self._run_state.layers),
            **fixed,
        )
        name = self._folder.publish(manifest)
        times = {each: getattr(under_way, each) for each in ("copy_ns", "write_ns", "sync_ns")}
        size = manifest.num_bytes
        return KeptRecord(step=whole.step, manifest=name.file, bytes=size, parts=len(whole.parts), **times)
