"""Scenario files: every mistake is reported at its line and column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.core.errors import NothingMatchedError, UserError
from engine.core.faults.fault import After, Owner, Role
from engine.core.faults.scenario import Every, Expect, Limits, Target
from engine.files.jobs.forms import ACTIONS
from engine.files.jobs.library import find_scenario, library
from engine.files.jobs.scenario_file import LoadedScenario, load_scenario
from tests.core.scenario_cases import KINDS, at

WHOLE = """\
version: 1
name: kill-middle-stage
about: one sentence
job: {model: gpt, stages: 4, pipelines: 2, microbatches: 8, steps: 12, redundancy: eager, seed: 7}
faults:
  - id: first
    at: {step: 5, pipeline: 0, stage: 2, action: B, microbatch: 3, when: before}
    do: kill
  - after: {fault: first, phase: replay}
    target: {role: recoverer}
    do: stop
    for: 100ms
  - id: many
    every: {mtbf: 2.5 steps, count: 5}
    target: {role: random}
    do: kill
expect:
  outcome: recovered
  trajectory: identical
  steps_lost: 0
  samples: exactly-once
  culprit: exact
  leftovers: none
  recovery: {p95: 1s, max: 2m, phases: {detect: 50ms}}
"""
HEAD = "version: 1\nname: x\nabout: z\n"


def load(folder: Path, text: str, **more: Any) -> LoadedScenario:
    path = folder / "case.yaml"
    path.write_text(text)
    return load_scenario(str(path), KINDS, **more)


def problems(folder: Path, text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(folder, text)
    return [str(each).removeprefix(f"{folder}/") for each in caught.value.problems]


def fault(text: str) -> str:
    """Returns the text of a file with one fault, which begins in line 5, column 5."""
    return f"{HEAD}faults:\n  - {text}\n"


def test_a_whole_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, WHOLE)
    case = loaded.scenario
    assert (case.name, case.about) == ("kill-middle-stage", "one sentence")
    assert (case.job.stages, case.job.redundancy, case.job.lr) == (4, "eager", 2e-3)
    first, second, many = case.faults
    assert (first.id, first.trigger, first.target, first.do) == ("first", at(5, "2B3"), Target(), "kill")
    assert (second.id, second.trigger) == ("fault-2", After("first", "replay"))
    assert (second.target, second.parameters) == (Target(role="recoverer"), {"for_ns": 100_000_000})
    assert many.trigger == Every(2.5, 5)
    limits = Limits(10**9, 120 * 10**9, {"detect": 50_000_000})
    assert case.expect == Expect("recovered", "identical", 0, "exactly-once", "exact", "none", limits)
    assert loaded.seed == 7
    assert loaded.faults[0].victims == (Owner(0, 2),)
    assert loaded.faults[1].victims == (Role("recoverer"),)


def test_the_seed_and_the_job_may_be_others(tmp_path: Path) -> None:
    assert load(tmp_path, WHOLE, seed=1).faults != load(tmp_path, WHOLE).faults
    assert load(tmp_path, WHOLE, settings=["model=mlp"]).scenario.job.model == "mlp"
    with pytest.raises(UserError, match=r"--set stages=two: job.stages: expected a whole number, found"):
        load(tmp_path, WHOLE, settings=["stages=two"])


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    case = load(tmp_path, fault("{at: {step: 1, stage: 1}, do: terminate}")).scenario
    (only,) = case.faults
    assert (only.id, only.trigger) == ("fault-1", at(1, "1B4"))
    assert only.parameters == {"grace_ns": 60_000_000_000}
    assert case.expect == Expect()
    case = load(tmp_path, fault("{at: {step: 1, stage: 1, action: STEP, when: after}, do: kill}")).scenario
    assert case.faults[0].trigger == at(1, "1STEP", "after")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["case.yaml:1:1: expected a scenario, found an empty file"]),
        ("- 1\n", ["case.yaml:1:1: expected a mapping with version, name, about, job, faults, host_faults, expect, "]),
        (
            f"version: true\n{HEAD.partition('version: 1')[2].lstrip()}faults: []\n",
            [
                "case.yaml:1:10: version: expected 1, found true",
                "case.yaml:4:9: faults: expected a list of at least one",
            ],
        ),
        (
            "version: 2\nnmae: x\nabout: 5\nfaults: []\n",
            [
                "case.yaml:1:1: name: expected a value, found nothing (the scenario's name)",
                "case.yaml:1:10: version: expected 1, found 2",
                "case.yaml:2:1: nmae: expected a field that is known here, found 'nmae' (did you mean 'name'?)",
                "case.yaml:3:8: about: expected one sentence, found 5",
                "case.yaml:4:9: faults: expected a list of at least one, found an empty list",
            ],
        ),
        (
            f"{HEAD}job: {{stages: four, pipelnes: 2}}\nfaults: {{}}\n",
            [
                "case.yaml:4:15: job.stages: expected a whole number, found 'four'",
                "case.yaml:4:21: job.pipelnes: expected a field of the job (did you mean 'pipelines'?)",
                "case.yaml:5:9: faults: expected a list of at least one, found an empty mapping",
            ],
        ),
        (
            f"{HEAD}job: 3\nfaults:\n",
            [
                "case.yaml:4:6: job: expected a mapping of fields, or the path of a job file, found 3",
                "case.yaml:5:8: faults: ",
            ],
        ),
        (fault("kill"), ["case.yaml:5:5: faults.0: expected a mapping with id, at, after, every, target, do, "]),
        (
            fault("{do: kill}"),
            ["case.yaml:5:5: faults.0: expected one of at, after, every, found none of them"],
        ),
        (
            fault("{at: {step: 1, stage: 0}, every: {mtbf: 2 steps, count: 1}, do: kill}"),
            ["case.yaml:5:5: faults.0: expected one of at, after, every, found at and every"],
        ),
        (
            fault("{at: {step: yes, stage: 0}, do: kil}"),
            [
                "case.yaml:5:17: faults.0.at.step: expected a value that reads only one way, found 'yes'",
                "case.yaml:5:37: faults.0.do: expected one of kill, stop, terminate, exit, slow, gil, say, gpu-oom, "
                "cut, found 'kil' (did you mean 'kill'?)",
            ],
        ),
        (
            fault("{at: {stage: 0, action: Bee, when: befor}, do: kill}"),
            [
                "case.yaml:5:10: faults.0.at.step: expected a value, found nothing (the step, from 0)",
                f"case.yaml:5:29: faults.0.at.action: expected one of {', '.join(ACTIONS)}, found 'Bee'",
                "case.yaml:5:40: faults.0.at.when: expected one of before, during, after, found 'befor' "
                "(did you mean 'before'?)",
            ],
        ),
        (
            fault("{at: {step: 1, stage: 0, action: CHECKPOINT}, do: kill}"),
            ["case.yaml:5:17: faults.0.at.step: expected a step that is kept, found 1 (checkpoint_every is '10m')"],
        ),
        (
            fault("{at: {step: 1, stage: 0, action: LOG, microbatch: 1}, do: kill}"),
            [
                "case.yaml:5:43: faults.0.at.microbatch: expected no microbatch with LOG, found 1 "
                "(LOG concerns the whole stage)"
            ],
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: stop, for: 100, grace: 1s}"),
            [
                "case.yaml:5:46: faults.0.for: expected a duration such as 250ms, 5s or 2m, at most 24h, found 100",
                "case.yaml:5:51: faults.0.grace: expected a parameter of stop, found 'grace' (it has for)",
            ],
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: stop, kind: kill}"),
            ["case.yaml:5:41: faults.0.kind: expected a field that is known here, found 'kind' (did you mean 'do'?)"],
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: stop, moment: 3}"),
            [
                "case.yaml:5:41: faults.0.moment: expected a field that is known here, found 'moment' "
                "(there is id, at, after, every, target, do, for)"
            ],
        ),
        *(
            (
                f"{HEAD}job: {{stages: 2}}\nfaults:\n  - {{at: {{step: 1, stage: 0}}, do: cut{peer}}}\n",
                [f"case.yaml:6:{column}: faults.0.peer: expected a worker from 0 to 1, found {found}"],
            )
            for peer, column, found in (
                ("", 5, "nothing (cut needs it: the other end)"),
                (", peer: -1", 46, "-1"),
                (", peer: 2", 46, "2 (the job has 2)"),
            )
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: slow}"),
            [
                "case.yaml:5:5: faults.0.factor: expected a number > 0, at most 1000000, "
                "found nothing (slow needs it: how slow)"
            ],
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: gil, gil: hold}"),
            ["case.yaml:5:45: faults.0.gil: expected one of held, no, found 'hold' (did you mean 'held'?)"],
        ),
        (
            fault("{after: {fault: x}, do: kill}"),
            [
                "case.yaml:5:13: faults.0.after: expected phase or delay, found none of them",
                "case.yaml:5:21: faults.0.after.fault: expected the id of another fault, found 'x'",
            ],
        ),
        (
            fault("{every: {mtbf: 20, count: 0}, do: kill}"),
            [
                "case.yaml:5:20: faults.0.every.mtbf: expected a number of steps such as 20 steps, found 20",
                "case.yaml:5:31: faults.0.every.count: expected a whole number >= 1 and <= 1000, found 0",
            ],
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: stop}") + "expect:\n  outcome: noticed\n  steps_lost: 0\n",
            [
                "case.yaml:7:3: expect.notice: expected one of not-finite, replicas-differ with outcome noticed, "
                "found nothing (the wrong numbers that the run must notice; another error must not pass)",
            ],
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: stop}") + "expect:\n  outcome: noticed\n  notice: corrupt\n",
            ["case.yaml:8:11: expect.notice: expected one of not-finite, replicas-differ, found 'corrupt'"],
        ),
        (
            fault("{at: {step: 1, stage: 0}, do: kill}") + "expect:\n  outcome: recoverd\n  recovery: {p95: 1 s}\n",
            [
                "case.yaml:7:12: expect.outcome: expected one of recovered, resumable, state-lost, noticed, "
                "found 'recoverd' (did you mean 'recovered'?)",
                "case.yaml:8:19: expect.recovery.p95: expected a duration such as 250ms, 5s or 2m, found '1 s'",
            ],
        ),
        (
            fault("{at: {step: 1, stage: 9}, do: kill}"),
            ["case.yaml:5:27: faults.0.at.stage: expected a stage from 0 to 3, found 9 (the job has 4)"],
        ),
        (
            fault("{after: {fault: frst, delay: 1s}, do: kill}"),
            ["case.yaml:5:21: faults.0.after.fault: expected the id of another fault, found 'frst' (there is no"],
        ),
        (
            fault("{at: {step: 1, stage: 0}, target: {count: 3, adjacent: false}, do: kill}"),
            ["case.yaml:5:47: faults.0.target.count: expected a grid with room for 3 victims that are not adjacent"],
        ),
        (
            fault("{every: {mtbf: 999999 steps, count: 1}, do: kill}"),
            ["case.yaml:5:13: faults.0.every: expected a fault in the 80 steps of the job, found none"],
        ),
        (f"{HEAD}faults:\n  - *x\n", ["case.yaml:5:5: faults.0: expected no alias, found '*x' (write the value out)"]),
    ],
)
def test_every_mistake_is_told_at_its_place(tmp_path: Path, text: str, expected: list[str]) -> None:
    found = problems(tmp_path, text)
    assert len(found) == len(expected), found
    for one, other in zip(found, expected, strict=True):
        assert one.startswith(other), one


def test_a_path_is_a_path_and_a_bare_name_is_of_the_library(tmp_path: Path) -> None:
    assert find_scenario("x.yaml") == Path("x.yaml")
    assert find_scenario(f"{tmp_path}/x") == tmp_path / "x"
    assert find_scenario("kill-middle-stage") == library() / "kill-middle-stage.yaml"
    with pytest.raises(NothingMatchedError, match="did you mean 'kill-middle-stage'"):
        find_scenario("kill-midle-stage")
    with pytest.raises(UserError, match=r"x.yaml: expected a file that can be read"):
        load_scenario(f"{tmp_path}/x.yaml", KINDS)


def test_all_layers_of_mistakes_come_out_at_once(tmp_path: Path) -> None:
    """Bad fields and conflicts between good fields are reported; problems that only follow from a bad field are not."""
    faults = """faults:
  - {id: a, at: {step: 1, stage: 9}, do: kil}
  - {id: a, at: {step: 99, stage: 1, action: B, microbatch: -1}, do: kill}
  - {id: a, at: {step: 99, stage: 1}, target: {stage: x, worker: 0}, do: kill}
  - {after: {fault: b, phase: plan}, do: kill}
  - {id: c, after: {fault: c, phase: plan}, do: kill, grace: 1s}
