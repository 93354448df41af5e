"""`bamboo schedule use` as its users see it: another placement and back in a run that loses a worker; refusals."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from engine.core.errors import ExitCode
from tests.e2e.launcher import Done, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

Launch = Callable[..., Launcher]


def used(launch: Launch, run: Launcher, name: str) -> Done:
    return launch("schedule", "use", name, "--results", str(run.folder / "results"), "--json").wait(60)


def test_a_run_uses_other_schedules_loses_a_worker_and_has_the_bits_of_its_twin(launch: Launch) -> None:
    # Long steps: a command takes a second or two, and comes before the kill.
    timed = (f"--set=model_args.{each}" for each in ("layers=8", "forward_ms=12", "backward_ms=12"))
    shape = ("--stages", "4", "--stages-per-worker", "2", "--schedule", "interleaved", "--steps", "16")
    run = launch(
        "run",
        "--set=model=timed",
        *timed,
        *shape,
        "--set=validate_every=0",
        "--no-check-pure",
        "--kill",
        "7:1:F:1",
        "--json",
    )
    run.wait_until(lambda: run.events("commit"))
    there = used(launch, run, "zbv")
    assert there.code == 0, there.stderr
    step = json.loads(there.stdout)["step"]
    refused = [used(launch, run, name) for name in ("zbv", "1f1b")]
    assert [each.code for each in refused] == [ExitCode.USAGE] * 2
    assert "in use" in refused[0].stderr
    assert "own, interleaved" in refused[1].stderr
    run.wait_until(lambda: any(each["verdict"] for each in run.events("epoch")))
    back = used(launch, run, "own")
    assert back.code == 0, back.stderr
    done = run.wait(120)
    assert done.code == 0, done.stderr
    (comparison,) = run.events("comparison")
    assert (comparison["difference"], comparison["compared"]) == (None, 16)
    epochs = run.events("epoch")
    assert [each.get("schedule", "") for each in epochs if each["verdict"]] == ["zbv"]
    assert f"schedule zbv from step {step} on (asked for by the user)" in epochs[1]["reason"]
    assert epochs[-1].get("schedule", "") == ""
    assert used(launch, run, "zbv").code == ExitCode.NOTHING_MATCHED


@pytest.mark.soak
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_run_hides_a_link_that_slows(launch: Launch, blocks: int) -> None:
    """With blocks the run is elastic, and loses its first worker after the change."""
    lost = "  - {id: lost, at: {step: 38, stage: 0, action: F, microbatch: 1}, do: kill}" if blocks > 1 else ""
    scenario = f"""
version: 1
name: slow-edge
about: another schedule hides a link that slows
job: {{model: timed, model_args: {{layers: {4 * blocks}, forward_ms: {6 / blocks:g}, backward_ms: {6 / blocks:g}}},
      microbatches: 16, steps: 50, validate_every: 0, blocks: {blocks}, elastic: {str(blocks > 1).lower()}}}
faults:
  - {{id: usual, at: {{step: 1, stage: {3 * blocks - 1}, action: F, microbatch: 1}}, do: delay-link, peer: 3, by: 4ms}}
  - {{id: late, at: {{step: 6, stage: {3 * blocks - 1}, action: F, microbatch: 1}}, do: delay-link, peer: 3, by: 20ms}}
{lost}
expect: {{outcome: recovered, trajectory: identical}}
"""
    run = launch("--version")
    run.wait()
    path = run.folder / "slow-edge.yaml"
    path.write_text(scenario)
    run = launch("inject", str(path), "--set", "adapt_schedule=7", "--results", str(run.folder / "runs"), "--json")
    done = run.wait(200)
    assert done.code == 0, done.stderr
    assert "by the measured times a step takes" in done.stderr
