"""The executor runs a program action by action, through one table from op to method.

    a step      0F0  0SEND_F0  0F1 ... 0B3  0REDUCE_GRAD  0LOG  0COMMIT | wait for the commit | 0STEP | release sends
    an action   check -> "before" faults -> progress board -> "during" faults -> method -> events file -> "after" faults

Rules: the executor decides nothing. The program has the actions in their order; the worker machine decides when a step
is taken. A check or a wait before the commit may raise Fenced; an action interrupted by it leaves the values of this
worker unchanged. No Fenced comes between the commit and the last STEP, so all replicas here have taken the same number
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, LEAVE_OPS, STASH_OPS, Action, Op
from engine.core.errors import InvariantError
from engine.core.faults.fault import When
from engine.core.history.run_records import HostLinkRecord, RedoneRecord, TensorsRecord
from engine.core.history.step_files import Chore
from engine.core.messages import CommitMessage
from engine.core.program.compute_times import BORDER_OPS, ComputeTimes
from engine.core.program.dependencies import carried, needed
from engine.core.program.inventory import Inventory, ValueRuns
from engine.core.program.offload import line_with_offloads
from engine.core.program.schedules import OVERLAPS, Overlap, pairs_of
from engine.core.value import Kind, Value
from engine.models.layers import Tensors
from engine.models.user_code import RAISED, blame_microbatch
from engine.runtime.process.clock import now_ns
from engine.runtime.process.control import Fenced
from engine.runtime.process.kernel import CoreWaits
from engine.runtime.stage.gradient_log import GradientStreams
from engine.runtime.stage.offload import ResidualOffloads
from engine.runtime.stage.replicas import ValueStore
from engine.runtime.stage.residuals import ResidualOffers, keep_parcel, residual_offers, send_parcel, take_parcel
from engine.runtime.stage.tensor_census import TensorCensus
from engine.runtime.transport.transfers import Receiver, WorkerProgram
from engine.runtime.transport.transport import AsidePurpose, Transport, aside_key
from engine.runtime.worker.microbatches import MicrobatchLoader
from engine.runtime.worker.step_end import StepEnd, WorkerContext

# The registry of handlers: functions of a user that run the actions of one op, or a pair of forward and backward.
#
# A handler gets one `Call` for an op and two for a pair, in the order of the program, in the worker's main thread. It
# must run each call once and let its exceptions through. `engine.core.program.schedules` has the rule for pairs.
# The result of a step does not depend on handlers. The module of a model registers them, so every worker has them:
#
#     pair   OVERLAP_F_B: handler(forward, backward) -> F: handler(forward) -> the executor's method for F
#     op                                                F: handler(forward) -> the executor's method for F


Handler = Callable[..., None]  # takes one Call for an op, two for a pair
Method = Callable[[Action, int], None]  # takes an action and the open step
QueuedAction = tuple[Action, str, Method]  # an action, its text, and the executor's method for it
RunAction = Callable[[Action, str, Method], None]

_handlers: dict[str, Handler] = {}


@dataclass(frozen=True, slots=True)
class Call:
    """One action that is ready to run: calling it runs the action."""

    action: Action
    run: Callable[[], None]

    def __call__(self) -> None:
        """Runs the action; raises its exception."""
        self.run()


def register(op: Op | Overlap, handler: Handler) -> None:
    """Runs an op or kind of pair through `handler` in this process from now on; raises ValueError for any other."""
    if op not in (*Op, *OVERLAPS.values()):
        raise ValueError(f"expected an op such as F, or one of {', '.join(OVERLAPS.values())}, found {op!r}")
    _handlers[op] = handler


def run_in_order(
    entries: Sequence[QueuedAction], check: Callable[[], None], run: RunAction, *, has_pairs: bool = True
) -> None:
    """Runs actions after a `check` each, or one for a pair with a handler; raises InvariantError for a bad handler."""

    def run_one(entry: QueuedAction) -> None:
        if entry[0].op in _handlers:
            _hand_over(_handlers[entry[0].op], (entry,), lambda call: run(*call))
        else:
            run(*entry)

    actions, paired = [action for action, _, _ in entries], has_pairs and _handlers
    pairs = {position: _handlers[kind] for position, kind in pairs_of(actions, _handlers)} if paired else {}
    for position, entry in enumerate(entries):
        if position - 1 in pairs:
            continue  # the second of a pair
        check()
        if position in pairs:
            _hand_over(pairs[position], (entry, entries[position + 1]), run_one)
        elif _handlers:
            run_one(entry)
        else:
            run(*entry)


def _hand_over(handler: Handler, entries: Sequence[QueuedAction], run: Callable[[QueuedAction], None]) -> None:
    begun: list[str] = []

    def call(entry: QueuedAction) -> Call:
        def begin() -> None:
            begun.append(entry[1])
            run(entry)

        return Call(entry[0], begin)

    handler(*map(call, entries))
    texts = [text for _, text, _ in entries]
    if sorted(begun) != sorted(texts):
        raise InvariantError(f"a handler has run {begun}, not each of {texts} once")


class Executor:
    """Runs the programs of one worker, one after the other; `step` is the open step."""

    def __init__(self, context: WorkerContext, step: int = 0):
        self.context = context
        self.step = step
        self.num_computed = 0
        self._times = ComputeTimes(context.job.program_microbatches)
        device = context.replicas.device
        self._copies = device.copies
        self.value_store = ValueStore(context.job.retains, device, on_host=context.job.retain == "cpu")
        self.end = StepEnd(context)
        self.offloads = ResidualOffloads(context.replicas, self.value_store)
        self._steps_with_copies = 0
        self.streams = GradientStreams(context.job, context.worker, context.replicas)
        parts = context.replicas, self.value_store, self.streams, self.end.entries
        self._census = TensorCensus(*parts, self._write)
        self._clock = device.clock(self._tell)
        self._ended = self._clock.ended
        self._core_waits = CoreWaits() if device.is_host else None
        self._offers = ResidualOffers()
        self._methods = self._table()
        self._ends, self._is_host = (0, context.job.slots - 1), device.is_host
        self._loader = MicrobatchLoader(context.job, context.data, device)

    def _write(self, record: TensorsRecord) -> None:
        self.context.recorder.write(record)

    def enter(self, plane: Transport, program: WorkerProgram) -> None:
        """Sets the plane and the program of the next runs; callable between any two runs."""
        self._plane = plane
        self.context.control.count(plane.traffic)
        self._worker_program = program
        self._loader.enter([action for action, _ in program.actions if self._takes_data(action)])
        self.value_store.enter(program.ownership)
        self._census.enter(program.ownership.slots_of(self.context.worker))
        self.end.enter(plane, program.ownership, program.routes)
        self.streams.enter(plane, program.ownership, program.routes, [action for action, _ in program.actions])
        if self.context.shards is not None:
            self.context.shards.enter(plane, program.ownership)
        self._copies.make_rooms(program.received_bytes)
        methods = [(action, text, self._methods[action.op]) for action, text in self._with_offloads(program.actions)]
        self._actions = [each for each in methods if each[0].op is not Op.STEP]
        self._steps = [each for each in methods if each[0].op is Op.STEP]

    def _with_offloads(self, actions: Sequence[tuple[Action, str]]) -> Sequence[tuple[Action, str]]:
        """Returns the actions with the copies of residuals to the host and back, which a plan does not have."""
        line, copy_time = [action for action, _ in actions], self.context.job.copy_time
        if copy_time is not None:
            if not any(action.op in STASH_OPS for action in line):
                line = [*line_with_offloads(line, copy_time, self.context.job.slices, *self.offloads.stashes())]
                actions = [(action, str(action)) for action in line]
            self.offloads.enter(line)
        return actions

    def _table(self) -> dict[Op, Method]:
        end, shards = self.end, self.context.shards
        table: dict[Op, Method] = {
            Op.F: self._forward,
            Op.REDO_F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weights,
            Op.SEND_F: self._send,
            Op.RECV_F: self._receive,
            Op.SEND_B: self._send,
            Op.RECV_B: self._receive,
            Op.STREAM: self.streams.run,
            Op.HAND: self.streams.run,
            Op.SHIP: self._ship,
            **dict.fromkeys(LEAVE_OPS, self.offloads.offload),
            **dict.fromkeys(STASH_OPS - LEAVE_OPS, self.offloads.reload),
            Op.HEAL: end.heal,
            Op.REDUCE_GRAD: end.reduce,
            Op.LOG: end.log,
            Op.COMMIT: self._vote,
            Op.STEP: end.take_step,
        }
        if shards is not None:
            table[Op.UNSHARD] = lambda action, step: shards.unshard(action.stage)
            table[Op.RESHARD] = lambda action, step: shards.reshard(action.stage)
        if self.context.job.copy_time is not None:
            table |= {op: self.offloads.around(table[op]) for op in (*FORWARD_OPS, Op.I, Op.W)}
        return {op: self._clock.timed(method) if op in _BUSY_OPS else method for op, method in table.items()}

    def run_actions(self) -> None:
        """Runs the open step up to its optimizer steps; raises Stopped, Fenced or TransferFailedError from a wait."""
        self._census.begin_step(self.step)
        self._plane.expect(self.step, self._worker_program.issued)
        self._receiver = Receiver(self._plane.in_order, self._worker_program.receives)
        if not self._worker_program.is_awaited:
            self._receiver.begin()
        self.streams.begin()
        if self._core_waits is not None:
            self._core_waits.begin_step()
        self._run_all(self._actions, self.context.control.check)

    def _run_all(self, entries: Sequence[QueuedAction], check: Callable[[], None]) -> None:
        # Neighbours in a program of slices may depend on each other.
        run_in_order(entries, check, self._run, has_pairs=self.context.job.slices == 1)
        self._leave()

    def _leave(self) -> None:
        self.context.control.leave(self.step)

    def _run(self, action: Action, text: str, run: Method) -> None:
        context, step, waits = self.context, self.step, self._core_waits
        strikes = context.failpoints.is_armed and (action.pipeline, action.stage) in self._worker_program.owned
        if strikes:
            self._leave()
            self._strike(action, "before")
        context.recorder.stage = action.stage
        context.control.begin(step, action.op in _BUSY_OPS, self.num_computed, text)
        if waits is not None and not (waits.are_read and action.op in COMPUTE_OPS):
            waits = None
        start_ns, waited_ns = now_ns(), 0 if waits is None else waits.total_ns()
        if strikes:
            self._strike(action, "during")
        try:
            run(action, step)
        except RAISED as error:
            if action.op in COMPUTE_OPS:
                blame_microbatch(error, self._loader.told(step, action))
            raise
        try:
            if strikes:
                so_far_ns = 0 if waits is None else waits.total_ns() - waited_ns
                self._meet(action, lambda: context.failpoints.delay(step, action, start_ns, so_far_ns))
        finally:  # the action has ended, even if the delay raises
            if waits is not None and step == self.step:
                self._times.add(action, waited_ns - waits.total_ns(), has_ended=False)
            self._ended(action, text, step, context.control.accepted, start_ns, now_ns())
            if self._census.is_due:
                self._census.look()
        if strikes:
            self._leave()
            self._strike(action, "after")

    def _tell(self, action: Action, text: str, step: int, epoch: int, start_ns: int, end_ns: int) -> None:
        """Records an action that the device has done; those of a step that is over count for no vote."""
        self.context.recorder.action(epoch, step, text, start_ns, end_ns)
        if action.op in COMPUTE_OPS:
            self.num_computed += 1
            if step == self.step:
                self._times.add(action, end_ns - start_ns)
        elif self.context.job.adapt_schedule and action.op in BORDER_OPS and step == self.step:
            self._times.passes(action, end_ns)

    def finish(self) -> None:
        """Records the rest of the actions, after the last step."""
        self._clock.finish()

    def _strike(self, action: Action, when: When) -> None:
        self._meet(action, lambda: self.context.failpoints.at(self.step, action, when))

    def _meet(self, action: Action, failpoint: Callable[[], None]) -> None:
        try:
            failpoint()
        except Fenced:
            if action.op is not Op.STEP:  # all replicas here take the step, or none: a later check raises
                raise

    def catch_up(self, commit: CommitMessage) -> None:
        """Takes the optimizer steps of all logged slots, after a fence before the commit of the open step."""
        slots = [slot for slot in self.context.replicas.whole() if slot in self.end.logged]
        steps = [Action(stage, Op.STEP, pipeline=pipeline) for pipeline, stage in slots]
        self._take(commit, [(action, str(action), self._methods[Op.STEP]) for action in steps])

    def take_step(self, commit: CommitMessage) -> None:
        """Takes the optimizer steps of the program, after the commit of the open step."""
        self._take(commit, self._steps)

    def _take(self, commit: CommitMessage, steps: Sequence[QueuedAction]) -> None:
        self.end.commit = commit
        self._copies.settle()
        self._run_all(steps, lambda: None)
        replicas = self.context.replicas
        for slot in [slot for slot in replicas.stages if slot not in self.end.logged]:
            replicas.drop(slot)  # it has not taken the step: no worker can use it
        if any(stage in (0, self.context.job.slots - 1) for _, stage in replicas.stages):
            self._loader.follow(self.step)
        self._tell_of_link(self.offloads.copy_times())
        self.forget_step()
        self._census.end_step(self.step)
        self.step += 1

    def _tell_of_link(self, copies: Sequence[tuple[int, int]]) -> None:
        """Records what the copies of a step to the host and back took, once."""
        self._steps_with_copies += bool(copies)
        if not copies or self._steps_with_copies != _STEADY:
            return
        forwards_ns = [self._times.forward_ns(slot) for slot in self._worker_program.owned]
        busy_ns = sum(took for _, took in copies)
        copy_time = busy_ns * len(forwards_ns) / len(copies) / max(1, sum(forwards_ns))
        num_bytes = sum(size for size, _ in copies)
        self.context.recorder.write(
            HostLinkRecord(step=self.step, bytes=num_bytes, busy_ns=busy_ns, copy_time=copy_time)
        )

    def begin_at(self, step: int) -> None:
        """Goes on to another open step; no replica is here."""
        self.forget_step()
        self.step = step

    def forget_step(self) -> None:
        """Drops all values of the open step; weights and buffers stay."""
        for stage in self.context.replicas.stages.values():
            stage.forget_step()
        self.offloads.clear()
        self.end.clear()
        self._offers = ResidualOffers()
        self._times.clear()
        self.streams.clear()
        self.value_store.clear()
        self._loader.forget_step()

    def inventory(self, left_ns: int = 0) -> Inventory:
        """Returns the values that this worker holds and, if it leaves, the residuals it can send in the time left."""
        self.streams.settle()
        is_sliced = self.context.job.slices > 1  # a later slice reads the states in the residual of an earlier one
        offers = self._offer_residuals(left_ns) if left_ns and not is_sliced else ResidualOffers()
        stages = {slot: self.context.replicas.stages[slot] for slot in self.context.replicas.whole()}
        values = [Value(Kind.RESIDUAL, *slot, each) for slot, stage in stages.items() for each in stage.residuals]
        values += [Value(Kind.CARRY, *slot, each) for slot, stage in stages.items() for each in stage.carries]
        values += [Value(Kind.PENDING, *slot, each) for slot, stage in stages.items() for each in stage.pending]
        return Inventory(
            self.context.worker,
            self.step,
            tuple(stages),
            {slot: stage.counted for slot, stage in stages.items()},
            {slot: stage.added for slot, stage in stages.items()},
            tuple(slot for slot in stages if slot in self.end.logged),
            ValueRuns([*self.value_store.values(), *values]),
            offers.saved,
            offers.stuck,
            self._plane.rates() if offers.saved else {},
        )

    def _offer_residuals(self, left_ns: int) -> ResidualOffers:
        replicas = self.context.replicas
        slots = [slot for slot in replicas.whole() if replicas.stages[slot].residuals]
        if self.context.job.redundancy == "eager":  # an owner has what its shadow has
            slots = [slot for slot in slots if slot in self._worker_program.owned]
        stages = {slot: (replicas.stages[slot], self._times.forward_ns(slot)) for slot in slots}
        self._offers = residual_offers(stages, self.context.job, left_ns)
        return self._offers

    def _ship(self, action: Action, step: int) -> None:
        """One end sends the residual of a microbatch, the other takes it in."""
        program, slot, channel = self._worker_program, (action.pipeline, action.stage), self._plane.aside
        key = aside_key(program.ownership.grid, AsidePurpose.RESIDUAL, *slot, action.microbatch)
        value = Value(Kind.RESIDUAL, *slot, action.microbatch)
        if slot in program.owned:
            stage = self.context.replicas.stages[slot]
            parcel = take_parcel(channel, program.routes.sources[value], key, stage)
            keep_parcel(stage, step, action.microbatch, parcel, partial(self._tell_of_redone, action))
        else:
            send_parcel(channel, program.routes.targets[value], key, self._offers.parcels[value])

    def _tell_of_redone(self, action: Action, why: str) -> None:
        self.context.recorder.write(RedoneRecord(step=self.step, action=str(action), why=why))

    def _forward(self, action: Action, step: int) -> None:
        stage, microbatch, pipeline = action.stage, action.microbatch, action.pipeline
        replica = self.context.replicas.stages[pipeline, stage]
        inputs: Tensors = ()
        targets = weight = None
        if stage > 0:
            inputs = self.value_store.consume(needed(action, Kind.ACTIVATION))
        if stage in self._ends:
            start_ns = now_ns()
            batch = self._loader.load(step, action)
            self._note_load(action, start_ns)
            inputs = batch.inputs if stage == 0 else inputs
            if replica.is_last:
                targets, weight = batch.targets, self._loader.weight(step, action)
        run = replica.forward if action.op is Op.F else replica.redo_forward
        outputs = run(step, microbatch, inputs, targets, weight)
        if not replica.is_last:
            self.value_store.make(Value(Kind.ACTIVATION, pipeline, stage, microbatch), outputs)

    def _backward(self, action: Action, step: int) -> None:
        stage, microbatch, pipeline = action.stage, action.microbatch, action.pipeline
        replica = self.context.replicas.stages[pipeline, stage]
        gradients: Tensors = ()
        if not replica.is_last:
            gradients = self.value_store.consume(needed(action, Kind.GRADIENT))
        run = replica.backward if action.op is Op.B else replica.backward_input
        outgoing = run(step, microbatch, gradients)
        if stage > 0:
            self.value_store.make(Value(Kind.GRADIENT, pipeline, stage, microbatch), outgoing)
        if action.op is Op.B:
            self._loader.check_used(step, action)

    def _backward_weights(self, action: Action, step: int) -> None:
        self.context.replicas.stages[action.pipeline, action.stage].backward_weights(action.microbatch)
        self._loader.check_used(step, action)

    def _vote(self, action: Action, step: int) -> None:
        slot = action.pipeline, action.stage
        self._clock.look()
        self.end.vote(action, step, self._loader.marks_of(slot), self._times)

    def _receive(self, action: Action, step: int) -> None:
        forward = self._worker_program.next_forwards.get(action)
        if forward is not None and self._receiver.must_wait():
            self._prepare(forward)
        self.value_store.receive(*self._receiver.take())

    def _prepare(self, forward: Action) -> None:
        """Prepares the random keys and the batch of a later forward, in time that would pass in a wait."""
        replica = self.context.replicas.stages[forward.pipeline, forward.stage]
        replica.prepare(self.step, forward.microbatch)
        if self._takes_data(forward):
            start_ns = now_ns()
            self._loader.prepare(self.step, forward)
            self._note_load(forward, start_ns)

    def _note_load(self, action: Action, start_ns: int) -> None:
        context = self.context
        context.recorder.chore(context.control.accepted, self.step, Chore.DATA, start_ns, str(action))

    def _takes_data(self, action: Action) -> bool:
        return action.op in FORWARD_OPS and action.stage in self._ends

    def _send(self, action: Action, step: int) -> None:
        targets, key = self._worker_program.targets[action]
        channel, value = self._plane.in_order, carried(action)
        tensors = self.value_store.to_send(value)
        if not self._is_host:
            tensors = channel.leaving(key, tensors)
        for target in targets:
            channel.send(target, key, tensors)
        self.value_store.sent(value, tensors)
        self._receiver.begin()


_STEADY = 2  # of the steps with copies, the first that is like the others
# These ops wait for no other process: a worker that stays inside one of them hangs.
_BUSY_OPS = COMPUTE_OPS | {Op.STEP}
