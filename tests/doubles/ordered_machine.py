"""The machine of provenance over the ordered wire: its messages have no tags, and their keys are checked.

Values in `IN_ORDER` travel over the wire in the issue order of the program. Streams and states go aside, by their key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from engine.core.action import OP_TABLE, Action, Op, Program
from engine.core.ownership import Ownership
from engine.core.value import WIRE, Kind, Value
from tests.core.provenance import Body, Log, Machine
from tests.doubles.issue_order import Issue, RoutedValue, issue_order
from tests.doubles.ordered_wire import Operation, OrderedWire

# All that a wire without tags knows of a message: activations and gradients are of equal size, and so are sums.
_SIZES = {Kind.ACTIVATION: 1, Kind.GRADIENT: 1, Kind.ADDED: 2, Kind.REDUCED: 3, Kind.LOGGED: 3}
IssueOrder = Callable[[Program, Ownership, Iterable[tuple[int, Value]]], dict[int, tuple[Issue, ...]]]


class OrderedMachine(Machine):
    """A machine whose workers exchange values without tags; `order_of` gives the issues of a program."""

    alone = frozenset()  # an action of any op can end the wait of another worker
    buffers: Callable[[], bool] = staticmethod(lambda: False)  # whether a send ends before its receive has begun
    checks_keys = True
    order_of = staticmethod(issue_order)

    def enter(self, programs: Iterable[Program], ownership: Ownership) -> None:
        """Begins the programs of successive steps; nothing that was on its way is left."""
        programs = list(programs)
        super().enter(programs, ownership)
        self.wire = OrderedWire(self.buffers, self.checks_keys)
        self.issues: dict[int, deque[tuple[int, Issue]]] = {worker: deque() for worker in self.bodies}
        self.messages: dict[tuple[int, int, Value], RoutedValue] = {}  # by taker, step and value
        first = dict.fromkeys(self.bodies, 0)
        for step, program in enumerate(programs, self.newest()):
            for worker, issues in self.order_of(program, ownership, _reduced_before(program, ownership)).items():
                for behind, messages in issues:
                    self.issues[worker].append((step, Issue(first[worker] + behind, messages)))
                    for each in messages:
                        self.messages[each.target, step, each.value] = each
            for worker, line in program.items():
                first[worker] += len(line)
        for worker in self.bodies:
            self._issue(worker, 0)

    def _issue(self, worker: int, behind: int) -> None:
        """Issues what comes behind that many actions of a worker."""
        issues = self.issues[worker]
        while issues and issues[0][1].behind <= behind:
            step, (_, messages) = issues.popleft()
            self.wire.issue(worker, [self._operation(worker, step, each) for each in messages])

    def _operation(self, worker: int, step: int, message: RoutedValue) -> Operation:
        value, source, target = message
        size = _SIZES[value.kind]
        if source != worker:
            return Operation(False, source, (step, message), None, size)
        assert self.bodies[worker].step == step, f"worker {worker} sends {value} in another step"
        return Operation(True, target, (step, message), self._payload(self.bodies[worker], value), size)

    def _payload(self, body: Body, value: Value) -> object:
        slot = (value.pipeline, value.stage)
        match value.kind:
            case Kind.ADDED:
                replica = body.replicas[slot]
                assert replica.added == replica.counted == self.ownership.grid.microbatches
                return replica.accumulator, replica.buffers
            case Kind.REDUCED:
                return body.reduced[value.stage]
            case Kind.LOGGED:
                return body.logged[slot]
        return body.values[value]

    def _do(self, worker: int, action: Action) -> bool:
        done = super()._do(worker, action)
        if done:
            behind, line = self.cursor[worker] + 1, self.program[worker]
            while action.op is Op.STEP and behind < len(line) and line[behind].op is Op.STEP:
                behind += 1
            self._issue(worker, behind)
        return done

    def _arrived(self, worker: int, step: int, value: Value) -> object:
        """Returns a value that has arrived, or None."""
        message = self.messages.get((worker, step, value))
        assert message is not None, f"worker {worker} has issued no receive of {value}"
        return self.wire.arrived.get((worker, (step, message)))

    def _send(self, worker: int, action: Action) -> None:
        """A SEND only marks the place: the issue behind it has the message."""

    def _receive(self, worker: int, action: Action) -> bool:
        to = OP_TABLE[action.op].needs[0]
        value = Value(to.kind, action.pipeline, action.stage + to.stage, action.microbatch)
        body = self.bodies[worker]
        what = self._arrived(worker, body.step, value)
        if what is None:
            return False
        assert isinstance(what, str)
        body.values[value] = what
        return True

    def _reduce(self, body: Body, worker: int, stage: int) -> bool:
        come: list[tuple[str, str]] = []
        for pipeline in range(self.ownership.grid.pipelines):
            value = Value(Kind.ADDED, pipeline, stage, self.ownership.grid.microbatches - 1)
            mine = self.ownership.owner(pipeline, stage) == worker
            part = self._payload(body, value) if mine else self._arrived(worker, body.step, value)
            if part is None:
                return False
            come.append(part)  # type: ignore[arg-type]
        body.reduced[stage] = self._sum_of(come)
        return True

    def _reduced(self, body: Body, pipeline: int, stage: int) -> Log | None:
        if self.bodies[self.ownership.owner(pipeline, stage)] is body:
            return body.reduced[stage]
        worker = next(worker for worker, each in self.bodies.items() if each is body)
        return self._arrived(worker, body.step, Value(Kind.REDUCED, pipeline, stage))  # type: ignore[return-value]

    def _end(self, worker: int, action: Action) -> bool:
        slot = (action.pipeline, action.stage)
        if action.op is not Op.LOG or self.ownership.owner(*slot) == worker:
            return super()._end(worker, action)
        body = self.bodies[worker]
        entry = self._arrived(worker, body.step, Value(Kind.LOGGED, *slot))
        if entry is not None:
            body.logged[slot] = entry  # type: ignore[assignment]
        return entry is not None


def _reduced_before(program: Program, ownership: Ownership) -> list[tuple[int, Value]]:
    """Returns the sums that a plan does not make again: their owners held them at the start."""
    again = {action.stage for actions in program.values() for action in actions if action.op is Op.REDUCE_GRAD}
    return [(WIRE, Value(Kind.REDUCED, *slot)) for slot in ownership.grid.slots() if slot[1] not in again]
