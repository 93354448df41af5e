"""The options of `bamboo run` about failures and notices, and its caller from Python."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from bamboo_cli.echo import echo
from engine.core.errors import Problem, UserError, problems_of
from engine.core.hosts.notice_answer import CLOUDS, NoticeFrom
from engine.core.units import DURATION_FORM, parse_duration

if TYPE_CHECKING:
    from engine.core.faults.scenario import Scenario
    from engine.core.job.job import Job
    from engine.core.job.job_rules import JobParts
    from engine.files.jobs.job_layers import Layer
    from engine.harness.screen import Screen
    from engine.runtime.agent.run_state import RunView


TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code",
        envvar="BAMBOO_TRUST_CODE",
        help="Import code (package.module:attribute) and use output folders named in a scenario, a matrix, their job "
        "file, a checkpoint or the default ./bamboo.yaml.",
    ),
]


def tell_untrusted(foreign: Iterable[Problem], offered: JobParts) -> None:
    """Prints one line to stderr for each value that a run would refuse, unless the user trusts files."""
    for each in () if offered.trusts_files else foreign:
        echo(f"a run needs --trust-code: {each}", err=True)


# The options of `bamboo run` about failures: the kills, the twin, the grace of a leaving worker.
class YesNo(StrEnum):
    """The answers to a question."""

    YES = "yes"
    NO = "no"


DEFAULT_GRACE = "120s"
_fault_option = partial(typer.Option, rich_help_panel="Faults")

Kills = Annotated[
    list[str] | None,
    _fault_option(
        "--kill",
        metavar="STEP:STAGE[:ACTION[:MICROBATCH]][:WHEN][@PIPELINE]",
        help="SIGKILL the worker that owns a stage (with --blocks: a block): 5:2 (step 5, stage 2, before the middle "
        "backward), 5:2:F:3, 5:2:LOG:during, 5:2:B:3:after, 5:2@1 (pipeline 1). Repeatable. The weights are then "
        "compared with those of a fault-free twin.",
    ),
]
NoTwin = Annotated[bool, _fault_option("--no-twin", help="With --kill: skip the twin and the comparison of weights.")]
Tee = Annotated[
    bool,
    typer.Option("--tee", help='Show the output of workers on stderr, prefixed with the worker number: "[1] ...".'),
]
Injectable = Annotated[
    YesNo, _fault_option("--injectable", help="Accept faults from `bamboo inject --run` during the run.")
]
EventsMax = Annotated[
    str,
    typer.Option(
        "--events-max",
        metavar="SIZE",
        help="Maximum size of a run's events, such as 200MB; beyond it, action records of ordinary steps are dropped; "
        "0B: no limit.",
        show_default="the job's",
    ),
]
Grace = Annotated[
    str,
    _fault_option(
        "--grace",
        metavar="DURATION",
        help="How long a worker may take to leave after SIGTERM: 2m, 120s, or 120 (seconds).",
    ),
]


def events_setting(size: str) -> list[str]:
    """Returns the setting of a job with the user's limit for its events; none without one."""
    return [f"events_max={size}"] if size else []


def scenario_of(kills: Sequence[str], job: Job, *, with_twin: bool, after: int = -1) -> Scenario:
    """Returns the scenario of a job with the user's kills, after the step `after`; raises UserError."""
    from engine.core.faults.fault import At
    from engine.core.faults.kill_text import kill_scenario
    from engine.core.faults.scenario import Expect
    from engine.core.faults.scenario_rules import NO_TWIN

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
        (fault, at.step) for fault in scenario.faults if isinstance(at := fault.trigger, At) and at.step <= after
    ]:
        expected, hint = f"a step above {after}", f"training begins after step {after}"
        raise UserError(Problem(f"--kill {fault.id}", expected, str(step), hint) for fault, step in never)
    return scenario


def misspelt_kills(kills: Sequence[str]) -> list[Problem]:
    """Returns the problems in the form of kills, without the job in which they are to strike."""
    from engine.core.faults.kill_text import kill_moment
    from engine.core.job.job import Job

    return problems_of(*(partial(kill_moment, each, Job()) for each in kills))


def grace_seconds(text: str) -> float:
    """Returns the seconds of a duration, such as ``2m``, or of a bare number; raises UserError for other texts."""
    grace_ns = parse_duration(text if text.strip()[-1:].isalpha() else f"{text.strip()}s")
    if not grace_ns:
        raise UserError([Problem("--grace", f"{DURATION_FORM}, or seconds, above 0", repr(text))])
    return grace_ns / 1e9


