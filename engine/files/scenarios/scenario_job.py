"""The job of a scenario or of a matrix: its own fields, a job file, or the job file of the current folder.

Rules: ``job: FILE`` names a job file beside the scenario. ``job: {from: FILE, steps: 8}`` has other values for some of
its fields. A mapping without ``from`` is a whole job, over the defaults. Without ``job`` it is the project's job,
``./bamboo.yaml``; without that file it is the default one. ``BAMBOO_*`` and the user's file change no scenario.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine.core.config.job import Job
from engine.core.errors import Problem
from engine.core.faults.matrix import slots_of_fields
from engine.files.jobs.job_layers import PROJECT_FILE, Layer, document_layer, file_layer, set_layer
from engine.files.jobs.job_value import shown
from engine.files.jobs.trust import FOREIGN
from engine.files.strict_yaml import Document

FROM = "from"
KEY = "job"


@dataclass(frozen=True, slots=True)
class JobSource:
    """The source of the job of a scenario: a job file or None, and the fields that the scenario gives itself."""

    file: Path | None = None
    fields: tuple[str, ...] | None = None  # None: the scenario has no mapping

    @property
    def is_whole(self) -> bool:
        """Whether the scenario itself holds its job, so that its text is enough to run it again."""
        return self.file is None and self.fields is not None

    def text(self, job: Job) -> str:
        """Returns the source of this job in words, with the fields that the scenario changes."""
        return with_changes(self.base(job, "the scenario"), self.changed)

    @property
    def changed(self) -> tuple[str, ...]:
        """The fields of the job file that the scenario changes."""
        return self.fields or () if self.file else ()

    def base(self, job: Job, holder: str) -> str:
        """Returns the source of this job in words; `holder` is the noun for the file with the scenario."""
        if self.file is not None:
            return shown_path(self.file)
        name = "the default one" if self.fields is None else f"of {holder}"
        return f"{name} ({job.model} on {job.data})"


def with_changes(base: str, changed: Iterable[str]) -> str:
    """Returns the source of a job in words, with the fields that are changed."""
    names = ", ".join(changed)
    return f"{base}, with other {names}" if names else base


def shown_path(path: Path) -> str:
    """Returns a path for messages: from the current folder if the file lies below it."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else f"./{short}"


@dataclass(slots=True)
class ScenarioJobs:
    """Finds the layers of the jobs of one file, and reads each job file once.

    `path` is the scenario or matrix file, `settings` are the ``FIELD=VALUE`` of each ``--set``.
    """

    path: Path
    settings: Iterable[str] = ()
    _read: dict[Path, Layer] = field(default_factory=dict)

    def layers(self, document: Document) -> tuple[JobSource, list[Layer]]:
        """Returns the source of the job of a scenario, and its layers; a later layer overrides an earlier one."""
        source = self._source(document.value.get(KEY) if isinstance(document.value, dict) else None)
        return source, [*self._base(source), _own_fields(document.part(KEY)), self._changes()]

    def num_slots(self, job: object) -> int | None:
        """Returns the slots of a pipeline of a job, as a scenario gives it; None if that has a mistake."""
        own = job if isinstance(job, dict) else {}
        base = {each.path[0]: each.value for layer in self._base(self._source(job)) for each in layer.given}
        return slots_of_fields(base | own | {each.path[0]: each.value for each in self._changes().given})

    def _source(self, job: object) -> JobSource:
        if job is None:
            project = Path(PROJECT_FILE)
            return JobSource(project if project.exists() else None)
        if isinstance(job, str):
            return JobSource(self._beside(job))
        own = job if isinstance(job, dict) else {}
        named = own.get(FROM)
        file = self._beside(named) if isinstance(named, str) else None
        return JobSource(file, tuple(name for name in own if name != FROM))

    def _base(self, source: JobSource) -> list[Layer]:
        if source.file is None:
            return []
        if source.file not in self._read:
            self._read[source.file] = file_layer(source.file, FOREIGN)
        return [self._read[source.file]]

    def _changes(self) -> Layer:
        return set_layer(self.settings)

    def _beside(self, name: str) -> Path:
        """Returns a path that is relative to the folder of the scenario, in its shortest spelling."""
        found = self.path.parent / name
        short = Path(os.path.normpath(found))
        return short if short.exists() and short.samefile(found) else found  # `link/..` need not be the same folder


def _own_fields(part: Document) -> Layer:
    """Returns the layer of the fields that a scenario gives itself; a wrong ``from`` is a problem of the layer."""
    if not isinstance(part.value, dict):
        return Layer()
    own = {name: value for name, value in part.value.items() if name != FROM}
    layer = document_layer(replace(part, value=own), FOREIGN)
    if FROM in part.value and not isinstance(part.value[FROM], str):
        found = shown(part.value[FROM])
        layer.problems.append(Problem(FROM, "the path of a job file", found, "", part.source, *part.places[FROM,]))
    return layer
