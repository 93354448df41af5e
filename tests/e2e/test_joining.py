"""Workers join a running job as its users see it: the same weights, nothing done twice, and each has its own words."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.action import COMPUTE_OPS, parse_action
from engine.core.errors import ExitCode
from engine.core.texts import numbered
from engine.runtime.agent.requests import CLOSED
from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

Launch = Callable[..., Launcher]
MLP = (
    "--set",
    "model=mlp",
    "--set",
    "model_args.width=16",
    "--set",
    "model_args.depth=11",
    "--set",
    "validate_every=0",
)
# Long steps with little work: workers need seconds to start.
TIMED = (
    "--set",
    "model=timed",
    *(f"--set=model_args.{each}" for each in ("layers=12", "forward_ms=4", "backward_ms=4")),
    "--set=microbatches=2",
)


def joined(launch: Launch, run: Launcher, *words: str) -> Launcher:
    return launch("agent", "--join", "latest", "--results", str(run.folder / "results"), "--json", *words)


def told(command: Launcher, event: str) -> list[dict[str, Any]]:
    lines = (command.folder / "stdout").read_text().split("\n")[:-1]  # without one that is half written
    return [each for each in map(json.loads, lines) if each["event"] == event]


def owns(run: Launcher, worker: int) -> bool:
    return worker in run.events("epoch")[-1]["owners"]


def grown_back(launch: Launch, *words: str, **environment: str) -> tuple[Launcher, list[Launcher]]:
    """Runs two pipelines of two workers: four, three, two, then four again; returns the run and the two that joined."""
    grid = ("--pipelines", "2", "--stages", "2", "--blocks", "3", "--elastic", "--steps", "80", "--kill", "3:0")
    run = launch("run", *words, *grid, "--kill", "8:4:F:1@1", "--json", **environment)
    run.wait_until(lambda: len(run.events("epoch")) > 1 and len(run.events("epoch")[-1]["members"]) == 2)
    commands = [joined(launch, run), joined(launch, run, "--standby")]
    run.wait_until(lambda: all(owns(run, worker) for worker in (4, 5)))
    done = run.wait(120)
    assert done.code == 0, done.stderr
    (comparison,) = run.events("comparison")
    assert (comparison["difference"], comparison["compared"]) == (None, 80)
    assert [command.wait(20).code for command in commands] == [0, 0]
    return run, commands


def test_a_worker_joins_without_a_failure_owns_blocks_and_leaves_at_ctrl_c(launch: Launch) -> None:
    run = launch("run", *MLP, "--stages", "3", "--blocks", "4", "--elastic", "--steps", "2000", "--json")
    run.wait_until(lambda: run.events("commit"))
    command = joined(launch, run)
    run.wait_until(lambda: told(command, "owns"))
    command.interrupt(signal.SIGINT)
    done = command.wait(60)
    assert done.code == 0, done.stderr
    assert [each["event"] for each in map(json.loads, done.stdout.splitlines())] == [
        *("started", "waits", "member", "owns", "leaves", "owns", "ended")
    ]
    first = told(command, "owns")[0]
    assert f"owns {numbered('block', first['slots'])}, after" in first["text"]
    (ended,) = told(command, "ended")
    assert (ended["worker"], ended["code"]) == (3, ExitCode.LEFT_WITH_NOTICE)
    run.interrupt(signal.SIGTERM)
    run.wait(60)
    epochs = run.events("epoch")
    assert all(each["planned"] for each in epochs[1:]), "no verdict, and no group was formed while workers waited"
    actions = [(each, parse_action(each["action"])) for each in run.events("action")]
    last = max(each["step"] for each in run.events("commit"))
    counts = Counter(
        (each["step"], each["action"]) for each, action in actions if action.op in COMPUTE_OPS and each["step"] <= last
    )
    assert set(counts.values()) == {1}, "no work was done again"
    assert any(each["worker"] == 3 for each, action in actions if action.op in COMPUTE_OPS)


@pytest.mark.soak
def test_a_job_shrinks_by_kills_and_grows_back_and_its_weights_are_those_of_its_twin(launch: Launch) -> None:
    run, commands = grown_back(launch, *TIMED)
    assert [told(command, "run ended")[0]["outcome"] for command in commands] == ["finished", "finished"]
    assert {told(command, "started")[0]["worker"] for command in commands} == {4, 5}
    last = run.events("epoch")[-1]
    assert len(last["members"]) == 4
    assert {4, 5} <= {*last["owners"]}


@pytest.mark.soak
def test_a_worker_that_joins_reads_a_stream_from_its_beginning_and_takes_over(launch: Launch) -> None:
    """Each worker of the first stage at the start is killed, so the one that joined reads the rest of the stream."""
    words = ("--stages", "2", "--blocks", "3", "--elastic", "--steps", "120", "--kill", "90:0", "--kill", "95:1")
    stream = ("--set=data=tests.e2e.stream_models:Vectors", "--set=validate_every=0", "--set=checkpoint_every=20")
    run = launch("run", *TIMED, *stream, *words, "--json")
    run.wait_until(lambda: run.events("commit"))
    command = joined(launch, run)
    done = run.wait(120)
    assert done.code == 0, done.stderr
    (comparison,) = run.events("comparison")
    assert (comparison["difference"], comparison["compared"]) == (None, 120)
    assert run.events("epoch")[-1]["members"] == [2]
    assert command.wait(20).code == 0


@pytest.mark.soak
def test_as_many_workers_as_a_pipeline_has_take_a_share_of_both_pipelines(launch: Launch) -> None:
    """Two pipelines of two stages get four workers more, and each owns one of eight blocks; the bits are the twin's."""
    grid = ("--pipelines", "2", "--stages", "2", "--max-workers", "8", "--steps", "120", "--kill", "118:0")
    run = launch("run", *TIMED, *grid, "--json")
    run.wait_until(lambda: run.events("commit"))
    commands = [joined(launch, run) for _ in range(4)]
    run.wait_until(lambda: {*run.events("epoch")[-1]["owners"]} == {*range(8)})
    owners = run.events("epoch")[-1]["owners"]
    assert all({*owners[first : first + 4]} & {4, 5, 6, 7} for first in (0, 4)), owners
    done = run.wait(200)
    assert done.code == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["twin"]["difference"], said["blocks"]) == (None, 2)
    assert said["why_blocks"].startswith("a step of 8 workers takes ")
    assert "blocks: 2 per stage, because a step of 8 workers takes " in done.stderr
    assert [command.wait(20).code for command in commands] == [0] * 4