# The options of `bamboo run` that ask a command or a URL for notices.
_notice_option = partial(typer.Option, rich_help_panel="Notices")
_LEAST_NS = 100_000_000
_EVERY = "5s"
NoticeCommand = Annotated[
    str | None,
    _notice_option(
        "--notice-command",
        metavar="COMMAND",
        help="Poll this command for preemption notices. If it exits with 0 and prints worker numbers, those get "
        "notice; if it prints anything else except false or none, all workers do.",
    ),
]
NoticeUrl = Annotated[
    str | None,
    _notice_option(
        "--notice-url",
        metavar="URL",
        help="Poll this URL for notices, such as http://169.254.169.254/latest/meta-data/spot/instance-action.",
    ),
]
NoticeEvery = Annotated[
    str | None, _notice_option("--notice-every", metavar="DURATION", help="Interval between polls (default 5s).")
]


class SpotCloud(StrEnum):
    """The clouds in `CLOUDS`."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"


Spot = Annotated[
    SpotCloud | None,
    _notice_option("--spot", help="Poll this cloud for preemption notices; sets the URL, the interval and --grace."),
]


def grace_on(spot: str | None, grace: str) -> str:
    """Returns the grace of a cloud's spot machines, unless the user gives one."""
    return CLOUDS[spot].grace if spot and grace == DEFAULT_GRACE else grace


def asking(
    command: str | None, url: str | None, every: str | None, in_process: bool = False, spot: str | None = None
) -> NoticeFrom | None:
    """Returns what is asked for notices, None if nothing is; raises UserError with every problem."""
    problems = [*_problems(command, url, every, in_process, spot)]
    if spot is not None and not (command is None and url is None):
        problems.append(Problem("--spot", "no other source of notices with it", "both"))
    if problems:
        raise UserError(problems)
    if spot is not None:
        source = CLOUDS[spot].source
        return source._replace(every_s=(parse_duration(every) or 0) / 1e9) if every else source
    every_s = (parse_duration(every or _EVERY) or 0) / 1e9
    return NoticeFrom(tuple(shlex.split(command or "")), url or "", every_s) if command or url else None


def _problems(
    command: str | None, url: str | None, every: str | None, in_process: bool, spot: str | None
) -> Iterator[Problem]:
    if command is not None and url is not None:
        yield Problem("--notice-url", "a command or a URL", "both")
    if command is not None:
        yield from _of_command(command)
    if url is not None:
        yield from _of_url(url)
    if every is not None and (parse_duration(every) or 0) < _LEAST_NS:
        yield Problem("--notice-every", f"{DURATION_FORM}, 100ms or more", repr(every))
    if every is not None and command is None and url is None and spot is None:
        yield Problem("--notice-every", "--notice-command or --notice-url with it", "neither")
    if in_process and not (command is None and url is None and spot is None):
        name = "--notice-command" if command is not None else "--spot" if url is None else "--notice-url"
        yield Problem(name, "workers that are processes", "--in-process", "a thread gets no signal")


def _of_url(url: str) -> Iterator[Problem]:
    if not url.startswith(("http://", "https://")):
        yield Problem("--notice-url", "an address that begins with http:// or https://", repr(url))
        return
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # of the port
        is_whole = False
    if not is_whole or any(not each.isprintable() or each == " " for each in url):
        hint = "http://HOST:PORT/PATH, without a user and a password"
        yield Problem("--notice-url", "an address with a host", repr(_without_user(url)), hint)


def _without_user(url: str) -> str:
    """Returns an address without a password that may stand in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _of_command(command: str) -> Iterator[Problem]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Problem("--notice-command", "a command", repr(command), str(error))
        return
    if not words or shutil.which(words[0]) is None:
        yield Problem("--notice-command", "a program that can be run", repr(command), "no shell reads it")


# The hidden option of `bamboo run` for `engine.train`, which starts the command from a Python program.
#
# Rules: the first line of the standard input has values of fields, as one JSON object. The input stays open while its
# writer lives. At its end the writer has ended, and the run is asked to end as by SIGTERM. The first line of the output
# names the folder of the run, as one JSON object.

Keywords = Annotated[
    bool, typer.Option("--keywords", hidden=True, help="Read values of fields from the standard input.")
]


def caller_layer() -> Layer:
    """Returns the layer of the values in the first line of the standard input."""
    from engine.files.jobs.job_layers import keyword_layer

    return keyword_layer(json.loads(sys.stdin.buffer.readline()), "train()")


def _end_with_caller() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):  # not through a buffer, which this thread would hold at the end of Python
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def announcing(screen: Screen, keywords: bool) -> Screen:
    """Returns a screen that also prints the run's folder, and ends the run with its caller, if that is Python."""
    if not keywords:
        return screen
    threading.Thread(target=_end_with_caller, daemon=True).start()
    is_told = False

    @contextlib.contextmanager
    def picture(job: Job, events: Path) -> Iterator[Callable[[RunView], None]]:
        nonlocal is_told
        if not is_told:
            is_told = True
            echo(json.dumps({"run_dir": str(events.parent)}))
            sys.stdout.flush()
        shown: AbstractContextManager[Callable[[RunView], None]] = screen.picture(job, events)
        with shown as show:
            yield show

    return replace(screen, picture=picture)
