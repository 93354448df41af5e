"""Recoveries, read off the events of a run: who was out, who took over, and where the time went.

Rules: one monotonic clock, in nanoseconds. A recovery begins with the fault, or the first sign of a failure that nobody
injected, and ends with the first commit after it. A failure meanwhile belongs to the same recovery, whose phases are
then those of its last epoch. Where phases overlap, as regrouping does with all until replay, the one that is over later
is charged with what it takes beyond the earlier, so that together they are the pause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, Action, parse_action
from engine.core.ownership import Slot

Event = Mapping[str, Any]

_HEARD_AT = re.compile(r", (after|inside) action \d+ of step \d+$")

PHASES = ("detect", "agree", "fence", "regroup", "inventory", "plan", "replay")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a run.

    `verdict` says who is out and why; of each of them `last_actions` names the action that it finished last, as
    (step, action), or nothing. `heirs` are (slot, owner before, owner now). `points_ns` has the time at which each
    phase was over, on all workers; what is missing there did not happen. Replay is over at the catch-up point:
    everything that those who are out had finished of the forwards and backwards of their slots in the open step, and
    that is made again before its commit, has been made again. Where nothing is, it is over with the other phases.
    """

    epoch: int
    step: int  # the open step, which the survivors finish
    reason: str
    verdict: tuple[tuple[int, str], ...]
    last_actions: Mapping[int, tuple[int, str] | None]
    heirs: tuple[tuple[Slot, int, int], ...]
    faults: tuple[str, ...]
    begin_ns: int  # the fault when it was injected, else the first sign of it
    points_ns: Mapping[str, int]
    resume_ns: int | None = None  # the first commit afterwards
    lost_steps: int = 0  # committed before, and done again
    extra_ns: int | None = None  # what the open step took beyond a usual one: the median between commits before

    @property
    def phases_ns(self) -> dict[str, int]:
        """What each phase took; one that did not happen is left out."""
        taken, reached_ns = {}, self.begin_ns
        for phase in sorted(self.points_ns, key=lambda phase: (self.points_ns[phase], PHASES.index(phase))):
            taken[phase] = max(0, self.points_ns[phase] - reached_ns)
            reached_ns = max(reached_ns, self.points_ns[phase])
        return {phase: taken[phase] for phase in PHASES if phase in taken}

    @property
    def pause_ns(self) -> int | None:
        """From the beginning to the catch-up point; None when that was never reached."""
        return sum(self.phases_ns.values()) if "replay" in self.points_ns else None

    def __str__(self) -> str:
        parts = [f"worker {worker} {self._how(worker, why)}" for worker, why in self.verdict] or [self.reason]
        parts += [
            f"worker {heir} took over {_stages(self.heirs, heir)}" for heir in sorted({new for *_, new in self.heirs})
        ]
        if self.pause_ns is None:
            return "; ".join([*parts, "not recovered"])
        steps = "1 step" if self.lost_steps == 1 else f"{self.lost_steps} steps"
        return "; ".join([*parts, f"recovered in {self.pause_ns / 1e9:.2f} s, {steps} lost"])

    def _how(self, worker: int, why: str) -> str:
        """Returns why a worker is out and where it was: the verdict knows that from heartbeats, which lag behind."""
        at = self.last_actions[worker]
        return why if at is None else f"{_HEARD_AT.sub('', why)} after {at[1]} of step {at[0]}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the recovery as plain values, times in milliseconds."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "culprits": [worker for worker, _ in self.verdict],
            "verdict": [f"worker {worker} {why}" for worker, why in self.verdict],
            "reason": self.reason,
            "last_actions": {worker: at and f"{at[1]} of step {at[0]}" for worker, at in self.last_actions.items()},
            "heirs": [{"slot": list(slot), "from": old, "heir": new} for slot, old, new in self.heirs],
            "faults": list(self.faults),
            "phases_ms": {phase: _ms(taken) for phase, taken in self.phases_ns.items()},
            "pause_ms": _ms(self.pause_ns),
            "extra_ms": _ms(self.extra_ns),
            "lost_steps": self.lost_steps,
        }


def _stages(heirs: Iterable[tuple[Slot, int, int]], heir: int) -> str:
    slots = [slot for slot, _, new in heirs if new == heir]
    return ", ".join(
        f"stage {stage} of pipeline {pipeline}" if pipeline else f"stage {stage}" for pipeline, stage in slots
    )


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else round(time_ns / 1e6, 3)


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    """Returns the recoveries of a run, from its events in the order of the file; of an open one what is known of it."""
    log = RecoveryLog()
    found = [recovery for event in events for recovery in log.read(event)]
    return found + ([log.recovery(None)] if log.epochs else [])


