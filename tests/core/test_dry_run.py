"""The dry run: its figures, its refusals, and that programs execute as it says."""

from __future__ import annotations

import time
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.action import Action, Op, Program
from engine.core.errors import DeadlockError, ScheduleError
from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import (
    DryRun,
    Span,
    bubbles,
    dry_run,
    grid_lines,
    marked_lines,
    peak_stash,
    starts_of,
    unit_costs,
)
from engine.core.program.schedules import SCHEDULES
from engine.core.value import WIRE, Kind, Value
from tests.core.drawing import program_of
from tests.core.machine import Machine, Replica, drawn_by
from tests.core.random_programs import random_healing, random_ownership
from tests.looped import looped

# All small shapes; beyond, every number of microbatches up to 64 with one number of stages; and the largest.
SHAPES = [(num_stages, num_microbatches) for num_stages in range(1, 17) for num_microbatches in range(1, 7)]
SHAPES += [(num_microbatches * 7 % 16 + 1, num_microbatches) for num_microbatches in range(7, 65)] + [(16, 64)]


def span_of(run: DryRun, action: str) -> tuple[float, float]:
    """Returns start and end of one action."""
    (found,) = (span for span in run.spans if str(span.action) == action)
    return found.start, found.end


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_length_bubble_and_stash_of_the_literature(schedule: str) -> None:
    forward, backward = unit_costs(Action(0, Op.F, 0)), unit_costs(Action(0, Op.B, 0))
    for num_stages, num_microbatches in SHAPES:
        ownership = fresh(Grid(num_stages, num_microbatches))
        run = dry_run(build_program(schedule, ownership), ownership)
        units = num_microbatches + num_stages - 1
        assert run.makespan == units * (forward + backward)
        assert run.bubble == pytest.approx((num_stages - 1) / units, abs=1e-12)
        expected = {
            stage: min(num_stages - stage, num_microbatches) if schedule == "1f1b" else num_microbatches
            for stage in range(num_stages)
        }
        assert run.peak_stash == expected


def test_slow_stage_sets_the_pace() -> None:
    ownership = fresh(Grid(2, 3))

    def cost(action: Action) -> float:
        return 0.0 if action.op not in (Op.F, Op.B) else 5.0 if action.stage == 1 else 1.0

    run = dry_run(build_program("1f1b", ownership), ownership, cost)
    assert run.makespan == 1 + 3 * (5 + 5) + 1
    assert run.bubble == pytest.approx(1 - (3 * 2 + 3 * 10) / (2 * 32))


def test_a_transfer_holds_its_receiver_and_its_sender_as_long_as_it_costs() -> None:
    ownership = fresh(Grid(2, 1))
    costs = {Op.F: 1.0, Op.B: 2.0, Op.SEND_F: 3.0, Op.RECV_F: 5.0}
    run = dry_run(build_program("1f1b", ownership), ownership, lambda action: costs.get(action.op, 0.0))
    assert span_of(run, "0SEND_F0") == (1, 4)
    assert span_of(run, "1RECV_F0") == (4, 9)
    assert span_of(run, "1F0") == (9, 10)
    assert span_of(run, "0RECV_B0") == (12, 12)
    assert run.bubble == pytest.approx(1 - 6 / (2 * 14))  # only compute counts as busy


def test_what_is_sent_arrives_a_latency_later_and_holds_nobody_but_who_waits_for_it() -> None:
    ownership = fresh(Grid(2, 2))
    costs = {Op.F: 1.0, Op.B: 2.0, Op.SEND_F: 3.0, Op.RECV_F: 5.0}
    run = dry_run(build_program("gpipe", ownership), ownership, lambda action: costs.get(action.op, 0.0), latency=7.0)
    assert span_of(run, "0SEND_F0") == (1, 4)
    assert span_of(run, "0F1") == (4, 5)
    assert span_of(run, "1RECV_F0") == (11, 16)
    assert span_of(run, "1RECV_F1") == (17, 22)  # it was there at 15
    assert span_of(run, "1SEND_B0") == (25, 25)
    assert span_of(run, "0RECV_B0") == (32, 32)


