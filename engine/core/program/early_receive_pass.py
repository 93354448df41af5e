"""The pass for backends on which a send blocks until its receive begins: it moves receives to the place of the send.

The pass walks the program in columns, one compute action of each worker in turn. At a send, it puts the receive where
the taker has come to. So the lists of all workers are parts of one order in which a receive directly follows its send:

    worker 0   0F0 0SEND_F0          0F1 ...
    worker 1                1RECV_F0     1F0 ...

No worker waits in a circle, and no two transfers cross. Without this pass a program relies on sends that do not block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.core.action import COMPUTE_OPS, RECEIVE_OPS, SEND_OPS, Action
from engine.core.program.dependencies import carried
from engine.core.value import Value


def with_early_receives(program: Mapping[int, tuple[Action, ...]]) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions and transfers with its receives moved ahead; each value has one taker.

    A program that deadlocks comes back unchanged.
    """
    taker = {
        carried(action): (worker, action)
        for worker, actions in program.items()
        for action in actions
        if action.op in RECEIVE_OPS
    }
    moved: dict[int, list[Action]] = {worker: [] for worker in program}
    sent: set[Value] = set()

    def columns(worker: int) -> Iterator[None]:
        for action in program[worker]:
            if action.op in RECEIVE_OPS:
                while carried(action) not in sent:
                    yield
                continue
            moved[worker].append(action)
            if action.op in SEND_OPS and carried(action) in taker:
                to, receive = taker[carried(action)]
                moved[to].append(receive)
                sent.add(carried(action))
            if action.op in COMPUTE_OPS:
                yield

    lines = [columns(worker) for worker in program]
    num_moved = -1
    while num_moved < (num_moved := sum(map(len, moved.values()))):
        for line in lines:
            next(line, None)
    whole = num_moved == sum(map(len, program.values()))
    return {worker: tuple(moved[worker]) if whole else actions for worker, actions in program.items()}
