"""One recovery of a run: the excluded workers, their heirs, and the time of each phase.

Rules:
- All times are nanoseconds on the host's monotonic clock.
- A recovery begins with the injected fault, else with the last sign of life of a worker that went silent or hangs, else
  with the first sign of the failure. It ends with the next commit. After the last commit of a job no step is left to
  recover.
- A further failure before that commit belongs to the same recovery. The phases are then those of its last epoch.
- Phases overlap: regrouping, for instance, overlaps all phases until replay. Each phase counts only its time after the
  end of the phase before, so the phases add up to the pause. Pause plus *merged* is the time to the first commit.
- Of several hosts the clocks are known within bounds. No phase is told that is shorter than its uncertainty
  (`phase_bounds`).
- The cost of a recovery is its stall, which comes from the commits alone: `stall` has the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.core.checks.stall import Stall
from engine.core.exclusion import Cause, Exclusion, Verdict
from engine.core.ownership import Slot
from engine.core.texts import counted, spans

PHASES = ("detect", "agree", "fence", "regroup", "inventory", "plan", "replay")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a run.

    `verdict` names the excluded workers with the reasons; `last_actions` has the last finished (step, action) of each,
    or None. `heirs` are (slot, owner before, owner now); the `adopted` slots came from another pipeline. `points_ns`
    has the end of each phase, on all workers; a missing phase did not happen. Replay ends at the catch-up point: the
    survivors have redone each forward and backward that the excluded workers had finished for their slots in the open
    step. If there is none to redo, replay ends with the other phases.
    """

    epoch: int
    step: int  # the open step, which the survivors finish; the last step, when none is left
    reason: str
    verdict: Verdict
    last_actions: Mapping[int, tuple[int, str] | None]
    heirs: tuple[tuple[Slot, int, int], ...]
    faults: tuple[str, ...]
    begin_ns: int
    points_ns: Mapping[str, int]
    resume_ns: int | None = None  # the first commit afterwards
    lost_steps: int = 0  # committed before, and redone
    stall: Stall | None = None  # None if no step was left
    adopted: frozenset[Slot] = frozenset()
    after_end: bool = False  # no step was left
    planned: bool = False  # the last epoch was made at a step boundary, without a failure
    is_from_checkpoint: bool = False  # no worker held the state of a stage
    noun: str = "stage"  # for a slot of a pipeline
    uncertain_ns: Mapping[str, int] = field(default_factory=dict)  # phase -> how wrong its time can be

    @property
    def phases_ns(self) -> dict[str, int]:
        """The time that each phase took; a phase that did not happen is left out."""
        taken, reached_ns = {}, self.begin_ns
        for phase in sorted(self.points_ns, key=lambda phase: (self.points_ns[phase], PHASES.index(phase))):
            taken[phase] = max(0, self.points_ns[phase] - reached_ns)
            reached_ns = max(reached_ns, self.points_ns[phase])
        return {phase: taken[phase] for phase in PHASES if phase in taken}

    @property
    def told_ns(self) -> dict[str, int]:
        """The phases that are told: those, and *merged*, that are not shorter than their uncertainty."""
        taken = self.phases_ns | ({} if self.merged_ns is None else {"merged": self.merged_ns})
        return {phase: time_ns for phase, time_ns in taken.items() if time_ns >= self.uncertain_ns.get(phase, 0)}

    @property
    def noticed_ns(self) -> int:
        """The injected fault, else the first sign of the failure, which silence gives only with the verdict."""
        return self.begin_ns if self.faults else self.points_ns.get("detect", self.begin_ns)

    @property
    def pause_ns(self) -> int | None:
        """The time from the beginning to the catch-up point; None if it was not reached."""
        return sum(self.phases_ns.values()) if "replay" in self.points_ns else None

    @property
    def merged_ns(self) -> int | None:
        """The time from the catch-up point to the first commit; None without a commit."""
        return None if self.resume_ns is None or self.pause_ns is None else self.resume_ns - self.points_ns["replay"]

    @property
    def rung(self) -> str:
        """The source of the state of the slots that changed owners, such as ``shadow``."""
        if self.after_end:
            return "nothing was lost"
        if self.resume_ns is None:
            return "none"
        if self.is_from_checkpoint:
            return "checkpoint"
        out = {each.worker for each in self.verdict}
        found = {
            "hand-over" if old not in out else "other pipeline" if slot in self.adopted else "shadow"
            for slot, old, _ in self.heirs
        }
        return ", ".join(sorted(found)) or "nothing was lost"

    @property
    def told(self) -> list[str]:
        """A sentence about each worker that is out, beside its last action; its last heartbeat only without one."""
        known = self.last_actions
        return [f"worker {each.worker} {each.why if known[each.worker] is None else each.how}" for each in self.verdict]

    def __str__(self) -> str:
        planned = self.planned and all(each.cause is Cause.LEFT for each in self.verdict)
        parts = [f"worker {each.worker} {self._how(each)}" for each in self.verdict if not planned]
        takes = "was to take over" if self.resume_ns is None else "took over"
        parts = parts or [self.reason]
        if self.after_end:
            return "; ".join([*parts, "that was after the last commit, no step was left to recover"])
        parts += [f"worker {heir} {takes} {self._taken_by(heir)}" for heir in sorted({new for *_, new in self.heirs})]
        if self.resume_ns is None:
            return "; ".join([*parts, "not recovered"])
        parts += ["went on from a checkpoint"] * self.is_from_checkpoint
        lost = f", {counted(self.lost_steps, 'step')} lost" if not planned else ""
        return "; ".join([*parts, f"training stalled for {self.stall}{lost}"])

    def _taken_by(self, heir: int) -> str:
        """Returns the slots that a worker took over, three or more consecutive ones as ``stages 4-7``."""
        by_pipeline: dict[int, list[int]] = {}
        for (pipeline, stage), _, new in self.heirs:
            by_pipeline.setdefault(pipeline, []).extend([stage] * (new == heir))
        return ", ".join(
            f"{self.noun}{'s' if '-' in span else ''} {span}" + (f" of pipeline {pipeline}" if pipeline else "")
            for pipeline, stages in by_pipeline.items()
            for span in spans(stages)
        )

    def _how(self, out: Exclusion) -> str:
        """Returns why a worker is out, after its last action; the last heartbeat, which lags, only without one."""
        at = self.last_actions[out.worker]
        return out.why if at is None else f"{out.how}{',' if ',' in out.how else ''} after {at[1]} of step {at[0]}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the recovery as plain values, times in milliseconds."""
        uncertain = self.uncertain_ns
        return {
            "epoch": self.epoch,
            "step": self.step,
            "culprits": [each.worker for each in self.verdict],
            "verdict": self.told,
            "reason": self.reason,
            "last_actions": {worker: at and f"{at[1]} of step {at[0]}" for worker, at in self.last_actions.items()},
            "heirs": [{"slot": list(slot), "from": old, "heir": new} for slot, old, new in self.heirs],
            "faults": list(self.faults),
            "phases_ms": {phase: _ms(taken) for phase, taken in self.told_ns.items() if phase != "merged"},
            "pause_ms": _ms(self.pause_ns),
            "merged_ms": _ms(self.told_ns.get("merged")),
            **({"uncertain_ms": {phase: _ms(each) for phase, each in uncertain.items()}} if uncertain else {}),
            "stall_ms": _ms(self.stall.least_ns if self.stall else None),
            "stall_bound": self.stall.bound if self.stall else "",
            "stall_most_ms": _ms(self.stall.most_ns if self.stall else None),
            "rung": self.rung,
            "lost_steps": self.lost_steps,
        }


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else round(time_ns / 1e6, 3)
