"""Joins for long: no step waits for a joiner, eight workers become four and eight again, fifty leave for others."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import psutil
import pytest

from engine.core.errors import ExitCode
from tests.e2e.launcher import Launcher
from tests.e2e.test_joining import MLP, joined, told

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(3600)]

Launch = Callable[..., Launcher]
SLOW = (
    "--set",
    "model=timed",
    *(f"--set=model_args.{each}" for each in ("layers=12", "forward_ms=2", "backward_ms=4")),
)
JOINS, DEPARTURES = 9, 50
MOST_FACTOR, MOST_MORE_S = 1.05, 0.03
AROUND = range(-4, 4)  # the steps around a join, from the request on; 0 is the first with the joiner
BEFORE = 12


def steps_s(run: Launcher) -> dict[int, float]:
    """Returns the seconds from the commit before to the commit of each step."""
    commits = run.events("commit")
    return {later["step"]: (later["at_ns"] - each["at_ns"]) / 1e9 for each, later in pairwise(commits)}


def until_owns(run: Launcher, command: Launcher) -> None:
    run.wait_until(lambda: told(command, "owns"), 200)


def until_step(run: Launcher, step: int) -> None:
    run.wait_until(lambda: run.events("commit")[-1]["step"] >= step, 200)


def leave(run: Launcher, command: Launcher) -> None:
    command.interrupt(signal.SIGINT)
    assert command.wait(120).code == 0
    run.wait_until(lambda: any(each["code"] == ExitCode.LEFT_WITH_NOTICE for each in told(command, "ended")))


def test_no_step_is_longer_because_a_worker_joins(launch: Launch) -> None:
    """Each step around the join, from the request to the step in which the joiner owns: its median over all joins.

    Any busy machine makes some steps longer, so one join proves nothing.
    """
    run = launch("run", *SLOW, "--stages", "3", "--blocks", "4", "--elastic", "--steps", "100000")
    run.wait_until(lambda: len(run.events("commit")) > 2 * BEFORE)
    joins: list[int] = []  # the first step of each epoch with a joiner
    for _ in range(JOINS):
        command = joined(launch, run)
        until_owns(run, command)
        joins.append(told(command, "member")[0]["step"] + 1)
        leave(run, command)
        until_step(run, run.events("commit")[-1]["step"] + 2 * BEFORE)
    run.interrupt(signal.SIGTERM)
    run.wait(60)
    taken = steps_s(run)
    usual = {first: median(taken[step] for step in range(first - BEFORE, first + AROUND[0])) for first in joins}
    more_s = {place: median(taken[first + place] - MOST_FACTOR * usual[first] for first in joins) for place in AROUND}
    told_ms = {place: round(seconds * 1e3) for place, seconds in more_s.items()}
    print(f"usual step {median(usual.values()) * 1e3:.0f} ms; beyond {MOST_FACTOR} times it, by step: {told_ms}")
    assert max(more_s.values()) <= MOST_MORE_S, more_s


def test_eight_workers_become_four_and_eight_again(launch: Launch) -> None:
    """Two pipelines of four over twelve layers: 8, 7, 6, 5, 4 by kills, then back by joins, one after the other."""
    kills = ("--kill", "3:4:F:2@1", "--kill", "8:0:B:1@0", "--kill", "13:7:F:2@0", "--kill", "18:10:F:2@1")
    grid = ("--pipelines", "2", "--stages", "4", "--blocks", "3", "--elastic", "--steps", "600", *kills)
    run = launch("run", *MLP, *grid, "--set", "model_args.dropout=0.1")
    run.wait_until(lambda: run.events("epoch") and len(run.events("epoch")[-1]["members"]) == 4)
    commands = []
    for _ in range(4):
        commands.append(joined(launch, run))
        until_owns(run, commands[-1])
    done = run.wait(600)
    assert done.code == 0, done.stderr
    (comparison,) = run.events("comparison")
    assert (comparison["difference"], comparison["compared"]) == (None, 600)
    sizes = [len(each["members"]) for each in run.events("epoch")]
    assert [size for size, after in pairwise([*sizes, 0]) if size != after] == [8, 7, 6, 5, 4, 5, 6, 7, 8]
    assert len({*run.events("epoch")[-1]["owners"]}) == 8
    assert all(command.wait(60).code == 0 for command in commands)


def held(run: Launcher) -> dict[str, dict[str, float]]:
    """Returns threads, descriptors and memory of the launcher and of the workers that were there from the start."""
    found: dict[str, dict[str, float]] = {}
    for name, pid in run.processes().items():
        if name in ("launcher", "bamboo-0", "bamboo-1"):
            process = psutil.Process(pid)
            memory: Any = process.memory_full_info()
            found[name] = {"threads": process.num_threads(), "descriptors": process.num_fds(), "bytes": memory.uss}
    return found


def test_fifty_workers_leave_and_are_replaced(launch: Launch) -> None:
    """Each departure is followed by a join; what the others hold stays as it was after the first ten."""
    run = launch("run", *MLP, "--stages", "3", "--blocks", "4", "--elastic", "--steps", "100000")
    run.wait_until(lambda: run.events("commit"))
    before: dict[str, dict[str, float]] = {}
    command = joined(launch, run)
    for number in range(DEPARTURES):
        until_owns(run, command)
        if number == 10:
            before = held(run)
        leave(run, command)
        command = joined(launch, run)
    until_owns(run, command)
    after = held(run)
    print("before:", before, "after:", after)
    numbers = [each["of"] for each in run.events("added")]
    assert numbers == list(range(3, 4 + DEPARTURES)), "no number is used twice"
    assert not [each for each in run.events("epoch")[1:] if not each["planned"]], "no verdict"
    run.interrupt(signal.SIGTERM)
    run.wait(60)
    for name, each in before.items():
        assert after[name]["threads"] <= each["threads"] + 1, (name, before, after)
        assert after[name]["descriptors"] <= each["descriptors"] + 2, (name, before, after)
        assert after[name]["bytes"] <= each["bytes"] * 1.05, (name, before, after)
