"""The training of one worker: the driver of the worker machine, which carries out its outputs in the main thread.

    input -> WorkerProtocol.feed -> outputs -> one method for each -> the answer of the last one is the next input
                                    no answer, or interrupted      -> Control.hear waits for the next input

Rules: the driver decides nothing; `engine.core.protocol.worker_machine` has the rules. An output that is interrupted by
a newer epoch (Fenced) or by the end (Stopped) drops the outputs behind it, as one that fails does.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from engine.codec.messages import in_messages
from engine.core import messages
from engine.core.action import Action, Program
from engine.core.checkpoint_rules import UnkeptMessage
from engine.core.errors import StorageError, TransferFailedError, required
from engine.core.history.run_records import MarkRecord, MovedRecord, PreparedRecord
from engine.core.history.step_files import Chore
from engine.core.ownership import Grid, Ownership, Slot, healed
from engine.core.program.build import build_program
from engine.core.program.dependencies import peers_of, peers_program
from engine.core.program.inventory import PrepareMessage, to_json
from engine.core.program.planner import EpochPlan
from engine.core.protocol import worker_inputs as inputs
from engine.core.protocol import worker_state as outputs
from engine.core.protocol.worker_inputs import Input, PlanPrepared, plan_epoch
from engine.core.protocol.worker_machine import step
from engine.core.protocol.worker_state import Output, PlanNextStep, WorkerState
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Control, Fenced, Stopped
from engine.runtime.process.locks import HostLock
from engine.runtime.stage.memory_watch import MemoryWatch, stage_bytes
from engine.runtime.stage.replicas import hash_rows
from engine.runtime.transport.group_formation import GroupFormation, NextGroups
from engine.runtime.transport.transfers import WorkerProgram, worker_program
from engine.runtime.transport.transport import Transport
from engine.runtime.worker.executor import Executor
from engine.runtime.worker.microbatches import WatchedData
from engine.runtime.worker.step_end import WorkerContext
from engine.runtime.worker.validation import Prediction, Validation

# The worker machine of this process. The main thread carries out its outputs; other threads feed it aside.
#
# An order to prepare a plan or to form the next group, its answer, and a notice are fed by the threads that get them,
# also while the main thread is inside a long action. They change nothing that the main thread is about to do.


class WorkerProtocol:
    """The state of the machine; `carry_out_aside` gets outputs about coming epochs, in the thread that feeds aside."""

    def __init__(self, control: Control, carry_out_aside: Callable[[Output], None]):
        self.state = WorkerState()
        self._control, self._carry_out_aside = control, carry_out_aside
        self._lock = threading.Lock()

    def feed(self, event: Input) -> tuple[Output, ...]:
        """Returns the outputs of an input, for the main thread, which calls this."""
        with self._lock:
            self.state, outputs = step(self.state, event)
        self._control.accepted = self.state.epoch
        return outputs

    def feed_aside(self, event: Input) -> None:
        """Feeds an input that does not concern the main thread, in any thread."""
        with self._lock:
            self.state, outputs = step(self.state, event)
        for output in outputs:
            self._carry_out_aside(output)


# The planner thread of a worker: it computes plans of coming epochs, and the next program, before they are needed.
#
# Rules: the thread reads no value that training changes, and it changes only the prepared plans; the same computation
# in the main thread would give the same result. It does one task after the other. The planner threads of a host take
# turns: all together they would take the cores from the workers that the others wait for. The wait for a turn is short,
# and after it the thread computes without the lock.

_MOST_S = 60.0  # to wait for a task that began one step ago
_CHOOSY_LOOKS = 4
_SWITCH_S = 0.0002  # after this time the planner thread returns the interpreter to the main thread


class NextStep(NamedTuple):
    """The step after a step of a recovery: it has all shadows, and HEALs if some of them are new."""

    ownership: Ownership
    is_healing: bool
    worker_program: WorkerProgram


class PlannerThread:
    """The plans and programs that one worker computes in advance."""

    def __init__(self, context: WorkerContext, protocol: WorkerProtocol, grid: Grid):
        self._context = context
        self._protocol = protocol
        self._grid = grid
        self._has_tags = context.job.backend != "nccl"  # without tags the transfers of all workers have one order
        self._thread = ThreadPoolExecutor(1)
        self._thread.submit(int)  # the thread exists before a recovery, which would wait for its start
        self._hurry = threading.Event()
        self._host_lock = HostLock(context.board.fd)
        sys.setswitchinterval(_SWITCH_S)
        self._next_step: Future[NextStep] | None = None
        self._prepared: list[tuple[EpochPlan, WorkerProgram]] = []

    def worker_program(self, plan: EpochPlan) -> WorkerProgram:
        """Returns this worker's part of the program of a plan, at once if it is prepared."""
        prepared = next((program for each, program in self._prepared if each is plan), None)
        if prepared is not None:
            return prepared
        return self._part(plan.plan.program, plan.ownership, among_peers=plan.plan.repair is not None)

    def default_program(
        self, ownership: Ownership, healing: frozenset[tuple[int, Slot]] = frozenset(), schedule: str = ""
    ) -> WorkerProgram:
        """Returns this worker's part of a whole step, with these HEALs; an empty `schedule` is the job's own."""
        job = self._context.job
        peers = peers_of(self._context.worker, ownership) if self._has_tags else None
        program = build_program(
            schedule or job.schedule, ownership, job.redundancy, healing, job.log_every, peers, job.copy_time
        )
        return self._part(program, ownership, among_peers=True)

    def usual_actions(self, ownership: Ownership, schedule: str) -> tuple[Action, ...]:
        """Returns the actions of this worker in a whole step."""
        return tuple(action for action, _ in self.default_program(ownership, schedule=schedule).actions)

    def _part(self, program: Program, ownership: Ownership, *, among_peers: bool) -> WorkerProgram:
        context = self._context
        if among_peers and self._has_tags:
            program = peers_program(context.worker, program, ownership)
        return worker_program(context.worker, program, ownership, context.borders, has_tags=self._has_tags)

    def prepare(self, message: PrepareMessage) -> None:
        """Begins to compute a plan of a coming epoch; any thread may call."""
        self._thread.submit(self._prepare, message).add_done_callback(_log_error)

    def _turn_in(self, step: int) -> contextlib.AbstractContextManager[bool]:
        return self._host_lock.acquire_when(well_inside(self._context.control, step), self._hurry)

    def _prepare(self, message: PrepareMessage) -> None:
        context = self._context
        with self._turn_in(message.plan.committed):  # the step whose commit begins the epoch
            plan = plan_epoch(self._grid, self._context.job.schedule, message.plan)
            if plan.plan.lost_stages:
                return
            self._prepared.append((plan, self.worker_program(plan)))
            context.recorder.write(PreparedRecord(epoch=message.plan.epoch))
            self._protocol.feed_aside(PlanPrepared(message.number, plan))
            prepared = self._protocol.state.prepared
            self._prepared = [each for each in self._prepared if any(each[0] is other for other in prepared)]

    def plan_next_step(self, order: PlanNextStep) -> None:
        """Starts to plan the step after the one that is about to begin."""
        before = order.ownership

        def plan() -> NextStep:
            with self._turn_in(order.step):
                ownership = healed(
                    before,
                    self._context.job.redundancy,
                    self._context.job.redundancy_level,
                    order.members,
                    order.leaving,
                    order.wanted,
                    order.hosts,
                )
                new = frozenset(
                    (worker, slot)
                    for slot in before.grid.slots()
                    for worker in ownership.shadows_of(*slot)
                    if worker not in before.shadows_of(*slot)
                )
                return NextStep(ownership, bool(new), self.default_program(ownership, new, order.schedule))

        self._next_step = self._thread.submit(plan)

    def next_step(self) -> NextStep:
        """Waits for the plan of the last `plan_next_step` and returns it."""
        next_step = required(self._next_step, "the next step is being planned")
        self._hurry.set()
        try:
            return next_step.result(_MOST_S)
        finally:
            self._hurry.clear()