expect: {recovery: {max: 1s}, outcome: state-lost, steps_lost: none}
"""
    found = [each.split(" ")[1].rstrip(":") for each in problems(tmp_path, HEAD + faults)]
    assert found == [
        "faults.0.at.stage",
        "faults.0.do",
        "faults.1.at.microbatch",
        "faults.2.id",
        "faults.2.at.step",
        "faults.2.target.stage",
        "faults.4.after.fault",
        "faults.4.grace",
        "expect.recovery",
        "expect.steps_lost",
    ]
    # Without a valid job the stages and steps are unknown.
    found = problems(tmp_path, HEAD + "job: {stages: 0}\n" + faults)
    assert not [each for each in found if "faults.0.at" in each or "faults.2.at" in each]
    assert [each for each in found if "job.stages" in each]


def test_a_matrix_is_no_scenario(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"expected a scenario, found a matrix \(run it with: bamboo matrix /"):
        load_scenario(str(library() / "matrix-smoke.yaml"), KINDS)
    with pytest.raises(NothingMatchedError, match=r"'matrix-smoke' \(it is a matrix: bamboo matrix matrix-smoke\)"):
        find_scenario("matrix-smoke")
    with pytest.raises(NothingMatchedError) as caught:
        find_scenario("zzz")
    assert "matrix-" not in str(caught.value)
