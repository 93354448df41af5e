"""A scenario from what a real failure left behind: logs of launchers and schedulers, dumps of NCCL, bamboo's records.

Rules: a sign is a line that says which rank failed, how, or when; the scenario has it as a comment. A value that
no line gives stays a question mark, which no run accepts. No dump runs code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.errors import NothingMatchedError, StorageError
from engine.core.history.process_records import ExitRecord, StartedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord
from engine.core.job.job import Job
from engine.core.texts import printable
from engine.external.pickled import unpickled
from engine.files.events_file import read_history

_LONGEST = 140  # characters of a line in a comment
UNKNOWN = "'?'"
_STEP = re.compile(r"\b(?:global[ _]?)?(?:step|iter(?:ation)?)\b[^\w\n]{0,4}(?P<step>\d+)", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"(\d+)(?:\.\w+)?$")
_BY_SIGNAL = {9: "kill", 15: "terminate", 19: "stop", 20: "stop"}
_BY_WORD = {
    **{"killed": "kill", "out of memory": "kill", "oomkilled": "kill", "oom": "kill", "node failure": "kill"},
    **{"nodenotready": "kill", "nodelost": "kill", "terminated": "terminate", "evicted": "terminate"},
    **{"preemption": "terminate", "preempted": "terminate", "preempting": "terminate", "time limit": "terminate"},
}
# launcher -> what it writes when a rank has failed; the first row that fits a file counts
_SIGNS: tuple[tuple[str, str], ...] = (
    ("torchrun", r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\n[^\n]*exitcode\s+: (?P<code>-?\d+)[^\n]*"),
    ("torchrun", r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+)"),
    ("srun", r"srun: error: \S+: tasks? (?P<rank>\d+)\S*: (?P<word>Killed|Terminated|Out Of Memory)"),
    ("srun", r"srun: error: \S+: tasks? (?P<rank>\d+)\S*: Exited with exit code (?P<code>\d+)"),
    ("srun", r"\*\*\* (?:STEP|JOB) \S+ ON \S+ CANCELLED AT \S+ DUE TO (?P<word>TIME LIMIT|PREEMPTION|NODE FAILURE)"),
    ("srun", r"Detected \d+ (?P<word>oom)[_-]kill event"),
    ("", r"\b(?P<word>OOMKilled|Evicted|Preempt(?:ed|ing)|NodeNotReady|NodeLost)\b(?:[^\n]*?pod/\S*?-(?P<pod>\d+)\b)?"),
)


class LogSign(NamedTuple):
    """What a line says of a failure; `question` is what the reader has to decide."""

    place: str
    text: str
    launcher: str = ""
    rank: int | None = None
    do: str = ""
    step: int | None = None
    question: str = ""

    @property
    def comment(self) -> str:
        """The line with its place, as a comment."""
        text = " ".join(printable(self.text).split())
        return f"# {self.place}: {text if len(text) <= _LONGEST else f'{text[:_LONGEST]}...'}"


@dataclass(frozen=True, slots=True)
class LearnedScenario:
    """A scenario as text, and the number of questions in it."""

    text: str
    questions: int


def learn(paths: Iterable[Path]) -> LearnedScenario:
    """Returns the scenario of the first failure in some logs; raises NothingMatchedError, or StorageError."""
    signs, issued = list[LogSign](), dict[int, tuple[int, str]]()
    for path in paths:
        try:
            if path.exists() and not path.is_file():  # a pipe would block, and a device has no end
                raise StorageError(f"cannot read {str(path)!r}: it is not a regular file")
            data = path.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {str(path)!r}: {error.strerror}") from error
        if path.name == "events.jsonl" and re.match(rb'\{"event":"[A-Z]', data):
            raise NothingMatchedError(f"{str(path)!r} is of a job of another launcher", "name its logs/command.log")
        if path.name == "events.jsonl" and (own := _own(path)) is not None:
            return own
        dump = _dump(data, path)
        if dump is not None:
            rank = _RANK_IN_NAME.search(path.name)
            number = int(rank[1]) if rank else len(issued)
            counts = [count for entry in dump if type(count := entry.get("collective_seq_id")) is int]
            issued[number] = max(counts, default=0), path.name
        else:
            signs += _in_text(data.decode("utf-8", "replace"), path)
    signs += _late(issued)
    if all(sign.step is not None for sign in signs):
        raise NothingMatchedError("no line shows a failure", "name the log of the launcher, or the dumps of all ranks")
    return _scenario(signs)


def _in_text(text: str, path: Path) -> Iterator[LogSign]:
    """Yields the sign of the failure in a log, if it has one, and that of the last step before it."""
    if (sign := _in_json(text, path)) is not None:
        yield sign
        return
    end = len(text)
    for launcher, pattern in _SIGNS:
        if match := re.search(pattern, text):
            yield _sign(launcher, match, text, path)
            end = match.start()
            break
    if before := [*_STEP.finditer(text, 0, end)]:
        number, line = _line(text, before[-1].start())
        yield LogSign(f"{path.name}:{number}", line, step=int(before[-1]["step"]))


def _sign(launcher: str, match: re.Match[str], text: str, path: Path) -> LogSign:
    groups, (number, line) = match.groupdict(), _line(text, match.start())
    rank = next((int(digits) for name in ("rank", "local_rank", "pod") if (digits := groups.get(name))), None)
    do, question = "", ""
    if word := groups.get("word"):
        do = _BY_WORD[word.lower()]
    elif code := int(groups.get("code") or 0):
        do = _BY_SIGNAL.get(-code if code < 0 else code - 128, "kill")
        if do == "kill" and code not in (-9, 137):
            question = f"the process ended by itself, with exit code {code}: is a kill the same to the others?"
    if groups.get("local_rank"):
        question = f"local_rank {rank} is rank {rank} on the first host only: which rank is it?"
    elif groups.get("pod"):
        question = _of_pod(rank)
    whole = line if "\n" not in match[0] else match[0]
    return LogSign(f"{path.name}:{number}", whole, launcher, rank, do, question=question)


def _line(text: str, position: int) -> tuple[int, str]:
    """Returns the number of the line at a position, and the line."""
    begin, end = text.rfind("\n", 0, position) + 1, text.find("\n", position)
    return text.count("\n", 0, position) + 1, text[begin : end if end >= 0 else len(text)]


def _in_json(text: str, path: Path) -> LogSign | None:
    """Returns the sign in one JSON object: events of Kubernetes, or torchelastic's error.json in ATTEMPT/RANK."""
    entry = _mapping(_json(text))
    items = entry.get("items")
    for item in map(_mapping, items if isinstance(items, list) else ()):
        reason, pod = str(item.get("reason")), str(_mapping(item.get("involvedObject")).get("name"))
        if do := _BY_WORD.get(reason.lower(), ""):
            number = _RANK_IN_NAME.search(pod)
            words = f"{reason} {pod}: {item.get('message', '')}"
            rank, question = (int(number[1]), _of_pod(number[1])) if number else (None, "")
            return LogSign(path.name, words, "", rank, do, question=question)
    message = entry.get("message")
    words = _mapping(message).get("message", message)
    if not isinstance(words, str):
        return None
    rank = int(path.parent.name) if path.parent.name.isdecimal() else None
    question = "the rank raised an exception: is a kill the same to the others?"
    return LogSign(path.name, words, "torchrun", rank, "kill", question=question)


