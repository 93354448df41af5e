"""The status of a run: who owns what, how far it is, what was decided; read off the store's keys, or off the events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.core.errors import InvariantError
from engine.core.membership.state import resume
from engine.core.membership.verdicts import held_back

HELD_BACK = "cannot leave"  # a worker that has given notice, and whose stages nobody can take over
STARTING = "starting"  # the phase before the first epoch, as events show it


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker: its slots now and before as (pipeline, stage), and the seconds since it was last heard of."""

    worker: int
    pid: int
    node: str
    now: tuple[tuple[int, int], ...]
    before: tuple[tuple[int, int], ...] = ()
    state: str = "in"
    heard_s_ago: float | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run; `phase` is the protocol's, or the outcome of one that has ended; `verdicts` are (epoch, why it came)."""

    run_id: str
    phase: str
    epoch: int = 0
    committed: int = -1
    num_steps: int = 0
    workers: tuple[WorkerStatus, ...] = ()
    verdicts: tuple[tuple[int, str], ...] = field(default=())


def status_of_keys(run_id: str, keys: Mapping[str, bytes]) -> RunStatus:
    """Returns the status that the keys of a live run show; raises InvariantError when they are no such keys."""
    try:
        state = resume(keys["state"].decode(), 0)
        verdicts = tuple((int(epoch), str(why)) for epoch, why in json.loads(keys.get("verdicts", b"[]")))
        heard = json.loads(keys.get("heartbeats", b"{}"))
        found = {
            int(key.removeprefix("members/")): json.loads(value)
            for key, value in keys.items()
            if key.startswith("members/")
        }
        held = held_back(state)
        workers = [
            WorkerStatus(
                worker,
                member["pid"],
                member["node"],
                _slots(member["now"]),
                _slots(member["before"]),
                "out" if worker in state.out else HELD_BACK if worker in held else "in",
                heard.get(str(worker)),
            )
            for worker, member in sorted(found.items())
        ]
    except (KeyError, TypeError, ValueError, AttributeError, InvariantError) as error:
        raise InvariantError(f"the keys of run {run_id} hold something else: {error!r}") from error
    return RunStatus(
        run_id, str(state.phase), state.epoch, state.committed, state.last_step + 1, tuple(workers), verdicts
    )


def status_of_events(run_id: str, events: Iterable[Mapping[str, Any]]) -> RunStatus:
    """Returns the status that the events of a run show, the last of them deciding."""
    status = RunStatus(run_id, STARTING)
    workers: dict[int, WorkerStatus] = {}
    stages = 1
    for event in events:
        if "owners" in event:  # of an epoch, or of heirs that were known only later
            workers = {each.worker: _moved(each, event["owners"], stages) for each in workers.values()}
        match event["event"]:
            case "job":
                status, stages = replace(status, num_steps=event["steps"]), event["stages"]
            case "started":
                workers[event["of"]] = WorkerStatus(event["of"], event["child"], "", _slots(event["slots"]))
            case "epoch":
                entry = (event["epoch"], event["reason"])
                status = replace(status, phase="running", epoch=event["epoch"], verdicts=(*status.verdicts, entry))
            case "commit":
                status = replace(status, committed=event["step"])
            case "exit":
                state = "left" if event["expected"] else "dead"
                workers[event["of"]] = replace(workers[event["of"]], state=state)
            case "stays":
                workers[event["of"]] = replace(workers[event["of"]], state=HELD_BACK)
                entry = (status.epoch, f"worker {event['of']} {event['text']}")
                status = replace(status, verdicts=(*status.verdicts, entry))
            case "failed":
                status = replace(status, verdicts=(*status.verdicts, (status.epoch, event["error"])))
            case "ended":
                status = replace(status, phase=event["outcome"])
    return replace(status, workers=tuple(workers[worker] for worker in sorted(workers)))


def without_word(status: RunStatus) -> RunStatus:
    """Returns the status, as its events show it, of a run whose launcher is gone, and its workers with it."""
    workers = tuple(replace(each, state="gone") if each.state in ("in", HELD_BACK) else each for each in status.workers)
    return replace(status, phase="launcher gone", workers=workers)


def _moved(worker: WorkerStatus, owners: Sequence[int], stages: int) -> WorkerStatus:
    """Returns a worker with the slots that it has by the owners of a new epoch."""
    now = tuple(divmod(place, stages) for place, owner in enumerate(owners) if owner == worker.worker)
    return worker if now == worker.now else replace(worker, now=now, before=worker.now)


def _slots(value: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((pipeline, stage) for pipeline, stage in value)