@looped("microbatches", [1, 2, 4, 7, 8, 32])
@looped("stages", [2, 3, 4, 8])
def test_eager_1f1b_hides_every_transfer_but_those_of_the_fill_and_the_drain(stages: int, microbatches: int) -> None:
    """As long as a transfer takes at most half of a forward and a backward; 1F1B hides none of them."""
    ownership = fresh(Grid(stages, microbatches))
    for latency in (0.0, 0.25, 1.0, 1.5):
        ends = (microbatches + stages - 1) * 3 + 2 * (stages - 1) * latency
        eager = dry_run(build_program("eager-1f1b", ownership), ownership, latency=latency)
        assert eager.makespan == ends
        plainly = dry_run(build_program("1f1b", ownership), ownership, latency=latency)
        if microbatches % stages == 0:
            rounds = microbatches // stages
            assert plainly.makespan == ends + 2 * latency * ((stages - 1) * (rounds - 1) + max(0, stages - 2))
    if microbatches >= 2 * stages:
        too_long = dry_run(build_program("eager-1f1b", ownership), ownership, latency=1.75)
        assert too_long.makespan > ends + 2 * (stages - 1) * (1.75 - 1.5), "more than its fill and its drain"


def test_reductions_begin_together() -> None:
    ownership = fresh(Grid(2, 2, pipelines=3))

    def cost(action: Action) -> float:
        if action.op is Op.REDUCE_GRAD:
            return 4.0
        return unit_costs(action) * (1 + action.pipeline)  # the last pipeline is the slowest

    run = dry_run(build_program("gpipe", ownership), ownership, cost)
    last_backward = span_of(run, "0B1@2")[1]
    assert last_backward == 3 * (2 + 1) * (1 + 2)
    for pipeline in ("", "@1", "@2"):
        assert span_of(run, f"0REDUCE_GRAD{pipeline}") == (last_backward, last_backward + 4)
        assert span_of(run, f"1STEP{pipeline}") == (last_backward + 4, last_backward + 4)


def test_what_is_logged_waits_for_the_gradient_of_a_tied_stage() -> None:
    ownership = fresh(Grid(2, 1, ties=((0, 1),)))
    run = dry_run(build_program("1f1b", ownership), ownership)
    assert span_of(run, "1REDUCE_GRAD") == (4, 4)
    assert span_of(run, "1LOG") == span_of(run, "0LOG") == (6, 6)


def test_a_shadow_logs_after_the_owner_and_everybody_steps_after_its_vote() -> None:
    ownership = Ownership(Grid(1, 1), (0,), ((1,),))
    costs = {Op.F: 1.0, Op.B: 2.0, Op.HEAL: 10.0, Op.LOG: 5.0, Op.COMMIT: 1.0}
    program = build_program("1f1b", ownership, healing={(1, (0, 0))})
    run = dry_run(program, ownership, lambda action: costs.get(action.op, 0.0))
    ends = {(span.worker, str(span.action)): span.end for span in run.spans}
    assert ends == {
        **{(0, "0HEAL"): 10, (0, "0F0"): 11, (0, "0B0"): 13, (0, "0REDUCE_GRAD"): 13, (0, "0LOG"): 18},
        **{(1, "0HEAL"): 20, (1, "0LOG"): 25, (1, "0COMMIT"): 26, (0, "0COMMIT"): 19, (0, "0STEP"): 26},
        (1, "0STEP"): 26,
    }


