"""The verdict on a job of any launcher: a toy job of two ranks that is killed, resumes, and cheats."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import pytest

from engine.core.checks.external_verdict import JobReports, StateReport, StepReport, judge, relative

STEPS, EVERY, KILLED_AT_NS = 12, 4, 1_000


@dataclass
class _Toy:
    """A job of `STEPS` steps with a checkpoint every `EVERY`; its state is a hash of all samples in their order."""

    steps: list[StepReport] = field(default_factory=list)
    states: list[StateReport] = field(default_factory=list)
    now_ns: int = 0

    def train(self, first: int, last: int, state: tuple[str, str], process: str, lost: int = -1) -> tuple[str, str]:
        for step in range(first, last):
            samples = [each for each in range(4 * step, 4 * step + 4) if each != lost]
            one, two = (hashlib.sha256(f"{part}{step}{samples}".encode()).hexdigest()[:16] for part in state)
            state = one, two
            for rank in (0, 1):
                self.now_ns += 10
                own = tuple(samples[rank::2])
                self.steps.append(StepReport(step, self.now_ns, rank, f"{rank}-{process}", 1 / (step + 1), own))
                self.states.append(StateReport(step, self.now_ns, rank, {"a.weight": one, "b.weight": two}))
        return state

    def reports(self) -> JobReports:
        return JobReports(self.steps, self.states, 0)


def _twin() -> JobReports:
    toy = _Toy()
    toy.train(0, STEPS, ("a", "b"), "first")
    return toy.reports()


def _run(*, lost: int = -1, repeated: bool = False, swapped: bool = False) -> JobReports:
    """Returns the reports of a run that is killed after step 6 and resumes from the checkpoint after step 3."""
    toy = _Toy()
    kept = toy.train(0, EVERY, ("a", "b"), "first")
    toy.train(EVERY, 7, kept, "first")
    toy.now_ns = KILLED_AT_NS
    state = (kept[1], kept[0]) if swapped else kept
    toy.states.append(StateReport(EVERY - 1, KILLED_AT_NS, 0, dict(zip(("a.weight", "b.weight"), state, strict=True))))
    if repeated:
        state = toy.train(EVERY, EVERY + 5, state, "second")
        toy.train(EVERY + 4, STEPS, state, "second")
    else:
        toy.train(EVERY, STEPS, state, "second", lost)
    return toy.reports()


def test_a_resumed_run_equals_its_twin_and_its_repeated_steps_are_named() -> None:
    verdict = judge(_run(), _twin(), [KILLED_AT_NS])
    assert verdict.parts == (
        ("survival", "same", "the job survived: exit code 0, reached step 11, as the twin did"),
        ("steps", "same", "steps 4-6 executed twice"),
        ("samples", "same", "the same 48 samples as the twin's, equally often"),
        ("weights", "same", "the same bits in 12 steps up to step 11"),
        ("losses", "same", "the same in 12 steps"),
    )
    assert verdict.as_dict()["steps_repeated"] == {"4": 2, "5": 2, "6": 2}


def test_a_lost_sample_is_named() -> None:
    verdict = judge(_run(lost=22), _twin(), [KILLED_AT_NS])
    assert verdict.status("samples") == "different" and verdict.lost_samples == (22,)
    assert verdict.parts[2].text == "sample 22 (step 5) lost"
    assert verdict.parts[3].text.startswith("from step 5 on, first on rank 0: 'a.weight', 'b.weight' are different")
    assert verdict.first_different_step == 5


def test_a_doubled_sample_is_named() -> None:
    run = _run()
    *others, last = run.steps
    cheat = replace(run, steps=[*others, last._replace(samples=(*(last.samples or ()), 3))])
    assert judge(cheat, _twin()).parts[2].text == "sample 3 (steps 0, 11) counted too often"


def test_a_step_that_is_executed_twice_after_the_restart_is_named() -> None:
    verdict = judge(_run(repeated=True), _twin(), [KILLED_AT_NS])
    assert verdict.repeated == {4: 2, 5: 2, 6: 2, 8: 2}
    assert verdict.parts[1] == ("steps", "same", "steps 4-6, 8 executed twice")
    assert verdict.parts[2].status == "same"  # the last execution counts, and the bits show that both did
    assert verdict.parts[3].text == (
        "from step 8 on, first on rank 0: 'a.weight', 'b.weight' are different, of 2 tensors; step 8 was executed twice"
    )


def test_two_weights_that_were_swapped_at_the_restart_are_named() -> None:
    weights = judge(_run(swapped=True), _twin(), [KILLED_AT_NS]).parts[3]
    assert weights == (
        *("weights", "different"),
        "from step 3 on, first on rank 0: 'a.weight' and 'b.weight' are swapped, of 2 tensors",
    )


def test_a_lost_step_is_named_and_by_which_rank() -> None:
    run = _run()
    without = replace(run, steps=[each for each in run.steps if each.step != 5])
    assert judge(without, _twin()).lost_steps == (5,)
    assert judge(without, None).parts[1].text == "step 5 lost; steps 4, 6 executed twice"
    one = replace(run, steps=[each for each in run.steps if (each.rank, each.step) not in ((1, 8), (1, 9))])
    assert judge(one, _twin()).parts[1].text == "steps 8, 9 lost by rank 1; steps 4-6 executed twice"
    sparse = replace(run, steps=[each for each in run.steps if each.step % 2 == 0])
    assert judge(sparse, None).lost_steps == ()


def test_a_run_that_ends_early_did_not_survive() -> None:
    run = replace(_run(), steps=_run().steps[:-4])
    assert judge(run, _twin()).parts[0].text == "the job did not survive: exit code 0, reached step 9 of 11"
    assert judge(replace(run, exit_code=None), None).parts[0].status == "not compared"
    assert judge(replace(run, exit_code=1), None).parts[0].text.endswith("exit code 1, reached step 9")


def test_a_twin_that_fails_by_itself_proves_nothing() -> None:
    part = judge(replace(_run(), exit_code=1), replace(_twin(), exit_code=1)).parts[0]
    assert part.status == "not compared" and part.text.endswith("ended with exit code 1 itself")


def test_ranks_that_report_as_one_do_not_repeat_steps() -> None:
    twin = [StepReport(step, 10 * step + rank) for step in range(6) for rank in (0, 1)]
    again = [StepReport(step, 100 + 10 * step + rank) for step in range(3, 6) for rank in (0, 1)]
    assert judge(JobReports(twin), JobReports(twin)).repeated == {}
    assert judge(JobReports([*twin[:8], *again]), JobReports(twin)).repeated == {3: 2}


def test_what_was_not_reported_is_not_compared() -> None:
    bare = JobReports([StepReport(step, step) for step in range(4)], exit_code=0)
    verdict = judge(bare, bare)
    assert {each.part: each.status for each in verdict.parts} == {
        **{"survival": "same", "steps": "same", "samples": "not compared"},
        **{"weights": "not compared", "losses": "not compared"},
    }
    assert "bamboo.fingerprint" in verdict.parts[3].text
    assert judge(JobReports(), None).parts[1].text == "the job reported no step"
    half = replace(_twin(), steps=[each._replace(samples=None) if each.step == 2 else each for each in _twin().steps])
    assert judge(half, _twin()).parts[2].text == "the job names no samples in step 2"


def test_a_job_that_does_not_repeat_its_own_bits_is_not_compared() -> None:
    other = [each._replace(tensors={**each.tensors, "a.weight": "other"}) for each in _run().states]
    verdict = judge(replace(_run(), states=other), _twin(), [KILLED_AT_NS])
    assert verdict.parts[3].status == "not compared"
    assert verdict.parts[3].text.startswith("the job does not repeat its own bits: different already before")


@pytest.mark.parametrize(("distance", "status"), [(1e-6, "within tolerance"), (1e-3, "different"), (None, "different")])
def test_a_tolerance_needs_values(distance: float | None, status: str) -> None:
    last = [*_run().states]
    last[-1] = last[-1]._replace(tensors={**last[-1].tensors, "b.weight": "other"})
    distances = {} if distance is None else {(STEPS - 1, "b.weight"): distance}
    weights = judge(replace(_run(), states=last), _twin(), [KILLED_AT_NS], 1e-4, distances).parts[3]
    assert weights.status == status
    assert ("only as hashes" in weights.text) == (distance is None)


def test_losses_are_compared_by_bits_or_within_a_tolerance() -> None:
    run = replace(_run(), steps=[each._replace(loss=(each.loss or 0) * (1 + 1e-6)) for each in _run().steps])
    assert judge(run, _twin()).status("losses") == "different"
    assert judge(run, _twin(), tolerance=1e-5).status("losses") == "within tolerance"
    assert judge(run, _twin(), tolerance=1e-7).status("losses") == "different"
    nan = float("nan")
    assert (relative(nan, nan), relative(nan, 1.0), relative(2.0, 1.0)) == (0, float("inf"), 0.5)


def _steps(rank: int, process: str, first: int, last: int, begin_ns: int, names: str = "") -> list[StepReport]:
    """Returns steps of a rank with samples named by step and by the numbers in `names`, by default the rank."""
    return [
        StepReport(
            step, begin_ns + 10 * step, rank, process, None, tuple(f"{step}.{name}" for name in names or str(rank))
        )
        for step in range(first, last)
    ]


def test_ranks_that_are_gone_after_a_restart_do_not_count_twice() -> None:
    """Three ranks, then two: the steps of the third that were rolled back are void too."""
    run = [step for rank in range(3) for step in _steps(rank, f"{rank}a", 0, 4, rank)]
    run += [*_steps(0, "0b", 2, 6, 100, "02"), *_steps(1, "1b", 2, 6, 101)]
    twin = [step for rank in range(3) for step in _steps(rank, f"{rank}a", 0, 6, rank)]
    assert judge(JobReports(run), JobReports(twin)).status("samples") == "same"


def test_a_replica_that_returns_does_not_void_the_steps_of_those_that_stayed() -> None:
    run = [*_steps(0, "0a", 0, 8, 0), *_steps(1, "1a", 0, 3, 1), *_steps(1, "1b", 5, 8, -5)]
    twin = [*_steps(0, "0a", 0, 8, 0), *_steps(1, "1a", 0, 8, 1)]
    verdict = judge(JobReports(run), JobReports(twin))
    assert verdict.lost_samples == ("3.1", "4.1") and verdict.doubled_samples == ()
    assert verdict.parts[1].text == "steps 3, 4 lost by rank 1"