def test_a_worker_beyond_the_most_waits_until_another_one_leaves(launch: Launch) -> None:
    run = launch("run", *TIMED, "--stages", "2", "--max-workers", "3", "--steps", "100000")
    run.wait_until(lambda: run.events("commit"))
    third = joined(launch, run)
    run.wait_until(lambda: owns(run, 2))
    fourth = joined(launch, run)
    run.wait_until(lambda: told(fourth, "waits"))
    (waits,) = told(fourth, "waits")
    assert waits["text"].endswith(" is waiting, because the run has 3 workers (--max-workers)")
    committed = len(run.events("commit"))
    run.wait_until(lambda: len(run.events("commit")) > committed + 10)
    assert run.events("epoch")[-1]["members"] == [0, 1, 2]
    third.interrupt(signal.SIGINT)
    assert third.wait(60).code == 0
    run.wait_until(lambda: owns(run, 3))
    assert run.events("epoch")[-1]["members"] == [0, 1, 3]
    run.interrupt(signal.SIGTERM)
    run.wait(60)


def test_a_worker_that_gets_no_stage_is_told_why(launch: Launch) -> None:
    run = launch("run", *TIMED, "--stages", "2", "--blocks", "1", "--elastic", "--steps", "100000")
    run.wait_until(lambda: run.events("commit"))
    command = joined(launch, run)
    run.wait_until(lambda: told(command, "idle"))
    why = "worker 2 owns no stage: 2 stages for 3 workers; start with --max-workers 3, or resume with it"
    assert [each["text"] for each in told(command, "idle")] == [why]
    status = launch("status", "latest", "--results", str(run.folder / "results")).wait(60)
    assert why in " ".join(status.stdout.split())
    run.interrupt(signal.SIGTERM)
    run.wait(60)


def test_a_run_that_takes_no_workers_or_has_ended_refuses(launch: Launch) -> None:
    run = launch("run", *MLP, "--stages", "2", "--steps", "100000", "--no-elastic")
    run.wait_until(lambda: run.events("commit"))
    refused = joined(launch, run).wait()
    assert refused.code == ExitCode.USAGE
    text = " ".join(refused.stderr.replace("\u2502", " ").split())
    assert CLOSED in text
    assert "start it with --elastic" in text
    run.interrupt(signal.SIGTERM)
    run.wait(60)
    assert joined(launch, run).wait().code == ExitCode.NOTHING_MATCHED


def test_a_worker_joins_a_run_that_was_started_without_a_flag_and_gets_a_stage_back(launch: Launch) -> None:
    """A death leaves two stages on one worker, and the joiner takes one: microbatches enough make that worth it."""
    job = ("--stages", "3", "--steps", "120", "--microbatches", "6", "--validate-every", "0")
    quick = (f"--set=model_args.{each}_ms=1" for each in ("forward", "backward"))
    run = launch("run", *job, *TIMED, *quick, "--kill", "3:1", "--json")
    run.wait_until(lambda: len(run.events("epoch")) > 1)
    assert sorted(run.events("epoch")[-1]["members"]) == [0, 2]
    command = joined(launch, run)
    run.wait_until(lambda: owns(run, 3))
    assert sorted(run.events("epoch")[-1]["owners"]) == [0, 2, 3], "each has one stage"
    done = run.wait(200)
    said = json.loads(done.stdout)
    assert (done.code, said["twin"]["difference"], said["blocks"]) == (0, None, 1), done.stderr
    assert command.wait().code == 0
