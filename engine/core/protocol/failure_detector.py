"""The failure detector: the position of each worker by heartbeats and evidence; the workers that are silent or hang.

    inside an action, the main thread neither runs nor waits for a core   hangs after an adaptive deadline
    inside an action, it runs                                             hangs after five times that
    inside an action, and no agent can see whether it runs                hangs after half a minute, or longer
    stopped by a signal                                                   out when it has been silent for too long
    silent, and it runs (a thread holds Python's lock)                    out after five times that
    it loads data                                                         never out, unless it is stopped

Rules: a waiting worker never hangs, because one stopped worker makes all others wait. Only time that the coordinator
has watched counts, not time in which it slept or before it took over. A worker on a silent host is not judged: the loss
of a host is one verdict. For a worker on another host the silence is what its agent there has seen; between two signs
of life it does not grow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from engine.core.exclusion import Cause, Position, Verdict, excluded
from engine.core.messages import HeartbeatMessage
from engine.core.protocol.events import HostWord, Loading, Sight, after, unwatched_ns
from engine.core.protocol.state import Counts, Edge, Options, Report, Sighting, State, dark_edges, deadline_ns

_QUIET_NS = 600_000_000  # two pings without an answer: a thread holds Python's lock


def alive(state: State, worker: int, now_ns: int) -> State:
    """Returns the state after a message without a position."""
    seen = state.sightings.get(worker) or Sighting(now_ns, now_ns)
    return state._replace(sightings={**state.sightings, worker: seen._replace(heard_ns=now_ns)})


def heard(state: State, now_ns: int, worker: int, beat: HeartbeatMessage) -> State:
    """Returns the state after a heartbeat; a late one only proves that the worker is alive."""
    seen, moves = _heard(state, now_ns, worker, beat)
    moved_ns = now_ns if moves else state.moved_ns
    return state._replace(moved_ns=moved_ns, sightings={**state.sightings, worker: seen})


def _heard(state: State, now_ns: int, worker: int, beat: HeartbeatMessage) -> tuple[Sighting, bool]:
    """Returns the sighting of a worker with a heartbeat, and whether that is progress of the job."""
    quiet_ns = min(beat.quiet_ns, now_ns - state.watched_ns)
    report = Report(beat.epoch, quiet_ns, tuple(Counts(*each) for each in beat.counts)) if beat.counts else None
    was = state.sightings.get(worker) or Sighting(now_ns, now_ns)
    at = (beat.epoch, beat.step, beat.index, not beat.inside)
    seen = was._replace(heard_ns=now_ns, report=report, device=beat.device if at == was.at else "")
    if at > was.at:
        slowest_ns = max(was.slowest_ns, now_ns - was.since_ns) if was.is_inside else was.slowest_ns
        same_step = was.at[1] == beat.step
        before_ns = was.slowest_before_ns if same_step else slowest_ns
        slowest = slowest_ns if same_step else 0, before_ns
        seen = Sighting(now_ns, now_ns, at, *slowest, was.evidence, report, beat.device)
    return seen, worker not in state.done and (at > was.at or seen.is_inside)


def told(state: State, words: Mapping[int, HostWord], now_ns: int) -> State:
    """Returns the state after what other hosts tell of their workers, all at once; a slow way here is no silence."""
    sightings, moved_ns, known = dict(state.sightings), state.moved_ns, {*state.members, *state.waiting}
    for worker, word in words.items():
        if worker not in known:
            continue
        if word.heartbeat is not None:
            sightings[worker], moves = _heard(state, now_ns, worker, word.heartbeat)
            moved_ns = now_ns if moves else moved_ns
        if (seen := sightings.get(worker)) is not None:
            sightings[worker] = seen._replace(heard_ns=max(now_ns - word.age_ns, state.watched_ns))
    return state._replace(moved_ns=moved_ns, sightings=sightings) if words else state


def sighted(state: State, sights: Mapping[int, Sight], now_ns: int) -> State:
    """Returns the state after looks at processes of workers, which are no signs of life."""
    sightings, moved_ns, members = dict(state.sightings), state.moved_ns, {*state.members}
    for worker, sight in sights.items():
        was = sightings.get(worker)
        if was is None or worker not in members:
            continue
        at = (sight.epoch, sight.step, sight.number, not sight.inside)
        seen = was._replace(evidence=after(was.evidence, sight, now_ns))
        if at > was.at:  # it has come there since the last tick
            seen = seen._replace(at=at, since_ns=max(now_ns - sight.inside_ns, state.ticked_ns), device="")
        elif at == was.at and sight.inside:
            seen = seen._replace(since_ns=max(now_ns - sight.inside_ns, was.since_ns))
        if worker not in state.done and (at > was.at or seen.loading is not Loading.NONE):
            moved_ns = now_ns
        sightings[worker] = seen
    return state._replace(moved_ns=moved_ns, sightings=sightings) if sights else state


def unresponsive(state: State, now_ns: int) -> Verdict:
    """Returns the verdict on the members that are silent or hang, in the order of their numbers."""
    options, exclusions = state.patience, []
    for worker in state.members:
        seen = state.sightings.get(worker)
        if seen is None or worker in state.done:
            continue
        if now_ns - seen.heard_ns > _silence_allowed_ns(seen, options, now_ns):
            how = f"has been silent for {_seconds(now_ns - seen.heard_ns)}"
            exclusions.append(excluded(worker, Cause.SILENCE, how, last_seen(state, worker), seen.heard_ns))
        elif how := _hang(seen, options, now_ns):
            exclusions.append(excluded(worker, Cause.HANG, how, last_seen(state, worker), seen.since_ns))
    return tuple(exclusions)


def _silence_allowed_ns(seen: Sighting, options: Options, now_ns: int) -> float:
    evidence = seen.evidence
    if evidence is None or evidence.is_stopped:
        return options.silence_ns
    if seen.loading:
        return float("inf")
    runs = now_ns - evidence.worked_ns < options.silence_ns
    return options.silence_ns * (options.running_factor if runs else 1)


def _hang(seen: Sighting, options: Options, now_ns: int) -> str:
    """Returns the words on a worker that hangs, else an empty text."""
    evidence, slowest_ns = seen.evidence, seen.known_slowest_ns
    where = f" in a kernel of {seen.device}" if seen.device else ""
    if not seen.is_inside or seen.loading is Loading.MAIN or (evidence is not None and evidence.is_stopped):
        return ""
    # A thread that loads data may hold Python's lock: then no time passes for the main thread.
    until_ns = seen.heard_ns if seen.loading else now_ns
    allowed_ns = max(options.hang_ns, options.hang_factor * slowest_ns)
    first_ns = 0 if evidence is not None and slowest_ns else options.first_ns
    if evidence is None:
        since_ns, limit_ns = seen.since_ns, max(allowed_ns, first_ns)
    else:
        since_ns, limit_ns = max(seen.since_ns, evidence.stopped_ns), max(options.running_factor * allowed_ns, first_ns)
        is_quiet = now_ns - seen.heard_ns > _QUIET_NS
        still_ns = until_ns - max(since_ns, evidence.ran_ns, evidence.worked_ns if is_quiet else 0)
        if still_ns > (allowed_ns := max(allowed_ns, first_ns)):
            how = f"hangs{where} for {_seconds(until_ns - since_ns)} without running"
            return f"{how} (limit {_seconds(allowed_ns)})"
    inside_ns = until_ns - since_ns
    return f"hangs{where} for {_seconds(inside_ns)} (limit {_seconds(limit_ns)})" if inside_ns > limit_ns else ""


def dark(state: State, now_ns: int) -> tuple[Edge, ...]:
    """Returns the dark edges if all members wait, have answered the last pings, and none loads data or is stopped."""
    reports: dict[int, Report | None] = {}
    for worker in state.members:
        seen = state.sightings.get(worker)
        if worker in state.done or seen is None or seen.is_inside or seen.loading:
            return ()
        if now_ns - seen.heard_ns > _QUIET_NS or (seen.evidence is not None and seen.evidence.is_stopped):
            return ()
        reports[worker] = seen.report
    return dark_edges(reports, state.epoch, deadline_ns(state.steps_ns))


def ticked(state: State, now_ns: int, unseen: Collection[int] = ()) -> State:
    """Returns the state after a tick, without the time not watched; deadlines of `unseen` workers start again."""
    late_ns = unwatched_ns(state.ticked_ns, now_ns)
    state = _later(state, late_ns, now_ns) if late_ns else state
    again = {
        worker: seen.with_new_deadlines(now_ns)._replace(report=None)
        for worker, seen in state.sightings.items()
        if worker in unseen
    }
    if any(worker in again for worker in state.members):
        state = state._replace(moved_ns=now_ns, looked_ns=now_ns)
    return state._replace(ticked_ns=now_ns, sightings={**state.sightings, **again} if again else state.sightings)


def _later(state: State, by_ns: int, now_ns: int) -> State:
    """Returns the state with all times of deadlines later, and `now_ns` at most; a report of quiet begins again."""
    return state._replace(
        moved_ns=min(now_ns, state.moved_ns + by_ns),
        looked_ns=min(now_ns, state.looked_ns + by_ns),
        watched_ns=min(now_ns, state.watched_ns + by_ns),
        sightings={worker: seen.later(by_ns, now_ns)._replace(report=None) for worker, seen in state.sightings.items()},
    )


def last_seen(state: State, worker: int) -> Position | None:
    """Returns the position of a worker's last heartbeat, or None if it was not in the open step."""
    seen = state.sightings.get(worker)
    if seen is None or not seen.at[0] or seen.at[1] <= state.committed:
        return None
    return Position(*seen.at[1:])


def _seconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.1f} s"