def _of_pod(number: object) -> str:
    return f"the pod has number {number}: which rank is it?"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _dump(data: bytes, path: Path) -> list[Mapping[str, Any]] | None:
    """Returns the entries of a dump of NCCL's flight recorder, pickled or as JSON; None for another file."""
    content = unpickled(data, str(path)) if data[:1] == b"\x80" else _json(data.decode("utf-8", "replace"))
    entries = _mapping(content).get("entries")
    if not (isinstance(entries, list) or "pg_config" in _mapping(content)):
        return None
    return [_mapping(entry) for entry in entries] if isinstance(entries, list) else []


def _late(issued: Mapping[int, tuple[int, str]]) -> Iterator[LogSign]:
    """Yields the sign of the rank that has issued fewer collectives than the others, by the dumps of all."""
    if len(issued) < 2:
        return
    (fewest, name), rank = min((of, rank) for rank, of in issued.items())
    most = max(count for count, _ in issued.values())
    if fewest < most:
        text = f"rank {rank} has issued {fewest} collectives, another one {most}"
        question = "the rank is late or stands still: stop, pause, slow, or kill?"
        yield LogSign(name, text, "torchrun", rank, "stop", question=question)


def _scenario(signs: list[LogSign]) -> LearnedScenario:
    """Returns the scenario for a job of another launcher; the first sign that says something counts."""
    failures = [sign for sign in signs if sign.step is None]
    failure = next((sign for sign in failures if sign.do), failures[0])
    rank = next((sign for sign in signs if sign.rank is not None), None)
    step = next((sign for sign in signs if sign.step is not None), None)
    launcher = next((sign.launcher for sign in signs if sign.launcher), "")
    do = failure.do or UNKNOWN
    questions = [sign.question for sign in {failure: 0, **({rank: 0} if rank else {})} if sign.question]
    lines = [
        "# The first failure that the logs show, as `bamboo learn` understood it.",
        "version: 1",
        "name: learned",
        f"about: {do} of {'a rank' if rank is None else f'rank {rank.rank}'}, as in the logs of a real failure",
        *(
            [f"launcher: {launcher}"]
            if launcher
            else ["# question: which launcher? (default: the one that the command names)"]
        ),
        "faults:",
        "  - id: first",
        *([f"    {step.comment}"] if step else ["    # question: after which step? No line says it."]),
        f"    at: {{step: {step.step if step else UNKNOWN}}}",
        *([f"    {rank.comment}"] if rank else ["    # question: which rank? No line says it."]),
        f"    target: {{rank: {rank.rank if rank else UNKNOWN}}}",
        *([f"    {failure.comment}"] if failure is not rank else []),
        *(f"    # question: {question}" for question in questions),
        f"    do: {do}",
        "expect:",
        "  outcome: recovered",
    ]
    text = "\n".join(lines) + "\n"
    return LearnedScenario(text, text.count("# question:"))


