"""The run folder of a job of another launcher, read again: its facts, its result, its events and their flaws."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from engine.codec.values import converted
from engine.core.checks.external_report import CommandEnded, ExternalEvent, ExternalRun
from engine.core.checks.external_verdict import StepReport
from engine.core.checks.proof import Flaw
from engine.core.errors import InvariantError, StorageError
from engine.core.history.evidence import EVENTS, Chains, unlinked
from engine.files.evidence import broken_chain
from engine.files.linked_lines import evidence, evidence_lines
from engine.files.run_folder import RunFolder

_KINDS = {kind.__name__: kind for kind in get_args(ExternalEvent)}


@dataclass(frozen=True, slots=True)
class ExternalRecord:
    """What a run folder has of an external run: facts, result if it has ended, events, flaws of the evidence."""

    name: str
    facts: dict[str, Any]
    result: dict[str, Any]
    run: ExternalRun
    twin: ExternalRun
    flaws: tuple[Flaw, ...]

    @property
    def job(self) -> dict[str, Any]:
        """The facts of the scenario and its command."""
        return dict(self.facts["external"])


def external_facts(folder: RunFolder) -> dict[str, Any]:
    """Returns the content of run.json; raises StorageError if it cannot be read, or is that of another run."""
    try:
        with evidence(folder.path, folder.run_json.name) as (opened, _):
            facts = json.loads(opened.read())
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise StorageError(f"{folder.run_json}: this is not a record of a run ({type(error).__name__})") from error
    if not isinstance(facts, dict) or not isinstance(facts.get("external"), dict):
        raise StorageError(f"{folder.run_json}: this is not a record of a job of another launcher")
    return facts


def external_record(folder: RunFolder) -> ExternalRecord:
    """Returns the record of a run; raises StorageError if a file of it is none of such a run."""
    facts, flaws = external_facts(folder), list[Flaw]()
    run = ExternalRun(_events(folder, EVENTS, flaws))
    twin = ExternalRun(_events(folder, f"twin/{EVENTS}", flaws) if folder.twin.events.is_file() else ())
    return ExternalRecord(folder.path.name, facts, facts.get("result") or {}, run, twin, tuple(flaws))


def _events(folder: RunFolder, file: str, flaws: list[Flaw]) -> list[ExternalEvent]:
    """Returns the events in a file; the last one says that bamboo has ended if the run did not come to its end."""
    events, chains = list[ExternalEvent](), Chains()
    try:
        for number, line in enumerate(evidence_lines(folder.path, file), 1):
            chains.take(line)
            try:
                events.append(_event(line))
            except (ValueError, KeyError, TypeError, RecursionError, InvariantError) as error:
                flaws.append(Flaw(f"{file}:{number}", f"this is not an event ({error})"))
    except FileNotFoundError:
        flaws.append(Flaw(file, "it is gone"))
    flaws += broken_chain(chains, file)
    if not any(isinstance(event, CommandEnded) for event in events):
        events.append(CommandEnded(max((event.at_ns for event in events), default=0), None, "interrupt"))
    return events


def _event(line: str) -> ExternalEvent:
    fields = json.loads(unlinked(line)[0])
    kind = _KINDS[fields.pop("event")]
    plain = [fields[name] for name in StepReport._fields] if kind is StepReport else fields
    event: ExternalEvent = converted(plain, kind, "the event")
    return event
