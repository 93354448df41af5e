"""Reads scenarios for jobs of other launchers; all mistakes of a file are reported together, at line and column."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from engine.core.errors import Problem, nearest
from engine.core.faults.external import (
    ExternalExpect,
    ExternalFault,
    ExternalMoment,
    ExternalProgress,
    ExternalScenario,
    ExternalTarget,
    external_problems,
    refused_kind,
)
from engine.core.faults.fault import FaultKind
from engine.core.faults.launchers import ANY, LAUNCHERS, LAUNCHERS_GROUP, PLAIN, Launcher, launcher_of
from engine.core.faults.scenario import Limits
from engine.core.texts import TRUST_FLAG, pattern_error
from engine.files.jobs.forms import EXTERNAL, Reading, external_fault_form, in_order
from engine.files.strict_yaml import Document

OWN_KEYS = frozenset({"command", "launcher"})  # a scenario with one of them is for a job of another launcher
_DEFAULT_TIMEOUT = ExternalScenario("", "", (), PLAIN, ()).timeout_ns


@dataclass(frozen=True, slots=True)
class LoadedExternal:
    """A scenario with its file; `trusts_file` is false if a run needs the user's word for the command in it."""

    path: Path
    scenario: ExternalScenario
    document: Document
    needs_trust: bool


def is_external(document: Document) -> bool:
    """Returns whether a document is a scenario for a job of another launcher."""
    return any(path[0] in OWN_KEYS for path in document.key_places if len(path) == 1)


def load_external(
    path: Path,
    document: Document,
    kinds: Mapping[str, FaultKind],
    command: Sequence[str] = (),
    *,
    is_attached: bool = False,
    is_run: bool = True,
) -> LoadedExternal:
    """Returns the scenario of a document for a command, which replaces its own, and may lack unless `is_run`.

    `is_attached`: the job runs already. Raises UserError with every problem found.
    """
    reading = Reading(document, list(document.problems))
    if document.value is None and not document.problems:
        reading.refuse((), "a scenario", "an empty file")
    values = (None if document.value is None else reading.check(EXTERNAL, (), document.value)) or {}
    faults = [_fault(reading, *each, kinds) for each in enumerate(values.get("faults", ()))]
    own = tuple(values.get("command", ()))
    words = tuple(command) or own
    if is_run and not (words or is_attached or reading.problems):
        reading.refuse(("command",), "a command", "none", "such as: bamboo inject SCENARIO -- torchrun train.py")
    launcher = _launcher(reading, values.get("launcher", ANY), words)
    scenario = ExternalScenario(
        values.get("name", ""),
        values.get("about", "").strip(),
        words,
        launcher,
        tuple(fault for fault in faults if fault is not None),
        _expect(values.get("expect", {})),
        ExternalProgress(**values.get("progress", {})),
        values.get("steps"),
        values.get("checkpoint", ""),
        values.get("timeout", _DEFAULT_TIMEOUT),
    )
    if not reading.problems:
        num_ranks = None if is_attached else launcher.starts(words)
        problems = external_problems(scenario, num_ranks, is_attached=is_attached)
        reading.problems += [reading.located(each) for each in problems]
    if reading.problems:
        raise in_order(reading.problems)
    return LoadedExternal(path, scenario, document, bool(own and not command and not is_attached))


def _launcher(reading: Reading, name: str, words: Sequence[str]) -> Launcher:
    """Returns a known launcher, or that of an installed package, whose code runs for its name only."""
    if name == ANY or name in LAUNCHERS:
        return LAUNCHERS.get(name) or launcher_of(words)
    hint = ""
    for point in entry_points(group=LAUNCHERS_GROUP, name=name):
        try:
            launcher = point.load()
        except Exception as error:  # of the user's package
            hint = f"{point.value} raises {type(error).__name__}: {error}"
            continue
        hint = _wrong_pattern(launcher) if isinstance(launcher, Launcher) else f"{point.value} is not a bamboo.Launcher"
        if not hint:
            return replace(launcher, name=name)
    names = [ANY, *LAUNCHERS, *sorted(entry_points(group=LAUNCHERS_GROUP).names)]
    hint = hint or nearest(name, names) or f"a package adds one by an entry point of the group {LAUNCHERS_GROUP}"
    reading.refuse(("launcher",), f"one of {', '.join(names)}", repr(name), hint)
    return PLAIN


def _wrong_pattern(launcher: Launcher) -> str:
    """Returns which pattern of a user's launcher cannot be searched, and why; empty if all can."""
    groups = {"blame": {"rank", "ranks", "local_rank", "pid"}, "progress": {"step"}}
    for name in ("title", "num_ranks", "several_hosts", "blame", "notice", "progress"):
        pattern = getattr(launcher, name)
        if wrong := pattern_error(pattern):
            return f"its {name} is not a regular expression: {wrong}"
        if pattern and name in groups and not groups[name] & re.compile(pattern).groupindex.keys():
            return f"its {name} has no group (?P<{min(groups[name], key=len)}>...)"
    return ""


def trust_problem(loaded: LoadedExternal) -> Problem:
    """Returns the problem of a command that a file names."""
    hint = f"pass {TRUST_FLAG}, or the command after --"
    return Problem("command", "a command that you trust", " ".join(loaded.scenario.command), hint, str(loaded.path))


def _fault(reading: Reading, number: int, value: Any, kinds: Mapping[str, FaultKind]) -> ExternalFault | None:
    path = ("faults", number)
    do = value.get("do") if isinstance(value, dict) else None
    if isinstance(do, str) and do not in kinds:
        reading.refuse((*path, "do"), f"one of {', '.join(kinds)}", repr(do), refused_kind(do))
        return None
    form = external_fault_form(do if isinstance(do, str) else "", tuple(kinds.values()))
    there = len(reading.problems)
    values = reading.check(form, path, value)
    if values is None or len(reading.problems) > there:
        return None
    at, target = values["at"], values.get("target", {})
    moment = ExternalMoment(
        at.get("step"), at.get("rank"), at.get("progress"), at.get("after"), at.get("during"), at.get("delay", 0)
    )
    default = None if {"ranks", "group", "launcher"} & target.keys() or do == "disk-full" else moment.rank
    whom = ExternalTarget(
        target.get("rank", default),
        tuple(target.get("ranks", ())),
        target.get("group"),
        target.get("launcher", False),
        target.get("child"),
    )
    parameters = {each.key: values[each.name] for each in kinds[str(do)].parameters if each.name in values}
    return ExternalFault(values.get("id", f"fault-{number + 1}"), moment, whom, str(do), parameters)


def _expect(values: Mapping[str, Any]) -> ExternalExpect:
    limits = values.get("recovery")
    recovery = None if limits is None else Limits(limits.get("p95"), limits.get("max"), limits.get("phases", {}))
    others = {name: value for name, value in values.items() if name != "recovery"}
    return ExternalExpect(**others, recovery=recovery)
