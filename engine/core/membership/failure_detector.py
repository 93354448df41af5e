"""The failure detector: the position of each worker by its heartbeats, and the workers that are silent or hang.

Rules: a worker hangs if it is inside one action for longer than an adaptive deadline. A waiting worker never hangs,
because one stopped worker makes all others wait. A coordinator that was suspended itself judges no worker.
"""

from __future__ import annotations

from engine.core.exclusion import Cause, Position, Verdict, excluded
from engine.core.membership.events import Heartbeat
from engine.core.membership.state import Sighting, State


def alive(state: State, worker: int, now_ns: int) -> State:
    """Returns the state after a message without a position."""
    seen = state.sightings.get(worker) or Sighting(now_ns, now_ns)
    return state._replace(sightings={**state.sightings, worker: seen._replace(heard_ns=now_ns)})


def heard(state: State, beat: Heartbeat) -> State:
    """Returns the state after a heartbeat; a late one only proves that the worker is alive."""
    now_ns = beat.now_ns
    was = state.sightings.get(beat.worker) or Sighting(now_ns, now_ns)
    at = (beat.epoch, beat.step, beat.index, not beat.inside)
    seen = was._replace(heard_ns=now_ns)
    if at > was.at:
        slowest_ns = max(was.slowest_ns, now_ns - was.since_ns) if was.is_inside else was.slowest_ns
        same_step = was.at[1] == beat.step
        seen = Sighting(
            now_ns, now_ns, at, slowest_ns if same_step else 0, was.slowest_before_ns if same_step else slowest_ns
        )
    moves = beat.worker not in state.done and (at > was.at or seen.is_inside)
    moved_ns = now_ns if moves else state.moved_ns
    return state._replace(moved_ns=moved_ns, sightings={**state.sightings, beat.worker: seen})


def unresponsive(state: State, now_ns: int) -> Verdict:
    """Returns the verdict on the members that are silent or hang, in the order of their numbers."""
    options, found = state.patience, []
    for worker in state.members:
        seen = state.sightings.get(worker)
        if seen is None or worker in state.done:
            continue
        allowed_ns = max(options.hang_ns, options.hang_factor * max(seen.slowest_ns, seen.slowest_before_ns))
        if now_ns - seen.heard_ns > options.silence_ns:
            how = f"has been silent for {_seconds(now_ns - seen.heard_ns)}"
            found.append(excluded(worker, Cause.SILENCE, how, last_seen(state, worker), seen.heard_ns))
        elif seen.is_inside and now_ns - seen.since_ns > allowed_ns:
            how = f"hangs for {_seconds(now_ns - seen.since_ns)} (limit {_seconds(allowed_ns)})"
            found.append(excluded(worker, Cause.HANG, how, last_seen(state, worker), seen.since_ns))
    return tuple(found)


def ticked(state: State, now_ns: int) -> State:
    """Returns the state after a tick; after a long gap, in which the coordinator slept, all deadlines start again."""
    if now_ns - state.ticked_ns <= state.options.silence_ns // 2:
        return state._replace(ticked_ns=now_ns)
    awake = {worker: seen._replace(heard_ns=now_ns, since_ns=now_ns) for worker, seen in state.sightings.items()}
    return state._replace(moved_ns=now_ns, looked_ns=now_ns, ticked_ns=now_ns, sightings=awake)


def last_seen(state: State, worker: int) -> Position | None:
    """Returns the position of a worker's last heartbeat, or None if it was not in the open step."""
    seen = state.sightings.get(worker)
    if seen is None or not seen.at[0] or seen.at[1] <= state.committed:
        return None
    return Position(*seen.at[1:])


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.1f} s"