def test_what_is_held_is_not_waited_for() -> None:
    ownership = Ownership(Grid(3, 2), (0, 1, 0))
    held = [
        (0, Value(Kind.ADDED, 0, 0, 0)),
        *((0, Value(Kind.RESIDUAL, 0, 0, each)) for each in (0, 1)),
        (1, Value(Kind.RESIDUAL, 0, 1, 0)),
        (0, Value(Kind.GRADIENT, 0, 1, 1)),
        (WIRE, Value(Kind.GRADIENT, 0, 2, 0)),
    ]
    program = program_of("0: 0B1\n1: 1RECV_B0 1I0")
    run = dry_run(program, ownership, held=held)
    assert [str(span.action) for span in run.spans] == ["0B1", "1RECV_B0", "1I0"]
    assert run.makespan == 2
    assert run.peak_stash == {0: 2, 1: 1}
    with pytest.raises(ScheduleError, match="needs residual of stage 1 microbatch 0 at worker 1, which nobody makes"):
        dry_run(program, ownership, held=[each for each in held if each[0] != 1])


@looped(
    ("actions", "stashed", "peak"),
    [
        ("0F0 0F1 0B0 0F2 0B1 0B2", 0, 2),
        ("0f0 0I0 0f1 0I1 0W0 0W1", 0, 2),
        ("0f0 0I0 0f1 0I1", 0, 1),
        ("0B0 0F1 0B1", 1, 1),
        ("0B0 0B1", 2, 2),
        ("0F0 1F0 0B0 1F1 0F1 0B1", 0, 3),  # stage 1 is shadowed: its residuals stay
        ("0SEND_F0 0REDUCE_GRAD 0LOG", 0, 0),
    ],
)
def test_peak_stash_counts_forwards_whose_backward_has_not_come(actions: str, stashed: int, peak: int) -> None:
    assert peak_stash(program_of(f"0: {actions}")[0], stashed) == peak


def test_an_empty_program_takes_no_time() -> None:
    ownership = fresh(Grid(1, 1))
    assert dry_run({0: ()}, ownership) == DryRun((), 0.0, 0.0, {0: 0}, {0: 0.0})


@looped(
    ("ownership", "drawing", "cycle"),
    [
        (
            fresh(Grid(2, 1)),
            """
            0: 0F0 0RECV_B0 0B0 0SEND_F0
            1: 1RECV_F0 1F0 1B0 1SEND_B0
            """,
            ((0, "0RECV_B0"), (1, "1RECV_F0"), (0, "0RECV_B0")),
        ),
        (
            # Worker 0 waits on the cycle without being part of it.
            fresh(Grid(3, 1)),
            """
            0: 0F0 0SEND_F0 0RECV_B0 0B0
            1: 1RECV_F0 1F0 1RECV_B0 1B0 1SEND_B0 1SEND_F0
            2: 2RECV_F0 2F0 2B0 2SEND_B0
            """,
            ((1, "1RECV_B0"), (2, "2RECV_F0"), (1, "1RECV_B0")),
        ),
        (fresh(Grid(1, 2)), "0: 0F0 0F1 0B1 0B0", ((0, "0B1"), (0, "0B1"))),
        (fresh(Grid(1, 2)), "0: 0F1 0F0 0B0 0B1", ((0, "0F1"), (0, "0F1"))),
        (
            # A shadow that logs before it reduces what the owner waits for.
            Ownership(Grid(2, 1, ties=((0, 1),)), (0, 1), ((1,), ())),
            """
            0: 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0LOG
            1: 1RECV_F0 1F0 1B0 1SEND_B0 0LOG 1REDUCE_GRAD
            """,
            ((0, "0LOG"), (1, "0LOG"), (0, "0LOG")),
        ),
        (
            Ownership(Grid(2, 1, pipelines=2), (0, 0, 1, 1)),
            """
            0: 0F0 1F0 1B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD
            1: 0F0@1 1F0@1 1B0@1 0B0@1 1REDUCE_GRAD@1 0REDUCE_GRAD@1
            """,
            ((0, "0REDUCE_GRAD"), (1, "1REDUCE_GRAD@1"), (0, "0REDUCE_GRAD")),
        ),
    ],
)
def test_deadlock_is_the_cycle_of_those_that_wait(
    ownership: Ownership, drawing: str, cycle: tuple[tuple[int, str], ...]
) -> None:
    with pytest.raises(DeadlockError) as refused:
        dry_run(program_of(drawing), ownership)
    assert refused.value.cycle == cycle
    path = " -> ".join(f"worker {worker}: {action}" for worker, action in cycle)
    assert str(refused.value) == f"deadlock: {path}"


