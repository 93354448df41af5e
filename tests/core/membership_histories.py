"""Simulated histories of the membership protocol: one seed, one history, the same every time.

``python -m tests.core.membership_histories SEED`` replays one and prints what happened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from engine.core.errors import InvariantError
from engine.core.membership import events
from engine.core.membership.state import GATHERING, Phase
from tests.core.membership_world import ROUND, TRAINING, Violation, Worker, World

_MOST_ROUNDS = 150
_MOST_TURNS = 200


@dataclass(frozen=True)
class History:
    """The result of a seed; `problem` is empty if every invariant held."""

    seed: int
    trace: int
    problem: str
    arrows: set[tuple[Phase, type, Phase]]
    phase: Phase
    epoch: int


def run(seed: int, tell: Callable[[str], None] | None = None) -> History:
    """Runs the history of a seed: two rounds of faults and a quiet time, then no faults until the end."""
    world = World(Random(seed), tell)  # noqa: S311
    problem = ""
    try:
        hasty = world.pick() < 0.5  # trouble comes back before everything has been said, and before any deadline
        for _ in range(2):
            _trouble(world, 4 + int(world.pick() * 10))
            if hasty:
                _peace(world, int(world.pick() * 3), 1 + int(world.pick() * 3))
            else:
                _peace(world, int(world.pick() * 5))
        world.calm = True
        _peace(world, _MOST_ROUNDS)
        if not world.has_ended():
            problem = f"stuck while {world.state.phase} in epoch {world.state.epoch}: {world.state.reason}"
    except (Violation, InvariantError) as error:
        problem = str(error)
    return History(seed, world.trace, problem, world.arrows, world.state.phase, world.state.epoch)


def _trouble(world: World, num_turns: int) -> None:
    """Injects faults, most of them during a recovery; time passes slowly, and messages come in any order."""
    pick = world.pick
    for _ in range(num_turns):
        chance = pick()
        if chance > (0.7 if world.state.phase in GATHERING else 0.8):
            fault = _FAULTS[int(pick() * len(_FAULTS))]
            if world.state.phase is Phase.RECONFIGURING and pick() < 0.4:
                fault = _stop_job  # which leaves no step to finish
            fault(world, world.workers[int(pick() * len(world.workers))])
        elif chance < 0.4:
            _deliver_any(world)
        elif chance < 0.65:
            _turn_any(world)
        elif chance < 0.68:
            world.now += 1 + int(pick() * 2)
            world.deliver(events.Tick, ())
        elif world.late:
            world.emit(world.late.pop())
        elif world.echoes:
            world.deliver(*world.echoes.pop())


def _deliver_any(world: World) -> None:
    bus = world.bus
    if bus:
        place = int(world.pick() * len(bus))
        said, bus[place] = bus[place], bus[-1]
        bus.pop()
        world.deliver(*said)


def _turn_any(world: World) -> None:
    worker = world.workers[int(world.pick() * len(world.workers))]
    if worker.alive and not worker.stopped and worker.inbox:
        world.turn(worker)


def _replace_coordinator(world: World, worker: Worker) -> None:
    world.replace_coordinator()


def _sleep(world: World, worker: Worker) -> None:
    """The coordinator itself stands still, and must not take its own silence for that of others."""
    world.now += 10 * ROUND
    world.deliver(events.Tick, ())


def _kill(world: World, worker: Worker) -> None:
    if worker.alive:
        world.struck.add(worker.number)
        world.leave(worker, (-9, -11, 0, 1)[int(world.pick() * 4)])


def _stop(world: World, worker: Worker) -> None:
    world.struck.add(worker.number)
    worker.stopped = True


def _spin(world: World, worker: Worker) -> None:
    _stop(world, worker)
    worker.spins = True


def _wake(world: World, worker: Worker) -> None:
    """A worker that was thought dead goes on in its old epoch before it reads anything."""
    if worker.alive and worker.stopped:
        worker.stopped = worker.spins = False
        if worker.mode == TRAINING:
            world.complain(worker, None)
            world.vote(worker)


def _notify(world: World, worker: Worker) -> None:
    world.noticed.add(worker.number)
    world.say(events.Notice, worker.number, 50)


def _stop_job(world: World, worker: Worker) -> None:
    world.say(events.Notice, None, 50)


def _lose_node(world: World, worker: Worker) -> None:
    for each in world.workers:
        if each.number // 2 == worker.number // 2:
            world.struck.add(each.number)
            each.alive = False
    world.say(events.LeaseExpired, f"node-{worker.number // 2}")


def _break_link(world: World, worker: Worker) -> None:
    world.broken = (worker.number, (worker.number + 1) % len(world.workers))


def _slander(world: World, worker: Worker) -> None:
    """A healthy worker suspects another worker, or reports a suspicion without a peer."""
    if worker.mode == TRAINING and worker.alive and not worker.stopped:
        peer = int(world.pick() * (len(world.workers) + 1)) - 1
        world.complain(worker, None if peer < 0 else peer)


_FAULTS: tuple[Callable[[World, Worker], None], ...] = (
    *(_replace_coordinator, _slander) * 5,
    *(_kill, _notify) * 4,
    *(_wake, _stop) * 2,
    *(_sleep, _spin, _stop_job, _lose_node, _break_link),
)


def _peace(world: World, num_rounds: int, most_turns: int = _MOST_TURNS) -> None:
    """Runs without faults: all workers act at once; between two rounds time passes and heartbeats come."""
    for _ in range(num_rounds):
        _flush(world, most_turns)
        if world.has_ended() and not any(worker.alive and not worker.stopped for worker in world.workers):
            return
        world.now += ROUND
        for worker in world.workers:
            if not worker.joined and worker.alive and not worker.stopped:
                world.join(worker)
            elif worker.joined and worker.alive and (worker.spins or not worker.stopped):
                place = (worker.committed + 1, 2 if worker.spins else 1, worker.spins)  # waits after 1, hangs in 2
                world.deliver(events.Heartbeat, (worker.number, worker.epoch, *place))
        world.deliver(events.Tick, ())


def _flush(world: World, most_turns: int) -> None:
    for _ in range(most_turns):
        while world.late:
            world.emit(world.late.pop())
        for worker in world.workers:
            if worker.inbox and worker.alive and not worker.stopped:
                world.turn(worker)
        if not world.bus:
            return
        bus, world.bus, starts = world.bus, [], world.starts
        for said in bus:
            if world.starts == starts:  # else it is a message of a worker before the restart
                world.deliver(*said)
        if world.echoes and world.pick() < 0.4:
            world.bus.append(world.echoes.pop())
    if most_turns == _MOST_TURNS:
        raise Violation("the talking never ends")


if __name__ == "__main__":
    outcome = run(int(sys.argv[1]), tell=print)
    print(f"seed {outcome.seed}, trace {outcome.trace}: {outcome.problem or 'every promise was kept'}")
    sys.exit(bool(outcome.problem))
