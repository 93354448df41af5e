"""The registry of kinds of faults: complete, light to load, and one place per kind."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from engine.core.errors import InvariantError
from engine.core.faults.fault import HOST_KINDS, ActsOn, ParameterForm, Parameters, Sign, at_once
from engine.runtime.faults import registry
from engine.runtime.faults.registry import WorkerFaultContext, fault_kind
from engine.runtime.faults.registry import worker_kinds as kinds
from tests.looped import looped

_PROCESS = ("kill", "terminate", "stop", "exit", "raise", "abort", "segfault", "oom", "slow", "hang", "nan", "flip-bit")
KINDS: dict[str, ActsOn] = {
    **dict.fromkeys((*_PROCESS, "noop", "cut-link"), "process"),
    **dict.fromkeys(("delay-link", "stall-link", "reset-link"), "frames"),
    **dict.fromkeys(("disk-full", "disk-error", "damage"), "checkpoints"),
    **dict.fromkeys(("gpu-error", "gpu-sticky", "gpu-hang", "gpu-oom"), "GPU"),
}


def test_every_kind_says_what_it_is() -> None:
    assert {name: kind.acts_on for name, kind in kinds().items()} == KINDS
    for name, kind in kinds().items():
        assert name == kind.name
        assert kind.about.endswith(".")
        for parameter in kind.parameters:
            assert parameter.form in get_args(ParameterForm)
            assert bool(parameter.choices) == (parameter.form == "choice")
            assert parameter.default is None or parameter.default in (parameter.choices or (parameter.default,))


@pytest.mark.parametrize(
    ("kind", "name"), [("delay-link", "by"), *((f"{each}-link", "for") for each in ("delay", "stall", "cut"))]
)
def test_a_fault_of_a_link_that_lasts_no_time_is_refused(kind: str, name: str) -> None:
    """A frame that is no later than without the fault would count as struck."""
    (parameter,) = [each for each in kinds()[kind].parameters if each.name == name]
    assert [parameter.read(text) for text in ("0s", "0ms", "1ms")] == [None, None, 1_000_000]
    assert "more than 0" in parameter.expected


def test_the_agent_strikes_from_outside_only() -> None:
    assert {name for name, kind in kinds().items() if kind.by == "agent"} == {"kill", "terminate", "stop"}


def test_the_kinds_are_known_without_torch() -> None:
    code = "import sys; from engine.runtime.faults.registry import kinds; print(len(kinds()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(len(KINDS) + len(HOST_KINDS)), "False"]


def test_a_kind_is_added_in_one_place_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_KINDS", {})

    @fault_kind("tickle", "Nobody ends of it.", "worker", at_once)
    def tickle(context: WorkerFaultContext) -> None:
        """Does nothing."""

    assert registry._KINDS["tickle"].strike is tickle
    with pytest.raises(InvariantError, match="two kinds of fault are called 'tickle'"):
        fault_kind("tickle", "Again.", "worker", at_once)(tickle)


@looped(
    ("name", "sign", "value", "parameters", "shown"),
    [
        ("kill", "exit", -9, {}, True),
        ("kill", "exit", 0, {}, False),
        ("terminate", "notice", "5 s", {}, True),
        ("terminate", "suffered", "x", {}, False),
        ("stop", "state", "T", {}, True),
        ("stop", "state", "S", {}, False),
        ("exit", "exit", 0, {"code": 0}, True),
        ("exit", "exit", 3, {"code": 0}, False),
        ("exit", "exit", 1, {"code": 257}, True),
        ("raise", "raised", "RuntimeError: x", {}, True),
        ("raise", "exit", 3, {}, False),
        ("abort", "exit", -6, {}, True),
        ("segfault", "exit", -9, {}, False),
        ("oom", "exit", -9, {}, True),
        ("oom", "exit", 0, {}, False),
        ("gpu-sticky", "exit", 87, {}, True),
        ("gpu-sticky", "exit", 3, {}, False),
        ("gpu-hang", "suffered", "x", {}, True),
        ("nan", "suffered", "x", {}, True),
        ("nan", "exit", 1, {}, False),
    ],
)
def test_signs_confirm_what_they_show(
    name: str, sign: Sign, value: object, parameters: Parameters, shown: bool
) -> None:
    assert kinds()[name].shows(sign, value, parameters) is shown
