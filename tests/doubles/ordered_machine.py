"""The machine of provenance over the ordered wire: its messages have no tags, and their keys are checked.

Activations and gradients travel over the wire in the issue order of the program. All others go aside, by their key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from engine.core.action import OP_TABLE, Action, Op, Program
from engine.core.ownership import Ownership
from engine.core.program.issue_order import Issue, RoutedValue, issue_order
from engine.core.value import Value
from tests.core.provenance import Machine
from tests.doubles.ordered_wire import Operation, OrderedWire

IssueOrder = Callable[[Program, Ownership], Mapping[int, tuple[Issue, ...]]]


class OrderedMachine(Machine):
    """A machine whose workers exchange values without tags; `order_of` gives the issues of a program."""

    alone = frozenset()  # an action of any op can end the wait of another worker
    buffers: Callable[[], bool] = staticmethod(lambda: False)  # whether a send ends before its receive has begun
    checks_keys = True
    receives_early = False  # a receive is issued as soon as all before it are, as the transport does
    order_of: IssueOrder = staticmethod(issue_order)

    def enter(self, programs: Iterable[Program], ownership: Ownership) -> None:
        """Begins the programs of successive steps; nothing that was on its way is left."""
        programs = list(programs)
        super().enter(programs, ownership)
        self.wire = OrderedWire(self.buffers, self.checks_keys)
        self.issues: dict[int, deque[tuple[int, Issue]]] = {worker: deque() for worker in self.bodies}
        self.messages: dict[tuple[int, int, Value], RoutedValue] = {}  # by taker, step and value
        first = dict.fromkeys(self.bodies, 0)
        for step, program in enumerate(programs, self.newest()):
            for worker, issues in self.order_of(program, ownership).items():
                for behind, message in issues:
                    self.issues[worker].append((step, Issue(first[worker] + behind, message)))
                    self.messages[message.target, step, message.value] = message
            for worker, line in program.items():
                first[worker] += len(line)
        for worker in self.bodies:
            self._issue(worker, 0)

    def _issue(self, worker: int, behind: int) -> None:
        """Issues what comes behind that many actions of a worker."""
        issues = self.issues[worker]
        while issues and (issues[0][1].behind <= behind or (self.receives_early and self._is_taken(worker))):
            step, (_, message) = issues.popleft()
            self.wire.issue(worker, [self._operation(worker, step, message)])

    def _is_taken(self, worker: int) -> bool:
        """Returns whether the next issue of a worker is a receive."""
        return self.issues[worker][0][1].message.target == worker

    def _operation(self, worker: int, step: int, message: RoutedValue) -> Operation:
        value, source, target = message
        if source != worker:
            return Operation(False, source, (step, message), None, size=1)
        assert self.bodies[worker].step == step, f"worker {worker} sends {value} in another step"
        return Operation(True, target, (step, message), self.bodies[worker].values[value], size=1)

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
