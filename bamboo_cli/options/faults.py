"""The options of `bamboo run` about failures: the kills, the twin, the grace of a leaving worker."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from engine.core.errors import Problem, UserError, problems_of

if TYPE_CHECKING:
    from engine.core.config.job import Job
    from engine.core.faults.scenario import Scenario


class YesNo(StrEnum):
    """The answers to a question."""

    YES = "yes"
    NO = "no"


DEFAULT_GRACE = "120s"
_PANEL = "Faults"

Kills = Annotated[
    list[str] | None,
    typer.Option(
        "--kill",
        metavar="STEP:STAGE[:ACTION[:MICROBATCH]]",
        help="SIGKILL the worker of a stage: 5:2 (before the middle backward of stage 2 at step 5), 5:2:F:3, "
        "5:2:LOG:during, 5:2:B:3:after, 5:2@1 (pipeline 1). With --blocks, of a block. Repeatable. The weights are "
        "then compared with those of a fault-free twin.",
        rich_help_panel=_PANEL,
    ),
]
NoTwin = Annotated[
    bool,
    typer.Option("--no-twin", help="With --kill: do not run the twin; compare no weights.", rich_help_panel=_PANEL),
]
Tee = Annotated[
    bool,
    typer.Option(
        "--tee", help='Show what workers print on stderr, each line with the number of its worker: "[1] ...".'
    ),
]
Injectable = Annotated[
    YesNo,
    typer.Option(
        "--injectable",
        help="no: the run refuses the faults of `bamboo inject --run`, and of every other request.",
        rich_help_panel=_PANEL,
    ),
]
StandbyCoordinator = Annotated[
    bool,
    typer.Option(
        "--standby-coordinator",
        help="Give the coordinator a process of its own, and a second one that takes over if the first ends.",
        rich_help_panel=_PANEL,
    ),
]
EventsMax = Annotated[
    str,
    typer.Option(
        "--events-max",
        metavar="SIZE",
        help="Size of a run's events, beyond which actions of ordinary steps are left out: 200MB, 2GB; 0B keeps all.",
        show_default="the job's",
    ),
]
Grace = Annotated[
    str,
    typer.Option(
        "--grace",
        metavar="DURATION",
        help="Time that a worker has to leave after SIGTERM: 2m, 120s, or 120 (seconds).",
        rich_help_panel=_PANEL,
    ),
]


def events_setting(size: str) -> list[str]:
    """Returns the setting of a job with the user's limit for its events; none without one."""
    return [f"events_max={size}"] if size else []


def scenario_of(kills: Sequence[str], job: Job, *, with_twin: bool, after: int = -1) -> Scenario:
    """Returns the scenario of a job with the user's kills; raises UserError with every problem.

    It expects the weights of the twin in each step with hashes in both runs. Training begins behind the step `after`.
    """
    from engine.core.faults.fault import At
    from engine.core.faults.kill_text import kill_scenario
    from engine.core.faults.outcome_rules import NO_TWIN
    from engine.core.faults.scenario import Expect

    problems: list[Problem] = []
    if kills and with_twin and not job.audit:
        hint = "without hashes there is nothing to compare; give --no-twin"
        problems.append(Problem("audit", "1 or more with --kill", "0", hint))
    if kills and with_twin and not job.deterministic:
        problems.append(Problem("deterministic", "true with --kill", "false", f"{NO_TWIN}; give --no-twin"))
    expect = Expect(trajectory="as far as hashed" if kills and with_twin else None)
    if problems:
        raise UserError([*problems, *problems_of(lambda: kill_scenario(kills, job, expect))])
    scenario = kill_scenario(kills, job, expect)
    if never := [
        (each, at.step) for each in scenario.faults if isinstance(at := each.trigger, At) and at.step <= after
    ]:
        expected, hint = f"a step above {after}", f"training begins after step {after}"
        raise UserError(Problem(f"--kill {each.id}", expected, str(step), hint) for each, step in never)
    return scenario


def misspelt_kills(kills: Sequence[str]) -> list[Problem]:
    """Returns the problems in the form of kills, without the job in which they are to strike."""
    from engine.core.config.job import Job
    from engine.core.faults.kill_text import kill_moment

    return problems_of(*(partial(kill_moment, each, Job()) for each in kills))


def grace_seconds(text: str) -> float:
    """Returns the seconds of a duration, such as ``2m``, or of a bare number; raises UserError for other texts."""
    from engine.core.duration import DURATION_FORM, parse_duration

    grace_ns = parse_duration(text if text.strip()[-1:].isalpha() else f"{text.strip()}s")
    if not grace_ns:
        raise UserError([Problem("--grace", f"{DURATION_FORM}, or seconds, above 0", repr(text))])
    return grace_ns / 1e9
