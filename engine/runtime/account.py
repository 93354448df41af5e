"""The account of a run: what its workers have said, put together; pictures and results are made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.core.audit import AuditBook
from engine.core.commit import Ballot, Commit, Vote
from engine.core.errors import BambooError, DivergedError, ExitCode, Problem, UserError, WorkerFailedError
from engine.core.job import Job
from engine.core.trajectory import Row
from engine.runtime.link import Message
from engine.runtime.roster import Member


@dataclass(slots=True)
class Account:
    """What a run has come to so far. Times are monotonic nanoseconds, 0 for what has not come about."""

    job: Job
    layers: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validations: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    going_at_ns: int = 0
    _book: AuditBook = field(init=False)
    _ballot: Ballot = field(init=False)

    def __post_init__(self) -> None:
        self._ballot = Ballot(self.job.pipelines, self.job.stages, self.job.clip_norm)

    def cut(self, message: Message) -> None:
        """Takes in how the model was cut into stages."""
        self.layers, self.starts = message["layers"], message["starts"]
        self._book = AuditBook(len(self.layers), self.job.pipelines)

    def vote(self, message: Message) -> Commit | None:
        """Takes in a vote; returns what everybody learns if it was the last one missing.

        Raises InvariantError when pipelines disagree on the step before, DivergedError for a norm that is not finite.
        """
        norms = dict(message["norms"])
        commit = self._ballot.add(Vote(message["step"], message["pipeline"], message["stage"], norms, message["loss"]))
        if commit is not None:
            # Everyone who voted for this step has told the hashes of the one before.
            self.close_book()
            if not math.isfinite(commit.grad_norm):
                raise DivergedError(
                    f"the gradient norm is {commit.grad_norm} at step {commit.step}; a lower lr often helps"
                )
        return commit

    def settle(self, commit: Commit) -> None:
        """Takes in that a step is committed, which it is when the coordinator has written it down."""
        self.losses.append(commit.loss)

    def progress(self) -> str:
        """Returns the last committed step, in words."""
        return f"last committed step {len(self.losses) - 1}" if self.losses else "no step was committed"

    def audit(self, message: Message) -> None:
        """Takes in the hashes of some layers."""
        self._book.add(message["pipeline"], {layer: (state, buffers) for layer, state, buffers in message["rows"]})

    def close_book(self) -> None:
        """Makes rows of the hashes of the last committed step; raises InvariantError when pipelines disagree."""
        if self.losses:
            self.rows += self._book.close(len(self.losses) - 1, self.losses[-1])

    def validated(self, message: Message) -> None:
        """Takes in the outcome of a validation pass."""
        self.validations[message["step"]] = (message["loss"], message["metric"])


def error_of(member: Member, message: Message) -> BambooError:
    """Returns what a worker said of its end as the error that it is."""
    if "problems" in message:
        return UserError(Problem(*problem) for problem in message["problems"])
    who = f"worker {member.worker} (pid {member.child.pid})"
    if "traceback" in message:
        return WorkerFailedError(f"{who} raised\n{message['traceback'].rstrip()}")
    if message["code"] == ExitCode.EXPECTATION_FAILED:
        return DivergedError(f"{who}: {message['error']}")
    error = BambooError(f"{who}: {message['error']}")
    error.exit_code = ExitCode(message["code"])
    return error
