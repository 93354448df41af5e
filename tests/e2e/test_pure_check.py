"""The purity check in real runs: the models that it refuses, the worker that finds it, and its switch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

Launch = Callable[..., Launcher]

LAYERS = "tests.runtime.impure_layers"
SMALL = ("--stages", "2", "--microbatches", "3", "--steps", "2", "--validate-every", "0")


def test_a_layer_that_counts_in_an_attribute_is_refused_by_its_name(launch: Launch) -> None:
    launcher = launch("run", "--model", f"{LAYERS}:counting", *SMALL)
    done = launcher.wait()
    assert done.code == 2
    assert "--model: expected layers that make the same bits again, found layer " in done.stderr
    assert "its output of microbatch 0 differs when its forward is redone; a forward changes calls (" in done.stderr
    assert "--no-check-pure" in done.stderr
    assert launcher.events("commit") == []
    assert launcher.leftovers() == []


def test_who_knows_better_trains_it(launch: Launch) -> None:
    launcher = launch("run", "--model", f"{LAYERS}:counting", *SMALL, "--no-check-pure")
    assert launcher.wait().code == 0
    assert launcher.events("pure_check") == []
    assert len(launcher.events("commit")) == 2


@pytest.mark.parametrize("how", [(), ("--pipelines", "2", "--redundancy", "none")], ids=["shadows", "pipelines"])
def test_a_layer_that_depends_on_its_process_is_found_by_another_one(launch: Launch, how: tuple[str, ...]) -> None:
    launcher = launch("run", "--model", f"{LAYERS}:of_process", *SMALL, *how)
    done = launcher.wait()
    assert done.code == 2
    assert " its output of microbatch 0 differs between worker " in done.stderr
    assert "(one)" in done.stderr or "(other)" in done.stderr
    assert "(last)" not in done.stderr
    assert launcher.events("commit") == []


def test_each_worker_says_how_long_the_check_took(launch: Launch) -> None:
    launcher = launch("run", "--stages", "3", "--steps", "1", "--validate-every", "0")
    assert launcher.wait().code == 0
    checks = launcher.events("pure_check")
    assert {event["worker"]: event["layers"] for event in checks} == {0: 4, 1: 4, 2: 4}
    assert all(event["ms"] > 0 and event["unchecked"] == [] for event in checks)
