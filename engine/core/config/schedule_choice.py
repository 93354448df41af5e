"""The rules between a schedule and the other fields of a job: placement, stages, workers and microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.core.action import Program
from engine.core.errors import Problem, ScheduleError, nearest
from engine.core.ownership import Grid, fresh
from engine.core.placement import PlacementChoice
from engine.core.program.build import build_program
from engine.core.program.verify import Violation, verify
from engine.core.schedules.csv_text import cell_of, is_text, lists_from_csv, named_pairs, stages_on
from engine.core.schedules.overlap_pairs import overlap_of, pairs_of
from engine.core.schedules.placement_choice import placement_of, stands_as
from engine.core.schedules.registry import SCHEDULES, Schedule

_MOST_SHOWN = 5


def check_schedule(
    schedule: str, stages: int, stages_per_worker: int, microbatches: int, choice: PlacementChoice
) -> list[Problem]:
    """Returns a problem for each rule about schedules that these fields of a job break."""
    unknown = []
    if not is_text(schedule) and schedule not in SCHEDULES:
        expected = f"one of {', '.join(sorted(SCHEDULES))}"
        unknown = [Problem("schedule", expected, repr(schedule), nearest(schedule, SCHEDULES))]
    if stages_per_worker < 1 or stages < 1 or microbatches < 1:
        return unknown  # `check_job` reports these counts
    if stages % stages_per_worker:
        fitting = ", ".join(str(each) for each in range(1, stages + 1) if stages % each == 0)
        expected = f"a divisor of {stages} stages: {fitting}"
        return [*unknown, Problem("stages_per_worker", expected, str(stages_per_worker))]
    if unknown:
        return unknown
    num_workers = stages // stages_per_worker
    if is_text(schedule):
        return _check_text(schedule, num_workers, stages_per_worker, microbatches, choice)
    return _check_named(schedule, SCHEDULES[schedule], num_workers, stages_per_worker, microbatches, choice)


def _check_named(
    name: str, schedule: Schedule, num_workers: int, stages_per_worker: int, microbatches: int, choice: PlacementChoice
) -> list[Problem]:
    problems = []
    least, most = schedule.stages_per_worker
    if not schedule.takes(stages_per_worker):
        stages, wanted = num_workers * stages_per_worker, str(least) if least == most else f"{least} to {most}"
        hint = f"{stages} stages are then on {stages // least} workers"
        if stages % least:
            hint = f"and a number of stages that {least} divides"
        problems.append(Problem("stages_per_worker", f"{wanted} with schedule {name}", str(stages_per_worker), hint))
    if choice not in ("auto", schedule.placement) and stages_per_worker > 1:
        problems.append(Problem("placement", f"{schedule.placement} with schedule {name}", repr(choice)))
    few = schedule.least_microbatches(num_workers)
    if microbatches < few and not problems:
        expected = f"a whole number >= {few} with schedule {name} on {num_workers} workers"
        problems.append(Problem("microbatches", expected, str(microbatches)))
    return problems


def _check_text(
    text: str, num_workers: int, stages_per_worker: int, microbatches: int, choice: PlacementChoice
) -> list[Problem]:
    try:
        lists = lists_from_csv(text)
        stages_on(lists)
    except ScheduleError as error:
        return [Problem("schedule", "the compute lists of every worker", "a file of which", str(error))]
    if len(lists) != num_workers:
        expected = f"one row per worker of a pipeline: {num_workers}"
        hint = f"{num_workers * stages_per_worker} stages, {stages_per_worker} on each worker"
        return [Problem("schedule", expected, f"{len(lists)} rows", hint)]
    placement = placement_of(text, choice)
    if not stands_as(lists, placement):
        expected = f"the stages on the workers as placement {placement} has them"
        return [Problem("schedule", expected, _named(stages_on(lists)))]
    grid = Grid(num_workers * stages_per_worker, microbatches)
    ownership = fresh(grid, stages_per_worker, placement)
    program = build_program(text, ownership)
    broken = verify(program, ownership)[:_MOST_SHOWN]
    told = [str(_in_text(each, text, program)) for each in broken]
    lost = () if broken else _lost_pairs(text, program)
    return [*(Problem("schedule", "a program that runs to its end", each) for each in told), *lost]


def _lost_pairs(text: str, program: Program) -> Iterator[Problem]:
    """Yields the overlap pairs that are named in `text`, and whose actions do not run as a pair in its program."""
    formed = {
        worker: {actions[place : place + 2]: kind for place, kind in pairs_of(actions)}
        for worker, actions in program.items()
    }
    for worker, position, first, second in named_pairs(text):
        if (first, second) not in formed[worker]:
            beside = [each for each in formed[worker] if {first, second} & {*each}]
            why = f"{beside[0][0]} and {beside[0][1]} are a pair" if beside else "a transfer stands between the two"
            found = f"worker {worker}, position {position}: ({first};{second}){overlap_of(first, second)}"
            yield Problem("schedule", "overlap pairs that can run as they are written", found, why)


def _in_text(broken: Violation, text: str, program: Program) -> Violation:
    """Returns a violation with its position in `text`, from which the program was built."""
    if broken.position < 0:
        return broken
    actions = program[broken.worker]
    action = actions[broken.position]
    nth = actions[: broken.position].count(action)
    return replace(broken, position=cell_of(text, broken.worker, action, nth))


def _named(stages: dict[int, int]) -> str:
    return ", ".join(f"stage {stage} on worker {worker}" for stage, worker in sorted(stages.items()))
