"""Events of made-up runs: a pipeline in 1F1B order whose forwards take 1 ms and backwards 2 ms.

Every phase of a recovery takes a round number of milliseconds, so that the values of the tables are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.codec.records import encoded
from engine.core.checks.proof import Proof
from engine.core.history.evidence import linked_lines
from engine.core.history.process_records import ComparisonRecord
from engine.core.history.step_files import FOLDER, StepFile
from engine.files.run_folder import create_run_folder
from engine.report.load import RunTables
from engine.report.load import load as load_history
from tests.core.made_records import made_history, records_of

Event = dict[str, Any]

MS = 1_000_000
MIB = 1 << 20
END = ("finished", "exit", "training_ended", "not_compared", "ended")  # the kinds of the last events


def load(events: Iterable[Event], name: str = "") -> RunTables:
    """Returns the tables of a run with these events, whose evidence proves the comparison that they tell of."""
    history = made_history(events)
    return load_history(history, name, proof=Proof(comparison=history.first(ComparisonRecord)))


FORWARD_MS, BACKWARD_MS, COMMIT_MS = 1.0, 2.0, 0.5
# Milliseconds, in the order of time; the length of replay follows from the actions of the heir.
PHASES_MS = {"detect": 1, "agree": 2, "fence": 3, "inventory": 1, "regroup": 4, "plan": 2}


def agent(event: str, at_ms: float, **fields: Any) -> Event:
    """Returns an event of the agent."""
    return {"event": event, "worker": -1, "pid": 1, "at_ns": round(at_ms * MS), **fields}


def did(worker: int, step: int, action: str, start_ms: float, end_ms: float) -> Event:
    """Returns the record of an action."""
    times = {"start_ns": round(start_ms * MS), "end_ns": round(end_ms * MS)}
    return {"event": "action", "worker": worker, "pid": 100 + worker, "step": step, "action": action, **times}


class MadeUpRun:
    """Makes the events of a run; `dead` are (step, worker) in the order of steps, no two in one step.

    `frozen` are (step, milliseconds): all workers stand still at the end of the step.
    """

    def __init__(
        self,
        stages: int = 4,
        microbatches: int = 8,
        steps: int = 10,
        dead: tuple[tuple[int, int], ...] = (),
        frozen: tuple[tuple[int, float], ...] = (),
    ):
        self.stages, self.microbatches, self.steps = stages, microbatches, steps
        self.frozen = dict(frozen)
        self.dead = dict(dead)
        self.owners = list(range(stages))
        self.healing: tuple[int, int, int] | None = None  # (owner, new shadow, slot)
        self.epoch = 1
        self.now_ms = 1000.0

    def events(self) -> list[Event]:
        """Returns all events, in the order of the file."""
        return list(self._events())

    def _events(self) -> Iterator[Event]:
        yield agent(
            "job", 0, model="mlp", stages=self.stages, pipelines=1, microbatches=self.microbatches, microbatch_size=4,
            steps=self.steps, redundancy="lazy", seed=7, model_args={"width": 64}, results="results", name="",
        )  # fmt: skip
        yield agent(
            "host", 5, cpu="Made-up CPU", cores=2, python="3.11.7", torch="2.13.0", began="2026-01-01T01:02:03+00:00"
        )
        for worker in range(self.stages):
            yield agent("started", 10, of=worker, child=100 + worker, slots=[[0, worker]])
        yield self._epoch([], "every worker has joined")
        yield agent("go", self.now_ms, epoch=self.epoch)
        for step in range(self.steps):
            if step in self.dead:
                yield from self._broken_step(step, self.dead[step])
            else:
                yield from self._step(step, self.owners)
            self.now_ms += self.frozen.get(step, 0.0)
            told = {"loss": 5.0 / (step + 1), "grad_norm": 1.0, "clip_factor": 1.0, "last": step == self.steps - 1}
            yield agent("commit", self.now_ms, step=step, **told)
        for worker in sorted(set(self.owners)):
            sizes = [[stage, MIB, MIB, MIB, 2 * MIB, 0, 1024] for stage, by in enumerate(self.owners) if by == worker]
            memory = {"peak_memory_kib": 204800, "sizes": sizes}
            yield agent("finished", self.now_ms, of=worker, peak_stash=[[0, worker, 4]], **memory)
            seen = round((self.now_ms + 1) * MS)
            yield agent("exit", self.now_ms + 2, of=worker, code=0, expected=True, seen_ns=seen)
        yield agent("training_ended", self.now_ms + 3, outcome="finished", exit_code=0)
        yield agent("not_compared", self.now_ms + 4, why="no twin was asked for")
        yield agent("ended", self.now_ms + 5, outcome="finished", exit_code=0)

    def _epoch(self, verdict: list[Any], reason: str) -> Event:
        owners = list(self.owners)
        members = sorted(set(owners))
        return agent(
            "epoch",
            self.now_ms,
            epoch=self.epoch,
            members=members,
            owners=owners,
            shadows=[],
            verdict=verdict,
            reason=reason,
        )

    def _step(self, step: int, owners: list[int]) -> Iterator[Event]:
        begin_ms = self.now_ms
        free = dict.fromkeys(owners, begin_ms)
        if self.healing:
            giver, taker, slot = self.healing
            yield did(giver, step, f"{slot}HEAL", begin_ms, begin_ms + 1)
            yield did(taker, step, f"{slot}HEAL", begin_ms, begin_ms + 1.5)
            free[giver], free[taker], self.healing = begin_ms + 1, begin_ms + 1.5, None
        yield from self._compute(step, owners, free)
        last_ms = max(free.values())
        for stage, owner in enumerate(owners):
            yield did(owner, step, f"{stage}COMMIT", last_ms, last_ms + COMMIT_MS / 2)
            yield did(owner, step, f"{stage}STEP", last_ms + COMMIT_MS / 2, last_ms + COMMIT_MS)
        self.now_ms = last_ms + COMMIT_MS

    def _compute(self, step: int, owners: list[int], free: dict[int, float]) -> Iterator[Event]:
        """Yields transfers, forwards and backwards in an order without deadlock."""
        done: dict[tuple[str, int, int], float] = {}
        orders = [_one_f_one_b(stage, self.stages, self.microbatches) for stage in range(self.stages)]
        while any(orders):
            for stage, order in enumerate(orders):
                if not order:
                    continue
                kind, microbatch = order[0]
                source = stage - 1 if kind == "F" else stage + 1
                from_outside = 0 <= source < self.stages
                if from_outside and (kind, source, microbatch) not in done:
                    continue
                order.pop(0)
                owner = owners[stage]
                start_ms = free[owner]
                if from_outside and owners[source] != owner:
                    arrived_ms = max(start_ms, done[kind, source, microbatch] + 0.1) + 0.05
                    yield did(owner, step, f"{stage}RECV_{kind}{microbatch}", start_ms, arrived_ms)
                    start_ms = arrived_ms
                end_ms = start_ms + (FORWARD_MS if kind == "F" else BACKWARD_MS)
                yield did(owner, step, f"{stage}{kind}{microbatch}", start_ms, end_ms)
                target = stage + 1 if kind == "F" else stage - 1
                if 0 <= target < self.stages and owners[target] != owner:
                    yield did(owner, step, f"{stage}SEND_{kind}{microbatch}", end_ms, end_ms + 0.1)
                    end_ms += 0.1
                free[owner] = done[kind, stage, microbatch] = end_ms

    def _broken_step(self, step: int, worker: int) -> Iterator[Event]:
        """Yields the events of a step whose victim dies halfway; the owner of the stage before it redoes its work."""
        begin_ms, slots = self.now_ms, [slot for slot, owner in enumerate(self.owners) if owner == worker]
        whole = list(self._step(step, self.owners))
        death_ms = begin_ms + round((self.now_ms - begin_ms) / 2)
        before = [event for event in whole if event["end_ns"] <= death_ms * MS]
        yield from before
        yield agent("fault", death_ms, fault=f"{step}:{slots[0]}", of=worker)
        self.now_ms = death_ms + PHASES_MS["detect"]
        seen = round(self.now_ms * MS)
        yield agent("exit", self.now_ms + 0.2, of=worker, code=-9, expected=False, seen_ns=seen)
        members = sorted(set(self.owners) - {worker})
        heir = max([each for each in members if each < worker], default=members[-1])
        self.owners = [heir if owner == worker else owner for owner in self.owners]
        self.epoch += 1
        self.now_ms += PHASES_MS["agree"]
        yield self._epoch([[worker, "was killed (SIGKILL)"]], "an exit was seen")
        for phase in ("fence", "inventory", "regroup"):
            self.now_ms += PHASES_MS[phase]
            yield from (
                {**agent("mark", self.now_ms, phase=phase, epoch=self.epoch), "worker": each} for each in members
            )
        yield agent("plan", self.now_ms + 1, epoch=self.epoch)
        self.now_ms += PHASES_MS["plan"]
        yield agent("go", self.now_ms, epoch=self.epoch)
        yield from self._replay(step, heir, slots, before)
        yield from self._rest(step, before)
        self.healing = (heir, members[0] if members[0] != heir else members[-1], slots[0])

    def _replay(self, step: int, heir: int, slots: list[int], before: list[Event]) -> Iterator[Event]:
        texts = {event["action"] for event in before}
        for slot in slots:
            for kind, length in (("F", FORWARD_MS), ("B", BACKWARD_MS)):
                for microbatch in range(self.microbatches):
                    if f"{slot}{kind}{microbatch}" in texts:
                        again = f"{slot}{'f' if kind == 'F' else 'B'}{microbatch}"
                        yield did(heir, step, again, self.now_ms, self.now_ms + length)
                        self.now_ms += length

    def _rest(self, step: int, before: list[Event]) -> Iterator[Event]:
        texts = {event["action"] for event in before}
        begin_ms = self.now_ms
        for event in self._step(step, self.owners):
            if event["action"] not in texts:
                yield event
        assert self.now_ms > begin_ms


def make_run(results: Path, events: list[dict[str, Any]], hour: int = 1) -> Path:
    """Makes and returns a run folder that only holds events."""
    folder = create_run_folder(results, "made-up", datetime(2026, 1, 1, hour), "abcd")
    folder.logs.rmdir()
    write_run(folder.path, events)
    return folder.path


def write_run(folder: Path, events: list[Event]) -> None:
    """Writes a run as its processes do: the actions of each worker in files of steps."""
    (folder / FOLDER).mkdir()
    files = made_history(events).files
    for first in files.ranges():
        for worker, data in files.read(first):
            (folder / FOLDER / str(StepFile(first, worker))).write_bytes(data)
    records = records_of(event for event in events if event["event"] != "action")
    (folder / "events.jsonl").write_text(linked_lines(map(encoded, records)))


def _one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    ahead = min(stages - stage - 1, microbatches)
    order = [("F", microbatch) for microbatch in range(ahead)]
    for microbatch in range(microbatches):
        if ahead + microbatch < microbatches:
            order.append(("F", ahead + microbatch))
        order.append(("B", microbatch))
    return order
