"""The ends of a run and of the processes of this host: the first cause, signals to the launcher, deadlines, SIGKILL.

`engine/core/agent/ends.py` decides; the agent, which is made on this class, tells the coordinator and the workers.
"""

from __future__ import annotations

import contextlib
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from engine.core.agent import ends
from engine.core.agent.ends import HostAgent, HostEnd, HostOutput
from engine.core.checkpoints.resumption import Resumption
from engine.core.errors import BambooError, CoordinatorUnavailableError, ExitCode, StorageError
from engine.core.history import process_records as records
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.ipc.recorder import Recorder, now_ns

_START_GRACE_NS = 300_000_000
_GONE_S = 2.0  # from SIGKILL, where no record can be written any more
_FINDINGS = (ExitCode.EXPECTATION_FAILED, ExitCode.INTERNAL)  # errors that an interrupt does not explain


class EndsOfRun(ABC):
    """The ends of a run on this host."""

    def __init__(self, members: dict[int, WorkerHandle], recorder: Recorder, run_state: RunState, own_host: str):
        """Of several hosts `own_host` is the name of this one."""
        self.members, self.recorder, self.run_state = members, recorder, run_state
        self.own_host, self.num_notices = own_host, 0
        self.host = HostAgent(frozenset(members))
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self.is_restarting = False
        self.origin: Resumption | None = None  # to go on with, after a loss of state

    @abstractmethod
    def carry_out(self, output: HostOutput) -> None:
        """Carries out a decision about the ends of processes."""

    def end_workers(self, rule: Callable[..., HostEnd], *given: int | str) -> None:
        """Lets a rule of `engine/core/agent/ends.py` decide on an input, now, and carries out its outputs."""
        self.host, found = rule(self.host, now_ns(), *given)
        for output in found:
            self.carry_out(output)

    def kill(self, kill: ends.KillWorker) -> None:
        """Sends SIGKILL to a worker."""
        if kill.why:
            self.recorder.write(records.KilledRecord(of=kill.worker, why=kill.why))
        self.members[kill.worker].child.signal(signal.SIGKILL)

    def give_up(self, member: WorkerHandle, limit_s: float) -> None:
        """Kills a worker that has loaded code and data for too long, and says so; training goes on."""
        why = f"has not loaded its code and data within {limit_s:g} s"
        self.end_workers(ends.give_up, member.worker, why)
        doing = f": it {member.doing}" if member.doing else ""
        self.run_state.note(f"{member.name}, which was no member yet, {why}, and is given up{doing}; see {member.log}")

    def leave_behind(self, leave: ends.LeaveBehind) -> None:
        """Names a process that does not end."""
        member = self.members[leave.worker]
        member.is_left_behind = True
        self.recorder.write(records.LeftBehindRecord(of=member.worker, child=member.child.pid))
        self.run_state.note(f"{member.name} does not end by SIGKILL and is left behind")

    def abandon(self) -> None:
        """Kills every worker, and leaves those behind that wait for a disk which has stopped."""
        living = [each for each in self.members.values() if each.exit_code is None and not each.is_left_behind]
        for member in living:
            member.child.signal(signal.SIGKILL)
        until_s = time.monotonic() + _GONE_S
        for member in living:
            if member.child.wait(max(0.0, until_s - time.monotonic())) is None:
                with contextlib.suppress(StorageError):
                    self.leave_behind(ends.LeaveBehind(member.worker))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Makes an error of the coordinator, of the run state or of a store the end of the run."""
        try:
            yield
        except BambooError as error:
            self.fail(error)

    def fail(self, cause: BambooError) -> None:
        """Keeps the first cause and stops every worker; an interrupted run has nothing to recover."""
        if self.cause is None and (self.interrupted is None or cause.exit_code in _FINDINGS):
            if isinstance(cause, CoordinatorUnavailableError):
                self.recorder.settle()  # raises, if its store lies on a disk that has stopped
                cause = CoordinatorUnavailableError(f"{cause}; {self.run_state.progress()}")
            self.cause = cause
            self.recorder.write(records.FailedRecord(error=str(cause), notice=cause.notice))
        self.stop()

    def stop(self) -> None:
        """Stops every worker."""
        # Before training, workers may be blocked in forming a group; killing them early loses no work.
        is_training = self.run_state.going_at_ns and not self.is_restarting
        self.end_workers(ends.stop, ends.STOP_NS if is_training else _START_GRACE_NS)

    def is_notice(self, number: signal.Signals) -> bool:
        """Whether a signal is a notice for the workers of this host, one of several, which get it; a second kills."""
        if not self.own_host or number is not signal.SIGTERM or not self.run_state.going_at_ns:
            return False
        self.recorder.write(records.InterruptRecord(signal=number.name))
        self.num_notices += 1
        for member in self.own_living:
            member.child.signal(signal.SIGTERM if self.num_notices == 1 else signal.SIGKILL)
        return True

    def living(self, worker: int) -> WorkerHandle | None:
        """Returns a worker that has not ended."""
        found = self.members.get(worker)
        return found if found is not None and found.exit_code is None else None

    @property
    def own_living(self) -> list[WorkerHandle]:
        """The workers of this host, one of several, that have not ended."""
        return [each for each in self.members.values() if each.host == self.own_host and each.exit_code is None]

    def interrupt(self, number: signal.Signals, step_grace_s: float) -> None:
        """Ends the run after the open step; without it after `step_grace_s`, at a second signal, before training."""
        self.interrupted = self.interrupted or number
        self.recorder.write(records.InterruptRecord(signal=number.name))
        is_training = self.run_state.going_at_ns > 0
        grace_ns = round(step_grace_s * 1e9) if is_training else _START_GRACE_NS
        self.end_workers(ends.interrupt, grace_ns, is_training)

    @property
    def is_to_restart(self) -> bool:
        """Whether the workers are to be started again once all have ended, perhaps from a checkpoint (`origin`)."""
        return self.origin is not None or (self.is_restarting and not (self.cause or self.interrupted))

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends now."""
        return self.host.is_stopping
