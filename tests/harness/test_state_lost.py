"""The message about a lost state is true for every job, and its advice would have kept the state."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.checkpoint_rules import Ladder, Resumption
from engine.core.errors import ExitCode, WorkerFailedError
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership
from engine.core.monitors import Monitors
from engine.files.checkpoint_folder import NewestGood, checkpoints_at
from engine.harness import state_lost
from engine.harness.state_lost import LostState, Restarts, fewest_holders, state_lost_lines
from engine.runtime.agent.checkpoints import Checkpoints
from engine.runtime.agent.keeper import Keeper, start_thread
from tests.core.made_records import records_of
from tests.files.made_checkpoints import save

LAZY = Job(stages=3, steps=9)
SHARDED = replace(LAZY, redundancy="none", pipelines=2, fsdp=1)


def loss(job: Job, workers: int, gone: int) -> LostState:
    return LostState(job, workers, dict.fromkeys(range(gone), "somehow"))


@pytest.mark.parametrize(
    ("job", "workers", "gone", "why", "advice"),
    [
        (
            LAZY,
            *(3, 2),
            "lazy redundancy of level 1 keeps each stage on at least 2 of 3 workers; 2 were gone before others held it",
            ["--redundancy-level 2", "--pipelines 2"],
        ),
        (LAZY, 3, 3, "", ["--pipelines 2"]),
        (LAZY, 1, 1, "there was one worker, and no other to hold a stage", ["--pipelines 2"]),
        (Job(stages=1), 1, 1, "there was one worker, and no other to hold a stage", ["--pipelines 2"]),
        (
            Job(stages=2, redundancy="eager", redundancy_level=3),
            *(2, 2),
            "eager redundancy of level 3 keeps each stage on at least 2 of 2 workers; "
            "2 were gone before others held it",
            ["--pipelines 2"],
        ),
        (
            replace(LAZY, redundancy="none"),
            *(3, 1),
            "no redundancy: each stage is held by its owners only",
            ["--redundancy lazy", "--pipelines 2"],
        ),
        (
            replace(LAZY, redundancy="none", pipelines=2),
            *(6, 2),
            "no redundancy: each stage is held by its owners only",
            ["--redundancy lazy --redundancy-level 2", "--pipelines 3"],
        ),
        (
            replace(LAZY, redundancy="reroute", pipelines=2),
            *(6, 2),
            "reroute keeps each stage on at least 2 of 6 workers; 2 were gone before others held it",
            ["--redundancy lazy --redundancy-level 2", "--pipelines 3"],
        ),
        (
            SHARDED,
            *(6, 1),
            "no redundancy: each shard is held by its owner only",
            ["--redundancy lazy"],
        ),
        (SHARDED, 6, 2, "", ["--redundancy lazy --redundancy-level 2"]),
        (SHARDED, 6, 6, "", ["--fsdp 0 --pipelines 7"]),
        (
            replace(SHARDED, redundancy="lazy"),
            *(6, 2),
            "lazy redundancy of level 1 keeps each shard on at least 2 of 6 workers; 2 were gone before others held it",
            ["--redundancy-level 2"],
        ),
    ],
)
def test_why_and_what_to_do(job: Job, workers: int, gone: int, why: str, advice: list[str]) -> None:
    found = loss(job, workers, gone)
    assert found.advice() == advice
    assert not why or found.why() == why


def with_options(job: Job, text: str) -> Job:
    words = text.split()
    given: dict[str, Any] = {}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        given[flag.removeprefix("--").replace("-", "_")] = int(value) if value.isdigit() else value
    return replace(job, **given)


def survives(job: Job, gone: int) -> bool:
    """Says whether some worker holds each stage for every choice of workers that are gone."""
    ownership = fresh_ownership(job)
    holders = [
        {worker for pipeline in range(job.pipelines) for worker in ownership.replicas(pipeline, stage)}
        for stage in range(job.stages)
    ]
    return all(each - {*victims} for victims in combinations(ownership.workers(), gone) for each in holders)


@pytest.mark.parametrize("redundancy", ["none", "lazy", "eager", "reroute"])
def test_all_that_is_advised_survives_as_many(redundancy: Any) -> None:
    for stages, pipelines, level in product((1, 2, 3), (1, 2), (1, 2)):
        if redundancy == "reroute" and pipelines == 1:
            continue
        job = Job(stages=stages, pipelines=pipelines, redundancy=redundancy, redundancy_level=level)
        workers = stages * pipelines
        for gone in range(fewest_holders(job), min(workers, 3) + 1):
            assert not survives(job, gone)
            found = loss(job, workers, gone).advice()
            assert all(survives(with_options(job, each), gone) for each in found), (job, gone, found)


def loss_of(job: Job, events: list[dict[str, Any]]) -> LostState:
    return state_lost.lost_state_of(job, records_of(events))


def exit_of(worker: int) -> dict[str, Any]:
    return {"event": "exit", "of": worker, "code": -9, "expected": False, "seen_ns": 4, "at_ns": 5}


def epoch(number: int, owners: list[int], verdict: list[Any]) -> dict[str, Any]:
    members = sorted({*owners})
    reason = "; ".join(f"worker {worker} {why}" for worker, why, *_ in verdict)
    told = {"epoch": number, "members": members, "owners": owners, "verdict": verdict, "reason": reason}
    return {"event": "epoch", "at_ns": 6, **told}


def commit(step: int) -> dict[str, Any]:
    return {"event": "commit", "step": step, "at_ns": 10 * step}


BEGIN: list[dict[str, Any]] = [
    {"event": "job", "stages": 3},
    *({"event": "started", "of": worker, "slots": [[0, worker]]} for worker in range(3)),
    {"event": "go", "epoch": 0, "at_ns": 0},
    commit(0),
]
FIRST = [exit_of(1), epoch(1, [0, 0, 2], [[1, "was killed (SIGKILL)"]]), commit(1)]


def test_who_died_is_told_with_what_was_theirs() -> None:
    done = {"event": "action", "worker": 2, "step": 1, "action": "2B0", "start_ns": 2, "end_ns": 3}
    lines = state_lost_lines(LAZY, records_of([*BEGIN, done, exit_of(1), exit_of(2)]), 1)
    assert lines.pop(3).startswith(
        "why    lazy redundancy of level 1 keeps each stage on at least 2 of 3 workers; 2 were "
    )
    assert lines == [
        "died   worker 1 (stage 1): it had done nothing since the last commit",
        "died   worker 2 (stage 2): its last action was 2B0 of step 1",
        "done   steps 0 to 0 were committed, but no checkpoint was written",
        "next   there is no checkpoint to resume from: start the run again, with",
        "       --redundancy-level 2 or --pipelines 2 to survive this",
    ]


def test_a_job_with_blocks_is_told_in_blocks() -> None:
    job = replace(LAZY, stages=2, blocks=4)
    begun: list[dict[str, Any]] = [
        {"event": "job", "stages": 2, "blocks": 4},
        *(
            {"event": "started", "of": worker, "slots": [[0, 4 * worker + each] for each in range(4)]}
            for worker in (0, 1)
        ),
        *BEGIN[-2:],
    ]
    lines = state_lost_lines(job, records_of([*begun, exit_of(0), exit_of(1)]), 1)
    assert lines[0] == "died   worker 0 (blocks 0-3): it had done nothing since the last commit"
    assert "keeps each block on at least 2 of 2 workers" in " ".join(lines)
    assert "each block is held" in loss(replace(job, redundancy="none"), 2, 1).why()


def test_those_who_are_gone_count_until_their_shadows_are_whole() -> None:
    found = loss_of(LAZY, [*BEGIN, *FIRST, exit_of(0)])
    assert (found.workers, [*found.gone]) == (3, [1, 0])
    assert found.gone[0].startswith("worker 0 (stages 0 and 1)")
    found = loss_of(LAZY, [*BEGIN, *FIRST, commit(2), exit_of(0)])
    assert (found.workers, [*found.gone]) == (2, [0])
    none = replace(LAZY, redundancy="none")
    assert [*loss_of(none, [*BEGIN, *FIRST, commit(2), exit_of(0)]).gone] == [1, 0]


def test_the_last_worker_stood_alone() -> None:
    second = [exit_of(0), epoch(2, [2, 2, 2], [[0, "hangs for 9 s"]]), commit(3), commit(4)]
    found = loss_of(LAZY, [*BEGIN, *FIRST, commit(2), *second, exit_of(2)])
    assert (found.workers, [*found.gone]) == (1, [2])
    assert found.gone[2].startswith("worker 2 (stages 0-2)")


def test_whoever_is_given_up_is_gone_and_whoever_leaves_is_not() -> None:
    hang = epoch(1, [0, 0, 2], [[1, "has been silent for 5.0 s"]])
    assert [*loss_of(LAZY, [*BEGIN, hang, exit_of(2)]).gone] == [1, 2]
    leaves = epoch(1, [0, 0, 2], [[1, "has left after step 0", "left", None]])
    assert [*loss_of(LAZY, [*BEGIN, leaves, exit_of(2)]).gone] == [2]
    found = loss_of(LAZY, [*BEGIN, leaves, commit(1), commit(2), exit_of(2)])
    assert (found.workers, [*found.gone]) == (2, [2])


def test_one_worker_that_hangs_is_no_sign_of_an_endless_model() -> None:
    hangs = epoch(1, [0, 0, 2], [[1, "hangs for 30.0 s (limit 30.0 s)", "hang", None]])
    found = loss_of(LAZY, [*BEGIN, hangs])
    assert (found.hung, found.hangs_everywhere) == ({1}, False)
    assert not loss_of(LAZY, BEGIN).hangs_everywhere


def test_no_redundancy_is_advised_for_a_model_that_hangs_everywhere() -> None:
    """The advice was --pipelines 2, with which more workers hang."""
    hangs = [
        epoch(1, [0, 0, 2], [[1, "hangs for 30.0 s (limit 30.0 s)", "hang", None]]),
        epoch(2, [2, 2, 2], [[0, "hangs for 30.1 s (limit 30.0 s)", "hang", None]]),
    ]
    *_, last = state_lost_lines(LAZY, records_of([*BEGIN, *hangs]), 1)
    assert last == "next   each heir hung too: look for an endless loop or wait in the model; no redundancy helps"
    dies = epoch(2, [2, 2, 2], [[0, "was killed (SIGKILL)", "death", None]])
    assert "--pipelines 2" in state_lost_lines(LAZY, records_of([*BEGIN, hangs[0], dies]), 1)[-1]


def losing_agent(code: ExitCode, changed: tuple[str, ...] = ()) -> Any:
    run_state = SimpleNamespace(going_at_ns=0, note=lambda text: None)
    agent = SimpleNamespace(cause=WorkerFailedError("why", code), interrupted=None, run_state=run_state)
    agent.node = SimpleNamespace(state=SimpleNamespace(reason="lost"))
    agent.checkpoints = SimpleNamespace(changed_code=lambda: list(changed), newest_good=newest_good)
    return agent


def newest_good(*of: Any) -> tuple[NewestGood, str, Monitors]:
    with Keeper(start_thread, LAZY, "") as keeper:
        return Checkpoints(keeper, cast(Any, SimpleNamespace(losses=[])), cast(Any, None)).newest_good(*of)


def test_code_that_changed_meanwhile_stops_the_run(tmp_path: Path) -> None:
    folder = checkpoints_at(tmp_path)
    save(folder, 3, run="own")
    agent = losing_agent(ExitCode.STATE_LOST, ("net.py",))
    assert Restarts(Ladder(3), str(tmp_path), "own", lambda line: None).revive(agent) is None
    assert agent.cause.exit_code == ExitCode.STOPPED_RESUMABLE
    assert str(agent.cause) == "why; net.py changed meanwhile: it would give other bits"


@pytest.mark.parametrize(
    ("code", "is_named", "expected"),
    [(ExitCode.STORAGE, True, None), (ExitCode.STORAGE, False, 3), (ExitCode.STATE_LOST, True, 5)],
)
def test_no_other_step_stands_in_for_the_one_that_the_user_named(
    tmp_path: Path, code: ExitCode, is_named: bool, expected: int | None
) -> None:
    folder = checkpoints_at(tmp_path / "before")
    names = {step: save(folder, step, run="before") for step in (3, 5, 7)}
    origin = Resumption(5, folder.place, names[5].file, "before", is_named)
    restarts = Restarts(Ladder(3), str(tmp_path / "own"), "own", lambda line: None, origin)
    found = restarts.revive(losing_agent(code))
    assert (found and found.step) == expected
    assert found is None or found.is_named == is_named
