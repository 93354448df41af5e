"""Recoveries, read off the events of a run: who was out, who took over, and where the time went.

Rules: one monotonic clock, in nanoseconds. A recovery begins with the fault, or the first sign of a failure that nobody
injected, and ends with the first commit after it; after the last commit of a job no step is left to recover. A failure
meanwhile belongs to the same recovery, whose phases are then those of its last epoch. Where phases overlap, as
regrouping does with all until replay, the one that is over later is charged with what it takes beyond the earlier, so
that together they are the pause; with *merged* they are all of the time to the first commit. What a recovery cost is
told twice, by measures that have only that commit in common: from the phases, less what was left of a usual step when
they began, and from the commits. Usual are the last few steps under the same ownership.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.core.action import COMPUTE_OPS, Action, Op, parse_action
from engine.core.ownership import Slot
from engine.core.usual_step import Entry, left_ns, usual_ns

Event = Mapping[str, Any]

_HEARD_AT = re.compile(r", (after|inside) action \d+ of step \d+$")

_AT_BOUNDARY = re.compile(r"\b(handed over|has left) after step \d+$")  # nobody has died

PHASES = ("detect", "agree", "fence", "regroup", "inventory", "plan", "replay")
# Made again, a forward leaves no trace; a backward may be made whole, or for the input only.
SAME = {Op.REDO_F: Op.F, Op.I: Op.B}
_USUAL = 10  # steps


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a run.

    `verdict` says who is out and why; of each of them `last_actions` names the action that it finished last, as
    (step, action), or nothing. `heirs` are (slot, owner before, owner now), of which they `adopted` some from another
    pipeline. `points_ns` has the time at which each phase was over, on all workers; what is missing there did not
    happen. Replay is over at the catch-up point: everything that those who are out had finished of the forwards and
    backwards of their slots in the open step, and that is made again before its commit, has been made again. Where
    nothing is, it is over with the other phases.
    """

    epoch: int
    step: int  # the open step, which the survivors finish; the last one, when none is left
    reason: str
    verdict: tuple[tuple[int, str], ...]
    last_actions: Mapping[int, tuple[int, str] | None]
    heirs: tuple[tuple[Slot, int, int], ...]
    faults: tuple[str, ...]
    begin_ns: int  # the fault when it was injected, else the first sign of it
    points_ns: Mapping[str, int]
    resume_ns: int | None = None  # the first commit afterwards
    lost_steps: int = 0  # committed before, and done again
    left_ns: int | None = None  # what usually is left of a step from where this one was when it began
    gap_ns: int | None = None  # what was between the commits before and after it, beyond what usually is
    adopted: frozenset[Slot] = frozenset()
    after_end: bool = False  # no step was left

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

    @property
    def merged_ns(self) -> int | None:
        """From the catch-up point to the first commit; None when there was none."""
        return None if self.resume_ns is None or self.pause_ns is None else self.resume_ns - self.points_ns["replay"]

    @property
    def extra_ns(self) -> int | None:
        """What the open step took beyond a usual one: pause and merged, less what was left of it; None if unknown."""
        if self.pause_ns is None or self.merged_ns is None or self.left_ns is None:
            return None
        return self.pause_ns + self.merged_ns - self.left_ns

    @property
    def rung(self) -> str:
        """How it was survived: where the state came from of the slots that have changed hands."""
        if self.after_end:
            return "nothing was lost"
        if self.resume_ns is None:
            return "none"
        if self.lost_steps:
            return "checkpoint"
        out = {worker for worker, _ in self.verdict}
        found = {
            "hand-over" if old not in out else "other pipeline" if slot in self.adopted else "shadow"
            for slot, old, _ in self.heirs
        }
        return ", ".join(sorted(found)) or "nothing was lost"

    def __str__(self) -> str:
        planned = all(map(has_left, (*self.reason.split("; "), *(why for _, why in self.verdict))))
        parts = [f"worker {worker} {self._how(worker, why)}" for worker, why in self.verdict if not planned]
        takes = "was to take over" if self.pause_ns is None else "took over"
        parts = parts or [self.reason]
        if self.after_end:
            return "; ".join([*parts, "that was after the last commit, no step was left to recover"])
        parts += [
            f"worker {heir} {takes} {_stages(self.heirs, heir)}" for heir in sorted({new for *_, new in self.heirs})
        ]
        if self.pause_ns is None:
            return "; ".join([*parts, "not recovered"])
        if planned:
            return "; ".join([*parts, f"a pause of {self.pause_ns / 1e9:.2f} s"])
        steps = "1 step" if self.lost_steps == 1 else f"{self.lost_steps} steps"
        return "; ".join([*parts, f"recovered in {self.pause_ns / 1e9:.2f} s, {steps} lost"])

    def _how(self, worker: int, why: str) -> str:
        """Returns why a worker is out and where it was: the verdict knows that from heartbeats, which lag behind."""
        at, how = self.last_actions[worker], _HEARD_AT.sub("", why)
        return why if at is None else f"{how}{',' if ',' in how else ''} after {at[1]} of step {at[0]}"

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
            "merged_ms": _ms(self.merged_ns),
            "extra_ms": _ms(self.extra_ns),
            "gap_ms": _ms(self.gap_ns),
            "rung": self.rung,
            "lost_steps": self.lost_steps,
        }


