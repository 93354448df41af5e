"""Scenarios for jobs of other launchers: mistakes have a place, and what cannot be struck is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.core.errors import UserError
from engine.core.faults.external import ExternalMoment, ExternalTarget
from engine.external.kinds import external_kinds
from engine.files.jobs.external_file import LoadedExternal, is_external, load_external
from engine.files.jobs.forms import external_schema
from engine.files.jobs.library import find_scenario, library
from engine.files.strict_yaml import read_text, read_yaml
from engine.runtime.faults.registry import kinds
from tests.looped import looped

HEAD = "version: 1\nname: mine\nabout: a test\nlauncher: torchrun\n"
TORCHRUN = ("torchrun", "--nproc-per-node", "2", "train.py")


def loaded(text: str, command: tuple[str, ...] = TORCHRUN) -> LoadedExternal:
    """Returns a scenario with the head above."""
    return load_external(Path("mine.yaml"), read_text(HEAD + text, "mine.yaml"), external_kinds(kinds()), command)


def test_a_fault_strikes_by_default_the_rank_that_reports_the_step() -> None:
    (fault,) = loaded("faults:\n  - {at: {step: 4, rank: 1}, do: terminate, grace: 2s}\n").scenario.faults
    assert (fault.moment, fault.target) == (ExternalMoment(step=4, rank=1), ExternalTarget(1))
    assert (fault.id, fault.do, fault.parameters) == ("fault-1", "terminate", {"grace_ns": 2 * 10**9})


@looped(
    ("text", "told"),
    [
        (
            "faults:\n  - {at: {step: 4, rank: 2}, do: kill}\n",
            "mine.yaml:6:26: faults.0.at.rank: expected a rank below 2, found 2 (the command starts 2)",
        ),
        (
            "faults:\n  - {at: {step: 4, after: 5s}, target: {rank: 0}, do: kill}\n",
            "mine.yaml:6:10: faults.0.at: expected one of step, progress, after, during, found step and after",
        ),
        (
            "faults:\n  - {at: {step: 4, rank: 0}, do: cut-link}\n",
            "mine.yaml:6:34: faults.0.do: expected one of kill, terminate, stop, pause, slow, disk-full, oom, cut, "
            "found 'cut-link' (cut destroys the TCP connections between two ranks)",
        ),
        (
            "faults:\n  - {at: {step: 4}, target: {rank: 0}, do: cut}\n",
            "mine.yaml:6:29: faults.0.target: expected two ranks such as ranks: [0, 1], found rank 0 "
            "(their connections are cut)",
        ),
        (
            "faults:\n  - {at: {step: 4, rank: 1}, target: {rank: 1}, do: disk-full, path: /small}\n",
            "mine.yaml:6:38: faults.0.target: expected no target, found rank 1 (a disk is full for all processes)",
        ),
        (
            "faults:\n  - {at: {step: 4, rank: 0}, do: pause}\n",
            "mine.yaml:6:5: faults.0.for: expected a duration such as 250ms, 5s or 2m, more than 0 and at most 24h, "
            "found nothing (pause needs it: how long it stands still)",
        ),
        (
            "faults:\n  - {at: {during: checkpoint}, target: {rank: 0}, do: kill}\n",
            "mine.yaml:1:1: checkpoint: expected a pattern of files such as out/*.pt, found nothing "
            "(fault-1 strikes while one of these files is written)",
        ),
        (
            "progress: {output: 'step'}\nfaults:\n  - {at: {step: 4, rank: 0}, do: kill}\n",
            "mine.yaml:5:20: progress.output: expected a regular expression with a group (?P<step>...), found 'step'",
        ),
    ],
)
def test_mistakes_are_told_with_their_place(text: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        loaded(text)
    assert str(error.value).splitlines() == [told]


def test_a_command_comes_from_the_file_or_the_command_line() -> None:
    text = "command: [torchrun, train.py]\nfaults:\n  - {at: {step: 4, rank: 0}, do: kill}\n"
    assert loaded(text, ()).needs_trust and not loaded(text).needs_trust
    assert loaded(text).scenario.command == TORCHRUN
    with pytest.raises(UserError, match="expected a command, found none"):
        loaded("faults:\n  - {at: {step: 4, rank: 0}, do: kill}\n", ())


@looped("path", sorted((library() / "external").glob("*.yaml")))
def test_the_shipped_scenarios_fit_a_job_of_two_ranks(path: Path) -> None:
    document = read_yaml(find_scenario(f"external/{path.stem}"))
    assert is_external(document)
    assert load_external(path, document, external_kinds(kinds()), TORCHRUN).scenario.name == path.stem


def test_the_schema_of_editors_knows_the_keys_and_no_others() -> None:
    schema = external_schema(external_kinds(kinds()))
    text = json.loads((library() / "external" / "scenario.schema.json").read_text())
    assert text == schema and schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("launchers:Wrong", "launchers:Wrong is not a bamboo.Launcher"),
        ("launchers:blind", r"its blame has no group (?P<pid>...)"),
        ("launchers:torn", "its title is not a regular expression: "),
        ("launchers:absent", "launchers:absent raises AttributeError: "),
        ("", "a package adds one by an entry point of the group bamboo.launchers"),
    ],
)
def test_a_launcher_of_a_package_that_cannot_be_used_says_why(
    value: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "from bamboo import Launcher as Wrong\nblind, torn = Wrong('a', blame='lost'), Wrong('a', title='(')\n"
    (tmp_path / "launchers.py").write_text(made)
    (tmp_path / "launchers-1.dist-info").mkdir()
    (tmp_path / "launchers-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: launchers\nVersion: 1\n")
    points = f"[bamboo.launchers]\nour-own = {value}\n" if value else ""
    (tmp_path / "launchers-1.dist-info/entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    document = read_text(
        HEAD.replace("torchrun", "our-own") + "faults:\n  - {at: {step: 4, rank: 1}, do: kill}\n", "m.yaml"
    )
    with pytest.raises(UserError) as error:
        load_external(Path("m.yaml"), document, external_kinds(kinds()), TORCHRUN)
    assert "m.yaml:4:11: launcher: expected one of any, torchft, torchrun, " in str(error.value)
    assert told in str(error.value)


def test_a_group_is_struck_alone() -> None:
    (fault,) = loaded("faults:\n  - {at: {step: 4, rank: 1}, target: {group: 2}, do: kill}\n").scenario.faults
    assert fault.target == ExternalTarget(group=2)
    with pytest.raises(UserError, match=r"faults.0.target: expected a group alone, found ranks with it"):
        loaded("faults:\n  - {at: {step: 4}, target: {group: 2, rank: 1}, do: kill}\n")