@dataclass(slots=True)
class RecoveryLog:
    """What has been read so far, as far as it matters to a recovery that may come, or is going on.

    Who reads the events from the middle of a run, says how many stages it has, that it is training, and who owns what.
    """

    stages: int = 1
    training: bool = False
    owners: dict[Slot, int] = field(default_factory=dict)  # before the recovery
    commits: list[tuple[int, int]] = field(default_factory=list)  # (step, time)
    actions: dict[int, list[tuple[int, Action, int]]] = field(default_factory=dict)  # step -> worker, action, end
    epochs: list[Event] = field(default_factory=list)  # since the last commit
    signs: list[Event] = field(default_factory=list)  # faults, exits, suspicions since the last commit
    marks: list[tuple[int, str, int]] = field(default_factory=list)  # (epoch, phase, time)

    def read(self, event: Event) -> Iterator[Recovery]:
        """Takes in one event; yields the recovery that it ends."""
        match event["event"]:
            case "job":
                self.stages = event["stages"]
            case "started":
                for pipeline, stage in event["slots"]:
                    self.owners[pipeline, stage] = event["of"]
            case "action":
                entry = (event["worker"], parse_action(event["action"]), event["end_ns"])
                self.actions.setdefault(event["step"], []).append(entry)
            case "fault" | "suspicion":
                self.signs.append(event)
            case "exit" if not event["expected"]:
                self.signs.append(event)
            case "epoch" if self.training:
                self.epochs.append(event)
            case "mark":
                self.marks.append((event["epoch"], event["phase"], event["at_ns"]))
            case "go":
                self.training = True
                self.marks.append((event["epoch"], "plan", event["at_ns"]))
            case "commit":
                if self.epochs:
                    yield self.recovery(event)
                self._close(event)

    def _close(self, commit: Event) -> None:
        if self.epochs:
            self.owners = self._owners_now()
        self.commits.append((commit["step"], commit["at_ns"]))
        self.epochs, self.signs, self.marks = [], [], []
        # A fast worker may have begun the next step before this record was written.
        self.actions = {step: entries for step, entries in self.actions.items() if step >= commit["step"]}

    def _owners_now(self) -> dict[Slot, int]:
        return {divmod(place, self.stages): owner for place, owner in enumerate(self.epochs[-1]["owners"])}

    def recovery(self, commit: Event | None) -> Recovery:
        """Returns the recovery that is going on, which `commit` ends."""
        last = self.epochs[-1]
        before = self.commits[-1][0] if self.commits else -1
        step = before + 1 if commit is None else commit["step"]
        verdict = tuple((worker, why) for epoch in self.epochs for worker, why in epoch["verdict"])
        out = {worker for worker, _ in verdict}
        now = self._owners_now()
        faults = [each for each in self.signs if each["event"] == "fault"]
        seen_ns = [each.get("seen_ns", each["at_ns"]) for each in self.signs if each["event"] != "fault"]
        detect_ns = min([*seen_ns, self.epochs[0]["at_ns"]])
        points = {"detect": detect_ns, "agree": last["at_ns"]}
        for phase in ("fence", "regroup", "inventory", "plan"):
            # A worker's mark may stand before the agent's record of the same epoch.
            at_ns = [at for epoch, name, at in self.marks if (epoch, name) == (last["epoch"], phase)]
            if at_ns:
                points[phase] = max(at_ns)
        if commit is not None and "plan" in points:
            points["replay"] = max([*points.values(), *self._redone(step, out, last["at_ns"])])
        return Recovery(
            last["epoch"],
            step,
            last["reason"],
            verdict,
            {worker: self.last_action(worker) for worker in sorted(out)},
            tuple((slot, old, now[slot]) for slot, old in sorted(self.owners.items()) if now[slot] != old),
            tuple(each["fault"] for each in faults),
            min([detect_ns, *(each["at_ns"] for each in faults)]),
            points,
            None if commit is None else commit["at_ns"],
            max(0, before + 1 - step),
            self._extra_ns(commit),
        )

    def _extra_ns(self, commit: Event | None) -> int | None:
        times_ns = [at_ns for _, at_ns in self.commits]
        if commit is None or len(times_ns) < 2:
            return None
        usual_ns = median(later - at_ns for at_ns, later in pairwise(times_ns))
        return int(commit["at_ns"] - times_ns[-1] - usual_ns)

    def _redone(self, step: int, out: set[int], since_ns: int) -> list[int]:
        """Returns when the survivors had made again what those who are out had finished of their slots."""
        entries = [entry for entry in self.actions.get(step, []) if entry[1].op in COMPUTE_OPS]
        done = {_what(action) for worker, action, _ in entries if worker in out and self._owned(worker, action)}
        return [
            end_ns
            for worker, action, end_ns in entries
            if worker not in out and end_ns > since_ns and _what(action) in done
        ]

    def _owned(self, worker: int, action: Action) -> bool:
        return self.owners.get((action.pipeline, action.stage)) == worker

    def last_action(self, worker: int) -> tuple[int, str] | None:
        """Returns (step, action) of what a worker has finished last, or None when that is long ago."""
        mine = [
            (end_ns, step, str(action))
            for step, entries in self.actions.items()
            for who, action, end_ns in entries
            if who == worker
        ]
        return max(mine)[1:] if mine else None


def _what(action: Action) -> tuple[bool, int, int, int]:
    """Returns what an action makes: a forward and one that is redone make the same, and so do backwards."""
    return (action.op in FORWARD_OPS, action.pipeline, action.stage, action.microbatch)