def well_inside(control: Control, step: int) -> Callable[[], bool]:
    """Returns a function to be called now and then: whether training is inside a long action of `step` or later.

    An action is long if two calls find it. Training needs the interpreter most at the beginning of an action. If all
    actions are short, any action will do after `_CHOOSY_LOOKS` calls.
    """
    before: object = None
    looks = count()

    def look() -> bool:
        nonlocal before
        at = control.at
        at_step, _, is_inside = at
        is_still, before = at == before or next(looks) >= _CHOOSY_LOOKS, at
        return is_inside and is_still and at_step >= step

    return look


def _log_error(done: Future[None]) -> None:
    """Writes an error to the worker's log. The epoch then gathers inventories; the result is the same."""
    if (error := done.exception()) is not None:
        traceback.print_exception(error)


class Training:
    """The training of one worker, from the moment that it has joined; `ownership` is the first one, `step` too."""

    def __init__(
        self,
        context: WorkerContext,
        ownership: Ownership,
        plane: Transport | None,
        protocol: WorkerProtocol,
        step: int = 0,
        *,
        joins: bool = False,
    ):
        """Without a `plane` the worker waits: it is in no group before an epoch makes it a member."""
        self.context = context
        self._protocol = protocol
        self._grid = ownership.grid
        job = context.job
        how = (plane is None, joins)
        self._built = inputs.StagesBuilt(context.worker, ownership, job.validate_every, job.audit, step, *how)
        self._group = plane
        self._ownership = ownership
        self._forming: GroupFormation | None = None
        self._executor = Executor(context, step)
        self._memory = MemoryWatch(context.worker, context.replicas, context.borders, context.recorder.write)
        self._planner = PlannerThread(context, protocol, ownership.grid)
        self._next_groups = NextGroups(context.backend, self._report_next_group)
        self._made_ready: WorkerProgram | None = None  # for the next `Enter`
        self._usual = partial(self._planner.usual_actions, ownership, "")
        self._audited: dict[Slot, tuple[int, list[Any]]] = {}  # the last step with hashes that were sent, and these
        self._methods = self._table()

    def _table(self) -> dict[type[outputs.Output], Callable[[Any], inputs.Input | None]]:
        return {
            outputs.SendMessage: lambda say: self.context.control.send(say.message),
            outputs.MarkPhase: self._mark,
            outputs.BeginAt: lambda begin: self._executor.begin_at(begin.step),
            outputs.CountHeld: self._count,
            outputs.LeaveGroup: self._leave_group,
            outputs.CloseGroup: lambda close: self._plane.close(),
            outputs.FormGroup: self._form_group,
            outputs.FormNextGroup: lambda form: self._next_groups.form(form.order),
            outputs.LeaveNextGroups: lambda leave: self._next_groups.leave(leave.keys),
            outputs.PreparePlan: lambda order: self._planner.prepare(order.order),
            outputs.EnterNextGroup: self._enter_next_group,
            outputs.MakePlan: lambda make: inputs.PlanMade(
                plan_epoch(self._grid, self.context.job.schedule, make.document)
            ),
            outputs.LoadPlan: self._load_plan,
            outputs.PlanNextStep: self._plan_next_step,
            outputs.TakeNextStep: self._take_next_step,
            outputs.Enter: self._enter,
            outputs.Run: self._run,
            outputs.TakeStep: self._take_step,
            outputs.CatchUp: self._catch_up,
            outputs.Adopt: self._adopt,
            outputs.Drop: self._drop,
            outputs.Audit: self._audit,
            outputs.Keep: self._keep,
            outputs.KeepLast: self._keep_last,
            outputs.ReleaseSends: lambda release: self._plane.release_sent(),
            outputs.Validate: self._validate,
            outputs.ReportDone: self._report_done,
        }

    def run(self) -> int:
        """Trains until the machine ends; returns the exit code. Raises the exceptions of layers and of broken rules."""
        self._memory.begin(self.context.data)
        next_input: inputs.Input | None = self._built
        while True:
            work = self._protocol.feed(next_input or self._heard())
            if work and isinstance(work[-1], outputs.End):
                self._carry_out(work[:-1])
                return exit_code(work)
            next_input = self._carry_out(work)

    def carry_out_aside(self, output: outputs.Output) -> None:
        """Carries out an output that does not concern the main thread, in any thread."""
        self._methods[type(output)](output)

    def end_copies(self) -> None:
        """Orders the copies of residuals before later work: of a thread that has ended, others use the memory."""
        with contextlib.suppress(RuntimeError):  # a GPU that has failed has ended them
            self._executor.offloads.clear()

    def _heard(self) -> inputs.Input:
        news = self.context.control.hear(self._group_news, urgent=self._protocol.state.awaits_group)
        return news if isinstance(news, inputs.Input) else inputs.ProtocolMessage(news)

    def _carry_out(self, work: Iterable[outputs.Output]) -> inputs.Input | None:
        """Carries out outputs; returns the answer of the last one, or the failure of the first one that fails."""
        answer = None
        try:
            for output in work:
                answer = self._methods[type(output)](output)
        except (Fenced, Stopped):
            return None  # the message that has interrupted is the next one that is heard
        except TransferFailedError as failure:
            return _failed(failure)
        return answer

    def _mark(self, output: outputs.MarkPhase) -> None:
        control, phase = self.context.control, output.phase
        if phase == "fence":
            control.at = (*control.at[:2], False)
        control.mark(phase)
        self.context.recorder.write(MarkRecord(phase=phase, epoch=control.accepted, adopted=output.adopted))

    def _count(self, output: outputs.CountHeld) -> inputs.Input:
        epoch = self._protocol.state.message
        left_ms = dict(epoch.left_ms).get(self.context.worker, 0) if epoch is not None else 0
        inventory = self._executor.inventory(left_ms * 1_000_000)
        return inputs.InventoryCounted(to_json(inventory), self._grid.places(inventory.whole))

    # The group

    def _leave_group(self, output: outputs.LeaveGroup) -> None:
        if self._forming is not None:
            self._forming.give_up()
        if self._group is not None:
            self._group.abandon()

    def _form_group(self, output: outputs.FormGroup) -> None:
        context = self.context
        self._forming = GroupFormation(context.control, context.backend, context.recorder, output.epoch)

    def _enter_next_group(self, output: outputs.EnterNextGroup) -> None:
        self._leave_group(outputs.LeaveGroup())
        self._group, self._forming = self._next_groups.enter(output.key), None

    def _report_next_group(self, key: tuple[int, int], failure: str) -> None:
        self._protocol.feed_aside(inputs.NextGroupFormed(inputs.GroupKey(*key), failure))

    @property
    def _plane(self) -> Transport:
        return required(self._group, "a member that trains is in a group")

    def _group_news(self) -> inputs.Input | None:
        """Returns the answer to the last `FormGroup`, once."""
        epoch = self._protocol.state.forming
        if not epoch or self._forming is None or (outcome := self._forming.outcome) is None:
            return None
        if isinstance(outcome, TransferFailedError):
            return inputs.GroupFormed(epoch, _failed(outcome))
        if isinstance(outcome, RuntimeError):
            raise outcome
        self._group, self._forming = outcome, None
        return inputs.GroupFormed(epoch)

    # Plans and programs

    def _load_plan(self, output: outputs.LoadPlan) -> None:
        self._made_ready = self._planner.worker_program(output.plan)

    def _plan_next_step(self, output: outputs.PlanNextStep) -> None:
        self._planner.plan_next_step(output)

    def _take_next_step(self, output: outputs.TakeNextStep) -> inputs.Input:
        next_step = self._planner.next_step()
        self._made_ready = next_step.worker_program
        return inputs.NextStepMade(next_step.ownership, next_step.is_healing)

    def _enter(self, output: outputs.Enter) -> None:
        program, self._made_ready = self._made_ready, None
        self._plane.epoch = self.context.control.accepted
        self._ownership = output.ownership
        usual = partial(self._planner.default_program, output.ownership, schedule=output.schedule)
        self._executor.enter(self._plane, program or usual())
        self._usual = partial(self._planner.usual_actions, output.ownership, output.schedule)

    # A step

    def _run(self, output: outputs.Run) -> inputs.Input:
        """Runs the program; in a recovery it records the bytes sent, even if the program is interrupted."""
        before = self._plane.bytes_sent
        try:
            self._executor.run_actions()
        finally:
            if output.program != "usual":
                is_plan = output.program == "plan"
                num_bytes = self._plane.bytes_sent - before if is_plan else self._executor.end.bytes_healed
                epoch, step = self.context.control.accepted, self._executor.step
                moved = MovedRecord(program=output.program, epoch=epoch, step=step, bytes=num_bytes)
                self.context.recorder.write(moved)
        return inputs.ProgramEnded()

    def _take_step(self, output: outputs.TakeStep) -> inputs.Input:
        self._join_copy()
        self._executor.take_step(output.commit)
        self._memory.step_ends(output.commit.step, self._ownership, self._usual)
        return inputs.StepTaken(output.commit)

    def _catch_up(self, output: outputs.CatchUp) -> inputs.Input:
        self._join_copy()
        self._executor.catch_up(output.commit)
        return inputs.StepTaken(output.commit)

    def _adopt(self, output: outputs.Adopt) -> None:
        for slot in output.slots:
            self.context.replicas.adopt(slot)
            self._executor.end.tell_new(slot, self._executor.step - 1)

    def _drop(self, output: outputs.Drop) -> None:
        replicas = self.context.replicas
        for slot in replicas.stages.keys() - set(output.kept):
            replicas.drop(slot)

    @contextlib.contextmanager
    def _noted(self, step: int, chore: Chore) -> Iterator[None]:
        start_ns = now_ns()
        yield
        self.context.recorder.chore(self.context.control.accepted, step, chore, start_ns)

    def _validate(self, output: outputs.Validate) -> inputs.Input:
        shards = self.context.shards
        with self._noted(output.step, Chore.VALIDATION), shards.all_whole() if shards else contextlib.nullcontext():
            kind = Prediction if self.context.job.predict_args else Validation
            return kind(self.context, self._plane, output.ownership).run()

    def _audit(self, output: outputs.Audit) -> None:
        """Sends the agent the hash of every layer of the whole replicas, or of the stages in shards that it owns."""
        with self._noted(output.step, Chore.AUDIT):
            self._send_hashes(output.step, self._hashes(output))

    def _hashes(self, output: outputs.Audit) -> Mapping[int, list[Any]]:
        replicas, shards = self.context.replicas, self.context.shards
        rows: dict[int, list[Any]] = {}  # by pipeline: many slots need no message each
        if shards is not None:
            for pipeline, row in shards.hash_rows():
                rows.setdefault(pipeline, []).append(row)
        for slot in (slot for slot in output.slots if slot in replicas.whole() and shards is None):
            hashes = [*hash_rows(replicas.stages[slot], replicas.device)]
            self._audited[slot] = (output.step, hashes)
            rows.setdefault(slot[0], []).extend(hashes)
        return rows

    def _send_hashes(self, step: int, rows: Mapping[int, list[Any]]) -> None:
        for pipeline, of_pipeline in rows.items():
            for part in in_messages(of_pipeline):
                self.context.control.send(messages.AuditMessage(step, pipeline, part))

    def _keep(self, output: outputs.Keep) -> None:
        checkpoints = required(self.context.checkpoints, "a job that keeps a step has a place for it")
        stages = [share.slot[1] for share in output.shares]
        with contextlib.suppress(Fenced), self._noted(output.step, Chore.CHECKPOINT):
            # If it is fenced, this checkpoint lacks a part; a later check raises.
            self.context.failpoints.around_checkpoint(
                output.step,
                stages,
                lambda: checkpoints.keep(output, self._position_after(output)),
                checkpoints.join_writes,
            )

    def _position_after(self, keep: outputs.Keep) -> str:
        """Returns the position of the data behind a step, for the worker that writes the first stage."""
        data, writes_first = self.context.data, any(share.slot[1] == 0 for share in keep.shares)
        return data.position_after(keep.step) if writes_first and isinstance(data, WatchedData) else ""

    def _keep_last(self, output: outputs.KeepLast) -> None:
        if (checkpoints := self.context.checkpoints) is None:
            return
        shares = tuple(share._replace(slot=self._held(share.slot)) for share in output.shares)
        try:
            for share in shares:
                self._prove(share.slot, output.step)
            keep = outputs.Keep(output.step, shares)
            checkpoints.keep(keep, self._position_after(keep))
        except StorageError as error:
            self.context.control.send(UnkeptMessage(output.step, str(error)))
        checkpoints.await_writes()

    def _held(self, slot: Slot) -> Slot:
        """Returns a slot, or one of the same stage in another pipeline that is held here; its new owner may not be."""
        whole = self.context.replicas.whole()
        others = [each for each in whole if each[1] == slot[1] and self.context.shards is None]
        return slot if slot in whole else next(iter(others), slot)

    def _prove(self, slot: Slot, step: int) -> None:
        """Raises StorageError if the state of a slot here is not the one after `step`; reports hashes that are missing.

        The forwards of the open step change buffers, of which there are copies only if a worker could take over.
        """
        replicas = self.context.replicas
        if slot not in replicas.whole():
            raise StorageError(f"slot {slot} is not whole")
        replica, (audited, known) = replicas.stages[slot], self._audited.get(slot, (-1, []))
        is_safe = bool(replica.boundary) or not replica.buffers()
        if self.context.shards is None and (is_safe or audited == step):
            rows = [*hash_rows(replica, replicas.device, slot[0])]
            if audited != step:
                self._send_hashes(step, {slot[0]: rows})
            is_safe = audited != step or [row[:3] for row in rows] == [row[:3] for row in known]
        if not is_safe:
            raise StorageError("the open step has changed buffers, and without redundancy no copy of them is kept")

    def keep_last_step(self, stop: messages.StopMessage) -> None:
        """Carries out the order to stop after an exception here, which has ended the main loop."""
        work = self._protocol.feed(inputs.ProtocolMessage(stop))
        self._carry_out(each for each in work if isinstance(each, outputs.KeepLast))

    def _join_copy(self) -> None:
        if (checkpoints := self.context.checkpoints) is not None and not checkpoints.is_copied:
            with self._noted(self._executor.step, Chore.CHECKPOINT):
                checkpoints.join_copy()

    def _report_done(self, output: outputs.ReportDone) -> None:
        self._executor.finish()
        if self.context.checkpoints is not None:
            self.context.checkpoints.join_writes()
        control, stages = self.context.control, self.context.replicas.stages
        peaks = tuple((*slot, stages[slot].peak_stash) for slot in output.slots)
        own = {slot[1]: stages[slot] for slot in output.slots}
        sizes = tuple((stage, *stage_bytes(replica)) for stage, replica in own.items())
        control.send(messages.FinishedMessage(control.accepted, peaks, _peak_memory_kib(), sizes))


def exit_code(ending: Iterable[outputs.Output]) -> int:
    """Returns the exit code of the outputs that end a worker."""
    return next(each.code for each in ending if isinstance(each, outputs.End))


def _failed(failure: TransferFailedError) -> inputs.TransferFailed:
    return inputs.TransferFailed(str(failure), failure.peer)


def _peak_memory_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