def has_left(why: str) -> bool:
    """Says whether a verdict is about somebody whom nobody needs any more, and not about a failure."""
    return bool(_AT_BOUNDARY.search(why))


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
    commits: list[tuple[int, int]] = field(default_factory=list)  # (step, time), the last few since a recovery
    actions: dict[int, list[tuple[int, Action, int]]] = field(default_factory=dict)  # step -> worker, action, end
    epochs: list[Event] = field(default_factory=list)  # since the last commit
    signs: list[Event] = field(default_factory=list)  # faults, exits, suspicions since the last commit
    marks: list[tuple[int, str, int]] = field(default_factory=list)  # (epoch, phase, time)
    adopted: set[Slot] = field(default_factory=set)
    out_since: dict[int, int] = field(default_factory=dict)  # worker -> its verdict; what it does later is not read
    is_over: bool = False  # with the last commit, no step is left

    def read(self, event: Event) -> Iterator[Recovery]:
        """Takes in one event; yields the recovery that it ends."""
        match event["event"]:
            case "job":
                self.stages = event["stages"]
            case "started":
                for pipeline, stage in event["slots"]:
                    self.owners[pipeline, stage] = event["of"]
            case "action" if event["end_ns"] <= self.out_since.get(event["worker"], event["end_ns"]):
                entry = (event["worker"], parse_action(event["action"]), event["end_ns"])
                self.actions.setdefault(event["step"], []).append(entry)
            case "fault" | "suspicion":
                self.signs.append(event)
            case "exit" if not event["expected"]:
                self.signs.append(event)
            case "epoch" if self.training:
                self.epochs.append(event)
                for worker, _ in event["verdict"]:
                    self.out_since.setdefault(worker, event["at_ns"])
            case "mark":
                self.marks.append((event["epoch"], event["phase"], event["at_ns"]))
                self.adopted |= {(pipeline, stage) for pipeline, stage in event.get("adopted", ())}
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
            self.commits = []
        self.commits = [*self.commits[-_USUAL:], (commit["step"], commit["at_ns"])]
        self.is_over = commit.get("last", False)
        self.epochs, self.signs, self.marks, self.adopted = [], [], [], set()
        # A fast worker may have begun the next step before this record was written.
        since = self.commits[0][0]
        self.actions = {step: entries for step, entries in self.actions.items() if step >= since}

    def _owners_now(self) -> dict[Slot, int]:
        return {divmod(place, self.stages): owner for place, owner in enumerate(self.epochs[-1]["owners"])}

    def recovery(self, commit: Event | None) -> Recovery:
        """Returns the recovery that is going on, which `commit` ends."""
        last = self.epochs[-1]
        before = self.commits[-1][0] if self.commits else -1
        after_end = commit is None and self.is_over
        step = before + (not after_end) if commit is None else commit["step"]
        verdict = tuple((worker, why) for epoch in self.epochs for worker, why in epoch["verdict"])
        out = {worker for worker, _ in verdict}
        now = self._owners_now()
        moved = [] if after_end else [(slot, old) for slot, old in sorted(self.owners.items()) if now[slot] != old]
        faults = [each for each in self.signs if each["event"] == "fault"]
        usual = usual_ns(self.commits)
        seen_ns = [each.get("seen_ns", each["at_ns"]) for each in self.signs if each["event"] != "fault"]
        detect_ns = min([*seen_ns, self.epochs[0]["at_ns"]])
        begin_ns = min([detect_ns, *(each["at_ns"] for each in faults)])
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
            tuple((slot, old, now[slot]) for slot, old in moved),
            tuple(each["fault"] for each in faults),
            begin_ns,
            points,
            None if commit is None else commit["at_ns"],
            max(0, before + 1 - step),
            left_ns(self.commits, self._entries(), begin_ns),
            None if commit is None or usual is None else commit["at_ns"] - self.commits[-1][1] - usual,
            frozenset(self.adopted),
            after_end,
        )

    def _entries(self) -> list[Entry]:
        """Returns all actions that are known."""
        return [(step, *entry) for step, entries in self.actions.items() for entry in entries]

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
        mine = [(end_ns, step, str(action)) for step, who, action, end_ns in self._entries() if who == worker]
        return max(mine)[1:] if mine else None


def _what(action: Action) -> tuple[Op, int, int, int]:
    """Returns what an action makes, which others may make again."""
    return (SAME.get(action.op, action.op), action.pipeline, action.stage, action.microbatch)
