"""A case: a run to make, of a scenario file or of options; its folder's name, and the facts that stay in the folder.

Rule: a run folder has all that is needed to run the case again.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.agent.notice_answer import NoticeFrom
from engine.core.checkpoints.resumption import Resumption
from engine.core.config.job import Job
from engine.core.faults.fault import Fault, to_plain
from engine.core.faults.scenario import Scenario
from engine.core.history.run_records import ScenarioRecord

if TYPE_CHECKING:
    from engine.files.scenarios.scenario_file import Loaded

_MOST_OF_NAME = 1_000  # characters of a text that are looked at for a folder's name


@dataclass(frozen=True, slots=True)
class Case:
    """A run to make: a scenario and its concrete faults.

    `name` is a part of the folder's name, `origins` has the source of each value of the job, `file` is the scenario
    file, `injectable`: the run takes the faults of `bamboo inject --run`, `standby_coordinator`: a second coordinator
    waits. It begins after the checkpoint `origin`. The given weights must have the hash `init`, if it is not empty.
    `notices` are asked for. `run_id` is the name of the run in the store, by default that of its folder. `begun_as` is
    the name of the folder in which it began, on another host; that of its checkpoints.
    """

    name: str
    scenario: Scenario
    faults: tuple[Fault, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)
    file: Loaded | None = None
    grace_s: float = 120.0
    injectable: bool = True
    standby_coordinator: bool = False
    origin: Resumption | None = None
    init: str = ""
    notices: NoticeFrom | None = None
    run_id: str = ""
    begun_as: str = ""


def folder_name(text: str, otherwise: str) -> str:
    """Returns the part of a run folder's name for any text: at most 40 of a-z 0-9 . _ -, `otherwise` if none is left.

    A letter with an accent loses it.
    """
    plain = unicodedata.normalize("NFKD", text[:_MOST_OF_NAME]).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9._-]+", "-", plain).strip("-._")[:40] or otherwise


def case_of_file(loaded: Loaded) -> Case:
    """Returns the case of a scenario file."""
    return Case(folder_name(loaded.scenario.name, "case"), loaded.scenario, loaded.faults, loaded.origins, file=loaded)


def whole_text(loaded: Loaded) -> str:
    """Returns the text of a scenario with its job, without secret values; a job from another file may change."""
    from engine.core.faults.scenario_plain import scenario_plain
    from engine.files.scenarios.scenario_text import scenario_text

    job = loaded.scenario.job.masked
    if loaded.source.is_whole and job == loaded.scenario.job and loaded.path.is_file():  # a cell of a matrix has none
        return loaded.path.read_text(encoding="utf-8")
    usual = replace(job, results=Job().results)  # a folder of this run is no part of the scenario
    head = "" if loaded.source.is_whole else f"# {loaded.path}, with its job: {loaded.job_from}\n"
    return head + scenario_text(scenario_plain(replace(loaded.scenario, job=usual)))


def scenario_record(loaded: Loaded, text: str) -> ScenarioRecord:
    """Returns the record with all that is needed to run the scenario again; `text` is as it was at the start."""
    from engine.files.scenarios.library import library

    name = loaded.scenario.name
    is_shipped = loaded.path == library() / f"{name}.yaml"
    return ScenarioRecord(
        scenario=name if is_shipped and loaded.source.is_whole else "scenario.yaml",
        text=text,
        seed=loaded.seed,
        settings=loaded.settings_but_results,
        needs_trust=bool(loaded.foreign),
    )


def facts_text(case: Case, run: str, result: dict[str, Any] | None = None) -> str:
    """Returns the text of `run.json` in the folder of this name, with the result of the case once it is known."""
    from engine.files.host_facts import host_facts
    from engine.files.run_folder import run_json_text
    from engine.files.twin_file import own_sources

    facts: dict[str, Any] = {
        "run": case.begun_as or run,
        "job": asdict(case.scenario.job.masked),
        "origins": case.origins,
        "injectable": case.injectable,
        "host": host_facts(Path.cwd()),
        "sources": own_sources(),
    }
    if case.init:
        facts["init"] = {"file": case.scenario.job.init, "sha256": case.init}
    if case.origin is not None:
        facts["resumed"] = asdict(case.origin)
    if case.file is not None:
        facts["scenario"] = {
            "name": case.scenario.name,
            "file": str(case.file.path),
            "job": case.file.job_from,
            "seed": case.file.seed,
            "settings": case.file.settings_but_results,
            "needs_trust": bool(case.file.foreign),
            "faults": [to_plain(fault) for fault in case.faults],
        }
    elif case.faults:
        facts["kill"] = [fault.id for fault in case.faults]
    return run_json_text(facts | {"result": result})
