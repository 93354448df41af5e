"""Simulates whole jobs with the shipped worker, coordinator, planner and programs: no promise may be broken.

Every test asserts that its schedules keep all promises; a failing schedule is shrunk and printed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import pytest

from engine.core.ownership import Grid, Redundancy
from engine.core.program.build import build_program
from engine.core.program.dependencies import routes_of
from engine.core.protocol.state import Phase
from engine.core.value import Value
from tests.simulation import compiled, plans
from tests.simulation.case import KINDS, MOVE, Case, Fault, from_text
from tests.simulation.judge import MOVED
from tests.simulation.planting import all_well
from tests.simulation.run import History, run, run_on
from tests.simulation.schedules import (
    PAIRED,
    first_step,
    grid_cases,
    hand_overs,
    moving_case,
    pair_cases,
    random_case,
    single_kills,
    small_cases,
    startup_deaths,
    streamed_cases,
    take_overs,
    two_stage_cases,
)
from tests.simulation.shrink import shrunk
from tests.simulation.test_links import SCHEDULES as LINK_FAULTS
from tests.simulation.world import World, first_ownership
from tests.soaked import soaked

pytestmark = pytest.mark.timeout(300)  # some 10 s of the processor each, at most

ROOT = Path(__file__).resolve().parents[2]
SHAPES = sorted({(case.pipelines, case.stages, case.microbatches) for case in grid_cases()})
# All moments of the smallest shape, and every n-th of the others; `make soak-sim` takes all of all shapes.
WHOLE = [(1, 2, 2)]
SMALL = [(1, 3, 2), (1, 4, 2), (2, 2, 2)]
SAMPLED = [shape for shape in SHAPES if shape not in WHOLE]
RANDOM = 600
TAKEN, HANDED, AGAIN = "another coordinator takes over", "prepared hand-over is taken", "job is started again"
TURNS = {
    *("transfer of an old group is dropped", "transfer fails", "worker catches up"),
    *("replica is adopted", "log is sent again", "shadow is healed", "stream is taken", "stream is taken by the fence"),
    *("forward is redone", "backward is redone"),
    *("validation is interrupted", "replaced coordinator writes nothing", TAKEN, HANDED, AGAIN),
    *(f"coordinator dies while {phase}" for phase in (Phase.FORMING, Phase.RUNNING, Phase.FAILING_OVER)),
}
SELDOM = {
    *("group cannot be formed", "forward of a logged slot counts"),
    *(f"coordinator dies while {phase}" for phase in Phase),
}
CHUNK = 600
EVERY = 23  # moment of a job that streams, or whose workers have two stages
TAKE_OVER_EVERY, HAND_OVER_EVERY = 70, 842  # moments of a coordinator, and of a worker behind a notice
STREAMED, TWO_STAGES = [*streamed_cases()], [*two_stage_cases()]
PARTS = 4
MOVES = 30
TAKE_OVERS, HAND_OVERS, STARTUP_DEATHS = 37, 12, 260  # at least, in each part


def test_there_are_enough_schedules() -> None:
    num_schedules = RANDOM + 35 * len(PAIRED) + PARTS * (TAKE_OVERS + HAND_OVERS + STARTUP_DEATHS + LINK_FAULTS)
    for case in (*chain.from_iterable(map(of_shape, SHAPES)), *STREAMED):
        shape = (case.pipelines, case.stages, case.microbatches)
        moments = sum(len(first_step(case, moments)) for moments in run(case).moments)
        num_schedules += 2 * moments // (EVERY if case in STREAMED else 1 if shape in WHOLE else _stride(shape))
    assert num_schedules >= 2_900


def _stride(shape: tuple[int, int, int]) -> int:
    return 4 if shape in SMALL else 50 * shape[0] * shape[1]


def of_shape(shape: tuple[int, int, int]) -> list[Case]:
    """Returns the cases of a shape; of a large one every third, and others of its neighbours."""
    cases = [case for case in grid_cases() if (case.pipelines, case.stages, case.microbatches) == shape]
    return cases if shape in WHOLE + SMALL else cases[SAMPLED.index(shape) % 3 :: 3]


@pytest.mark.parametrize("shape", WHOLE)
def test_every_single_kill(shape: tuple[int, int, int]) -> None:
    for case in of_shape(shape):
        histories = all_well(single_kills(case))
        assert all(len(history.struck) == 1 and history.epoch >= 2 for history in histories)
        survives = case.redundancy != "none" or case.pipelines > 1  # else it is started again until the first commit
        ends = {Phase.FINISHED} if survives else {Phase.FINISHED, Phase.HALTED}
        assert {history.phase for history in histories} == ends


@pytest.mark.parametrize("shape", SAMPLED)
def test_some_single_kills_of_other_shapes(shape: tuple[int, int, int]) -> None:
    """Each kill has one of both timings; neighbours among cases and shapes have the other."""
    for nth, case in enumerate(of_shape(shape)):
        timing = (SAMPLED.index(shape) + nth + nth // 2) % 2
        kills = islice(single_kills(case, _stride(shape), nth * 7), timing, None, 2)
        assert all(len(history.struck) == 1 for history in all_well(kills))


@pytest.mark.parametrize("number", range(len(STREAMED)))
def test_single_kills_of_a_job_that_streams(number: int) -> None:
    histories = all_well(single_kills(STREAMED[number], EVERY, number))
    assert {history.phase for history in histories} == {Phase.FINISHED}


@pytest.mark.parametrize("part", range(PARTS))
def test_a_coordinator_that_dies_at_any_moment_is_replaced(part: int) -> None:
    """In an ordinary step, in a recovery, in a heal, in a hand-over, before it tells what it has written, and after."""
    kill, notice = Fault(1, "moment", 24), Fault(0, "moment", 8, "notice", 60_000_000)
    troubles = ((), (kill,), (notice,))
    taken = 0
    for nth, case in enumerate(small_cases()[part::PARTS]):
        for faults in troubles:
            troubled = replace(case, faults=faults, validate_every=nth % 3)
            taken += count_of(TAKEN, all_well(take_overs(troubled, TAKE_OVER_EVERY, nth)))
    assert taken >= TAKE_OVERS


@pytest.mark.parametrize("every", [3, soaked(1)])
def test_an_early_stop_comes_after_the_same_step_whoever_dies_around_it(every: int) -> None:
    case = Case(2, 2, 2, validate_every=1, early_stop=True, steps=6)
    usual = run(case)
    assert case.planned_steps == 3
    kills = (
        replace(case, faults=(Fault(worker, "moment", at),), deaths=deaths)
        for worker, last in enumerate(usual.moments)
        for deaths in ((), (usual.reached // 2,), (usual.reached * 3 // 4,))
        for at in range(last // 2 + len(deaths), last, 2 * every)
    )
    take_overs_around = (replace(case, deaths=(at,)) for at in range(usual.reached // 3, usual.reached, every))
    histories = all_well([*kills, *take_overs_around])
    assert {history.phase for history in histories} == {Phase.FINISHED}
    assert count_of(TAKEN, histories) > 20 // every


def test_a_prediction_ends_with_a_whole_pass_whoever_dies_in_it() -> None:
    """A stage without a heir begins again with all workers; a death after the pass costs nothing."""
    shapes: list[tuple[Redundancy, int]] = [("lazy", 1), ("none", 1), ("none", 2)]
    for redundancy, pipelines in shapes:
        case = Case(3, 2, pipelines, redundancy, predicts=True, steps=1)
        usual = run(case)
        assert (usual.problem, usual.phase) == ("", Phase.FINISHED)
        kills = (
            replace(case, faults=(Fault(worker, "moment", at),), deaths=deaths, seed=at % 2)
            for worker, last in enumerate(usual.moments)
            for at in range(1, last + 1)
            for deaths in ((), (usual.reached * 3 // 4,))
        )
        take_overs_around = (replace(case, deaths=(at,)) for at in range(1, usual.reached + 1, 2))
        histories = all_well([*kills, *take_overs_around])
        assert {history.phase for history in histories} == {Phase.FINISHED}


@pytest.mark.parametrize("every", [9, soaked(PARTS)])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_worker_leaves_and_another_dies(part: int, every: int) -> None:
    handed = 0
    for nth, case in enumerate(small_cases()[part::every]):
        longer = replace(case, steps=3, log_every=nth % 2 if case.redundancy in ("lazy", "eager") else 0)
        handed += count_of(HANDED, all_well(hand_overs(longer, HAND_OVER_EVERY, nth)))
    assert handed >= HAND_OVERS


def test_slots_move_among_deaths_notices_and_take_overs() -> None:
    histories = all_well(moving_case(number) for number in range(MOVES))
    assert count_of(MOVED, histories) > MOVES * 0.3
    assert count_of(HANDED, histories) > MOVES * 0.3
    assert count_of(TAKEN, histories) > MOVES * 0.1


@pytest.mark.soak
def test_slots_move_in_many_histories() -> None:
    all_well(moving_case(number) for number in range(MOVES, 25_000))


@pytest.mark.parametrize("redundancy", ["none", "lazy", "eager", "reroute"])
def test_slots_go_where_they_are_wanted(redundancy: Redundancy) -> None:
    """They move back as well, and whichever wish comes last counts, also if it comes again."""
    for length in range(5):
        wishes = [Fault(1, "moment", at, MOVE, each) for at, each in ((20, length + 1), (60, length), (61, length))]
        case = Case(3, 2, 2, redundancy, steps=9, spread=length % 3, seed=length, faults=tuple(wishes))
        world = World(case)
        world.run()
        assert (world.membership.phase, world.membership.wanted) == (Phase.FINISHED, ())
        assert world.membership.owners == world.wished, case.text()


@pytest.mark.parametrize("part", range(PARTS))
def test_a_death_before_the_first_step_starts_the_job_again(part: int) -> None:
    again = 0
    for case in small_cases()[part::PARTS]:
        histories = all_well(startup_deaths(case))
        assert {history.phase for history in histories} == {Phase.FINISHED}
        again += count_of(AGAIN, histories)
    assert again >= STARTUP_DEATHS


def count_of(turn: str, histories: list[History]) -> int:
    return sum(turn in history.turns for history in histories)


@pytest.mark.parametrize("number", range(len(TWO_STAGES)))
def test_single_kills_where_a_worker_has_two_stages(number: int) -> None:
    """The worker dies between two logs: its heir has the log of one stage, and computes its activations again."""
    histories = all_well(single_kills(TWO_STAGES[number], EVERY, number))
    assert {history.phase for history in histories} == {Phase.FINISHED}


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_worker_with_two_stages_dies_between_two_logs(schedule: str) -> None:
    small = Case(4, 2, stages_per_worker=2, schedule=schedule, steps=2)
    between_two_logs = (replace(small, spread=10, seed=seed, faults=(Fault(1, "LOG", 2),)) for seed in range(200))
    turns = Counter(turn for history in all_well(between_two_logs) for turn in history.turns)
    assert turns["forward of a logged slot counts"] > 0 or schedule == "interleaved"


@pytest.mark.parametrize("case", PAIRED, ids=Case.text)
def test_pairs_of_kills(case: Case) -> None:
    histories = all_well(pair_cases(case, stride=sum(run(case).moments) // 13))
    assert len(histories) > 35
    assert sum(len(history.struck) == 2 for history in histories) > len(histories) * 0.9
    assert Phase.FINISHED in {history.phase for history in histories}


@pytest.mark.parametrize("first", range(0, RANDOM, CHUNK))
def test_random_faults(first: int) -> None:
    """They break no promise, reach every point, are of every kind, and cause every rare event."""
    histories = all_well(random_case(number) for number in range(first, first + CHUNK))
    assert sum(bool(history.struck) for history in histories) > CHUNK * 0.8
    assert sum(history.epoch > 2 for history in histories) > CHUNK * 0.3
    assert sum(history.phase is Phase.FINISHED for history in histories) > CHUNK * 0.5
    struck = [fault for history in histories for fault in history.struck]
    assert {fault.kind for fault in struck} == {*KINDS}
    missed = {"fence", "inventory", "inventoried", "plan", "planned", "go", "replayed", "HEAL", "commit", "stepped"}
    assert not missed - {fault.point for fault in struck}
    turns = Counter(turn for history in histories for turn in history.turns)
    assert TURNS <= set(turns) <= TURNS | SELDOM, turns


def test_kills_until_the_last_worker_stands() -> None:
    faults = tuple(Fault(worker, "stepped", 2 * (worker + 1)) for worker in range(3))
    for redundancy in ("lazy", "eager"):
        history = run(Case(4, 4, redundancy=redundancy, steps=9, faults=faults))
        assert (history.problem, history.phase, len(history.struck)) == ("", Phase.FINISHED, 3)


def test_same_case_has_the_same_trace_in_every_process() -> None:
    case = replace(random_case(7), spread=5)
    assert run(case).trace == run(case).trace
    assert run(case).trace != run(replace(case, seed=case.seed + 1)).trace
    command = [sys.executable, "-m", "tests.simulation", "--replay", case.text()]
    told = {
        subprocess.run(
            command, cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1
    assert f"trace {run(case).trace}" in told.pop()


def test_shared_start_changes_nothing() -> None:
    cases = [case for whole in PAIRED for case in (*single_kills(whole, 97), *startup_deaths(whole), random_case(1))]
    assert all(run_on(case) == run(case) for case in cases)


def test_case_round_trips() -> None:
    for number in range(50):
        case = random_case(number)
        assert from_text(case.text()) == case
        assert set(json.loads(case.text())) <= set(Case.__slots__)


def test_failing_case_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tests.simulation.actions.healing", lambda replica: (replica.version, (0, *replica.state()[1:]))
    )
    plans.forget()
    case = Case(4, 4, 2, steps=5, seed=3, spread=3, faults=(Fault(1, "moment", 30), Fault(6, "moment", 500)))
    assert run(case).problem
    small = shrunk(case)
    assert run(small).problem
    assert (small.pipelines, small.microbatches, small.spread, len(small.faults)) == (1, 1, 0, 1)
    assert small.steps <= 3


@pytest.mark.parametrize("redundancy", ["none", "lazy", "eager", "reroute"])
def test_transfers_are_those_of_the_engine(redundancy: Redundancy) -> None:
    for grid in (Grid(3, 2), Grid(3, 2, 2, ((0, 2),))):
        ownership = first_ownership(grid, redundancy, 1)
        program = build_program("1f1b", ownership, redundancy, log_every=1)
        ours = compiled.routed(program, ownership)
        for worker in ownership.workers():
            theirs = routes_of(worker, program, ownership)
            for value, targets in theirs.targets.items():
                assert set(ours.targets(worker, _key(value))) == set(targets), value
            for value, source in theirs.sources.items():
                assert ours.source(_key(value)) == source, value


def _key(value: Value) -> int:
    kind, pipeline, stage, index = value
    return compiled.key_of(compiled.KINDS[kind], pipeline, stage, max(index, 0))