def _own(path: Path) -> LearnedScenario | None:
    """Returns the scenario of the first death of a worker in bamboo's own records; None if there is none."""
    history = read_history(path)
    committed = -1
    for record in history.records:
        if isinstance(record, CommitRecord):
            committed = record.step
        elif isinstance(record, ExitRecord) and not record.expected:
            return _own_scenario(history, record, committed + 1)
    return None


def _own_scenario(history: RunHistory, death: ExitRecord, step: int) -> LearnedScenario:
    started = [each for each in history.of(StartedRecord) if each.of == death.of and each.slots]
    stage = started[-1].slots[0][1] if started else UNKNOWN
    job = {each.name: value for each in fields(Job) if (value := getattr(history.job, each.name)) != each.default}
    do = _BY_SIGNAL.get(-death.code, "kill")
    lines = [
        "# The first death of a worker in the records of a run, as `bamboo learn` understood it.",
        "version: 1",
        "name: learned",
        f"about: {do} of worker {death.of} in step {step}, as in the records of a run",
        f"job: {json.dumps(job)}",
        "faults:",
        f"  # events.jsonl: worker {death.of} ended with code {death.code}, after the commit of step {step - 1}",
        f"  - at: {{step: {step}, stage: {stage}}}",
        *([] if death.code in (-9, -15) else ["    # question: it ended by itself; is a kill the same to the others?"]),
        f"    do: {do}",
        "expect:",
        "  outcome: recovered",
        "  trajectory: identical",
    ]
    text = "\n".join(lines) + "\n"
    return LearnedScenario(text, text.count("# question:"))