@pytest.mark.parametrize(
    ("drawing", "message"),
    [
        (
            "0: 0F0 0SEND_F0\n1: 1RECV_F0 1RECV_F1",
            "worker 1, position 1: 1RECV_F1 needs activation of stage 0 microbatch 1 on the wire, which nobody makes",
        ),
        (
            "1: 1RECV_F0",
            "worker 1, position 0: 1RECV_F0 needs activation of stage 0 microbatch 0 on the wire, which nobody makes",
        ),
        (
            "0: 0B0\n1:",
            "worker 0, position 0: 0B0 needs residual of stage 0 microbatch 0 at worker 0, which nobody makes",
        ),
        (
            "0: 0COMMIT\n1: 1STEP",
            "worker 0, position 0: 0COMMIT needs logged of stage 0 at worker 0, which nobody makes",
        ),
        ("1: 1STEP", "worker 1, position 0: 1STEP needs voted of stage 0 worker 0 on the wire, which nobody makes"),
    ],
)
def test_what_nobody_does_is_named(drawing: str, message: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        dry_run(program_of(drawing), fresh(Grid(2, 2)))
    assert not isinstance(refused.value, DeadlockError)
    assert str(refused.value) == message


def test_a_pipeline_that_does_not_reduce_is_named() -> None:
    ownership = fresh(Grid(1, 1, pipelines=2))
    with pytest.raises(ScheduleError) as refused:
        dry_run(program_of("0: 0F0 0B0 0REDUCE_GRAD\n1: 0F0@1 0B0@1"), ownership)
    assert str(refused.value) == (
        "worker 0, position 2: 0REDUCE_GRAD needs 0REDUCE_GRAD@1 at worker 1, which nobody makes"
    )


Case = tuple[Program, Ownership, list[Replica]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """The program of a step, for a fresh job or for any ownership, with shadows of which some are healing."""
    order = drawn_by(draw(st.integers(0, 2**32)))
    ownership = random_ownership(order)
    if draw(st.booleans()):
        fresh = list(range(len(ownership.owners)))
        order.shuffle(fresh)
        ownership = with_shadows(Ownership(ownership.grid, tuple(fresh)), "lazy", draw(st.integers(0, 2)), fresh)
    healing = random_healing(ownership, order)
    redundancy: Redundancy = "eager" if draw(st.booleans()) else "lazy"
    return build_program(draw(st.sampled_from(sorted(SCHEDULES))), ownership, redundancy, healing), ownership, healing


OP_COSTS = st.fixed_dictionaries({op: st.integers(0, 9) for op in Op})


@settings(max_examples=300)
@given(cases(), OP_COSTS, st.integers(0, 9), st.integers(0, 2**32))
def test_a_program_executes_as_the_dry_run_says(
    case: Case, costs: dict[Op, int], latency: int, interleaving: int
) -> None:
    program, ownership, healing = case

    def cost(action: Action) -> int:
        return costs[action.op] * (1 + action.stage % 3) + action.pipeline  # slots of different speed

    machine = Machine(ownership, cost, healing=healing, latency=latency)
    assert machine.run(program, drawn_by(interleaving))
    run = dry_run(program, ownership, cost, latency=latency)
    for worker, actions in program.items():
        assert tuple(span.action for span in machine.spans if span.worker == worker) == actions
        assert tuple(span.action for span in by_worker(run, worker)) == actions
    assert sorted(map(key_of, machine.spans)) == sorted(map(key_of, run.spans))
    assert [span.start for span in run.spans] == sorted(span.start for span in run.spans)
    assert run.makespan == max(span.end for span in machine.spans)


def by_worker(run: DryRun, worker: int) -> list[Span]:
    """Returns the spans of one worker in the order of the dry run."""
    return [span for span in run.spans if span.worker == worker]


def key_of(span: Span) -> tuple[int, str, float, float]:
    """Returns a span as something to sort by."""
    return span.worker, str(span.action), span.start, span.end


@st.composite
def shuffled_programs(draw: st.DrawFn) -> tuple[Program, Ownership]:
    """A program in which some actions have been moved within their worker."""
    built, ownership, _ = draw(cases())
    program = {worker: list(actions) for worker, actions in built.items() if actions}
    for _ in range(draw(st.integers(1, 4))):
        actions = program[draw(st.sampled_from(sorted(program)))]
        moved = actions.pop(draw(st.integers(0, len(actions) - 1)))
        actions.insert(draw(st.integers(0, len(actions))), moved)
    # What comes too late for a replica is no matter of the dry run, but of verification.
    return {worker: tuple(_without_state(actions, worker, ownership)) for worker, actions in program.items()}, ownership


def _without_state(actions: list[Action], worker: int, ownership: Ownership) -> list[Action]:
    """Returns the actions without HEAL and without forwards of shadowed slots."""
    return [
        action
        for action in actions
        if action.op is not Op.HEAL
        and (action.op is not Op.F or ownership.owner(action.pipeline, action.stage) == worker)
    ]


@settings(max_examples=300)
@given(shuffled_programs(), st.integers(0, 2**32))
def test_a_program_finishes_exactly_if_its_dry_run_does(case: tuple[Program, Ownership], interleaving: int) -> None:
    program, ownership = case
    finishes = Machine(ownership, in_order=False).run(program, drawn_by(interleaving))
    if finishes:
        dry_run(program, ownership)
        return
    with pytest.raises(DeadlockError):
        dry_run(program, ownership)


def test_a_large_job_is_planned_and_tried_at_once() -> None:
    ownership = with_shadows(fresh(Grid(64, 128)), "lazy", 1, range(64))
    before = time.process_time()
    run = dry_run(build_program("1f1b", ownership), ownership)
    assert time.process_time() - before < 5  # 0.4 s on a quiet machine; a rule that is quadratic takes a minute
    assert run.makespan == 3 * (128 + 64 - 1)


# The grid of a dry run, against drawings.


DRAWINGS = {
    ("1f1b", Grid(3, 4)): """
worker 0  0F0 0F1 0F2                 0B0 -   0F3 0B1 -       0B2 -       0B3 -
worker 1      1F0 1F1         1B0 -   1F2 1B1 -   1F3 1B2 -       1B3 -
worker 2          2F0 2B0 -   2F1 2B1 -   2F2 2B2 -   2F3 2B3 -
""",
    ("gpipe", Grid(2, 2)): """
worker 0  0F0 0F1             0B0 -   0B1 -
worker 1      1F0 1F1 1B0 -   1B1 -
""",
    ("1f1b", Grid(1, 2)): """
worker 0  0F0 0B0 -   0F1 0B1 -
""",
    ("gpipe", Grid(2, 1, pipelines=2)): """
worker 0  0F0                     0B0   -
worker 1        1F0   1B0   -
worker 2  0F0@1                   0B0@1 -
worker 3        1F0@1 1B0@1 -
""",
}


def lines_of(schedule: str, ownership: Ownership, width: int = 0) -> list[str]:
    """Returns the grid of a schedule with the usual costs."""
    return grid_lines(dry_run(build_program(schedule, ownership), ownership), width)


@pytest.mark.parametrize(("schedule", "grid"), DRAWINGS)
def test_grid(schedule: str, grid: Grid) -> None:
    assert "\n".join(lines_of(schedule, fresh(grid))) == DRAWINGS[schedule, grid].strip("\n")


def test_a_narrow_terminal_gets_blocks() -> None:
    lines = lines_of("gpipe", fresh(Grid(2, 2)), width=30)
    assert "\n".join(lines) == (
        "worker 0  0F0 0F1\nworker 1      1F0 1F1 1B0 -\n\nworker 0  0B0 -   0B1 -\nworker 1  1B1 -"
    )


@pytest.mark.parametrize("width", [1, 20, 40, 79])
def test_no_line_is_wider_than_asked_where_a_cell_fits(width: int) -> None:
    lines = lines_of("1f1b", fresh(Grid(4, 8)), width)
    assert max(map(len, lines)) <= max(width, len("worker 0  0F0"))
    cells = [cell for line in lines for cell in line.split()[2:] if cell != "-"]
    assert sorted(cells) == sorted(f"{s}{op}{m}" for s in range(4) for op in "FB" for m in range(8))


@settings(max_examples=50)
@given(cases())
def test_starts_alone_are_those_of_the_spans(case: Case) -> None:
    program, ownership, _ = case
    run = dry_run(program, ownership)
    spans = {worker: [span.start for span in run.spans if span.worker == worker] for worker in program}
    assert {worker: [*starts] for worker, starts in starts_of(program, ownership).items()} == spans


def test_names_of_workers_are_aligned() -> None:
    grid = Grid(2, 1)
    lines = lines_of("gpipe", Ownership(grid, (9, 10)))
    assert [line[:13] for line in lines] == ["worker 9   0F", "worker 10    "]


def test_what_is_done_for_another_slot_stands_in_brackets() -> None:
    ownership = Ownership(Grid(2, 1), (0, 1), shadows=((), (0,)))
    spans = (
        Span(0.0, 1.0, 0, Action(0, Op.F, 0)),
        Span(1.0, 2.0, 1, Action(1, Op.F, 0)),
        Span(1.0, 2.0, 0, Action(1, Op.F, 0)),
    )
    run = DryRun(spans, 2.0, 0.0, {})
    assert grid_lines(run, 0, ownership) == ["worker 0  0F0   (1F0)", "worker 1        1F0"]
    assert grid_lines(run) == ["worker 0  0F0 1F0", "worker 1      1F0"]


def test_what_breaks_a_rule_is_marked_in_its_row() -> None:
    program = program_of("0: 0F0 0F1 0B0 0B1 0STEP\n1: 1F0 1B0\n10: 2F0")
    assert marked_lines(program, {(0, 2), (1, 0)}, 80) == [
        "worker 0   0F0   0F1   >0B0< 0B1   0STEP",
        "worker 1   >1F0< 1B0",
        "worker 10  2F0",
    ]
    assert marked_lines(program, {(0, 4)}, 32) == ["worker 0   0F1     0B0", "worker 1   1B0", "worker 10"]


# What a dry run says of each worker agrees with what it says in sum.


def test_a_small_program() -> None:
    run = dry_run(program_of("0: 0F0 0SEND_F0 0RECV_B0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0"), fresh(Grid(2, 1)))
    assert bubbles(run) == {0: pytest.approx(0.5), 1: pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("schedule", "v", "redundancy"),
    [("1f1b", 1, "none"), ("1f1b", 1, "eager"), ("zbv", 2, "none"), ("zb1p", 1, "lazy")],
)
def test_the_shares_of_the_workers_add_up_to_the_figure(schedule: str, v: int, redundancy: Redundancy) -> None:
    ownership = fresh(Grid(4 * v, 8), v, "v")
    ownership = with_shadows(ownership, redundancy, 1, ownership.workers())
    run = dry_run(build_program(schedule, ownership, redundancy), ownership)
    assert fmean(bubbles(run).values()) == pytest.approx(run.bubble)
