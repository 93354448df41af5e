"""Runs the command of a job of another launcher, strikes its processes when the moments of faults have come.

Rules: the command has a session of its own, and a mark in its environment that all its processes inherit. Signals go
through pidfds to processes of the job only. What it leaves behind is ended with the run, also after the death of this
process. Its output goes to a file, line by line, and each line has the time at which it was read.
"""

from __future__ import annotations

import contextlib
import glob
import heapq
import json
import os
import secrets
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from engine.core.checks.external_report import (
    CommandEnded,
    EffectSeen,
    EndReason,
    ExternalEvent,
    ExternalRun,
    LauncherLine,
    RankBegan,
    RankEnded,
    RankStill,
    StrikeMade,
)
from engine.core.checks.external_verdict import StepReport
from engine.core.checks.silence import STILL_NS, SilenceWatch
from engine.core.errors import Problem, UserError
from engine.core.faults.external import (
    ANY_RANK,
    BEYOND_SIGNALS,
    ExternalFault,
    ExternalScenario,
    ExternalTarget,
    JobView,
    PendingFaults,
    least_wait_ns,
)
from engine.core.faults.fault import FaultKind, Sign, TimedSignal
from engine.core.faults.launchers import blamed, is_notice
from engine.external.effects import Effect, begin_effect
from engine.external.kinds import signals_of
from engine.external.processes import JobProcess, JobProcesses
from engine.external.progress import (
    FirstSource,
    JsonSteps,
    OutputSteps,
    ProgressSource,
    ReportedSteps,
    TensorBoardSteps,
    reported_states,
)
from engine.files.atomic_write import make_folder, open_to_append
from engine.files.linked_lines import append_linked
from engine.runtime.process import descendants, subprocesses
from engine.runtime.process.clock import now_ns
from engine.runtime.process.interrupts import Interrupts
from engine.runtime.process.prctl import adopting

VARIABLE = "BAMBOO_PROGRESS"  # names the folder of reports to the job
_TICK_S = 0.005
_CALM_S = 0.02  # the same when every fault has struck
_LOOK_NS = 20_000_000  # between two looks for new processes
_SIGN_NS = 200_000_000  # between two looks at ranks that report nothing
_ASK_NS = 500_000_000  # between two looks whether the job trains on, and how long it must
_GRACE_S = 5.0  # from SIGTERM to SIGKILL of a command that this process ends
_GONE_S = 2.0  # for the processes of a command that has ended
_MOST_LINE_BYTES = 1 << 16
JOB_FOLDER = "job"  # in a run folder: the one that the command may fill
_LOG = "logs/command.log"
_FOLDER = "{folder}"  # in a command: an empty folder of the run, for checkpoints and the like


@dataclass(slots=True)
class _Strike:
    """A fault whose signals are being sent."""

    fault: ExternalFault
    kind: FaultKind
    victims: list[JobProcess]
    signals: Iterator[TimedSignal]
    at_ns: int
    last: int = 0  # the last signal
    is_seen: bool = False


@dataclass(slots=True)
class _Ongoing:
    """A fault beyond signals, and when it ends."""

    fault: ExternalFault
    effect: Effect
    until_ns: int
    is_seen: bool = False


class Referee:
    """One run of a job: `folder` gets its files, `hear` its output; `reported` is that of a job that runs already."""

    def __init__(
        self,
        scenario: ExternalScenario,
        kinds: Mapping[str, FaultKind],
        folder: Path,
        hear: Callable[[str], object],
        reported: Path | None = None,
    ) -> None:
        self._scenario, self._kinds, self._hear = scenario, kinds, hear
        folder = folder.absolute()  # the processes of the job may have another folder
        self._own = folder / JOB_FOLDER
        self._progress = reported or folder / "progress"
        for each in (self._own, folder / "progress"):
            make_folder(each, folder)
        self._events_fd = open_to_append(folder / "events.jsonl")
        self._log_fd = open_to_append(folder / _LOG)
        self.events: list[ExternalEvent] = []
        self._source = FirstSource(_sources(scenario, folder, self._progress, self._own))
        self._pending = PendingFaults(scenario, list(scenario.faults))
        self._strikes: list[_Strike] = []
        self._queue: list[tuple[int, int, _Strike, TimedSignal]] = []
        self._order = count()
        self._ongoing: list[_Ongoing] = []
        self._rest = b""
        self._begun: dict[int, int] = {}  # rank -> processes
        self._reported: set[int] = set()  # pids
        self._files: dict[str, tuple[int, int]] | None = None
        self._look_ns = self._asked_ns = self._sign_ns = 0
        self._silence = SilenceWatch()
        self._output_fd = self._stopping_fd = -1

    def run(self, interrupts: Interrupts) -> ExternalRun:
        """Runs the command to its end, to its time limit or to a signal; raises UserError if it cannot be started."""
        mark = secrets.token_hex(8)
        with adopting(), _swept(mark) as sweeper:
            self._output_fd, write_fd = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._output_fd, False)
            process = self._start(mark, write_fd)
            os.close(write_fd)
            self._processes = JobProcesses(self._scenario.launcher, f"{descendants.VARIABLE}={mark}", process.pid)
            try:
                why = self._watch(process.pid, interrupts)
                if why == "exit":
                    process.wait()
                else:
                    self._end(process)
                number = interrupts.first
                self._note(CommandEnded(now_ns(), number if why == "interrupt" else process.poll(), why))
                leftovers = self._left() if why == "exit" else None
            finally:
                descendants.end_adopted(mark, {sweeper}, {process.pid})
                self._read_output()
                os.close(self._output_fd)
                self._close()
        return self._result(leftovers)

    def attach(self, root: int, interrupts: Interrupts) -> ExternalRun:
        """Strikes a job that runs already, the descendants of a process, until it trains on; leaves it running."""
        self._processes = JobProcesses(self._scenario.launcher, "", root)
        stopped_fd, self._stopping_fd = os.pipe()
        waker = subprocesses.start(subprocesses.module("engine.external.wake_up", str(stopped_fd)), fd=stopped_fd)
        os.close(stopped_fd)
        try:
            why = self._watch(root, interrupts)
            self._note(CommandEnded(now_ns(), interrupts.first, "gone" if why == "exit" else why))
        finally:
            os.close(self._stopping_fd)  # what stands still goes on
            subprocesses.end(waker, _GONE_S)
            self._close()
        return self._result(None)

    def _result(self, leftovers: Sequence[str] | None) -> ExternalRun:
        return ExternalRun(self.events, leftovers, self._source.unread, *reported_states(self._progress))

    def _close(self) -> None:
        for each in self._ongoing:
            each.effect.end()
        self._processes.close()
        os.close(self._log_fd)
        os.close(self._events_fd)

    def _start(self, mark: str, write_fd: int) -> subprocess.Popen[bytes]:
        words = [word.replace(_FOLDER, str(self._own)) for word in self._scenario.command]
        environment = subprocesses.inherited() | {descendants.VARIABLE: mark, VARIABLE: str(self._progress)}
        try:
            return subprocesses.start(words, log=write_fd, environment=environment)
        except OSError as error:
            raise UserError(
                [Problem("command", "a program that starts", repr(words[0]), str(error.strerror))]
            ) from error

    def _watch(self, root: int, interrupts: Interrupts) -> EndReason:
        """Watches the job and strikes it; returns why that has ended."""
        root_fd = os.pidfd_open(root)
        self._view = JobView(now_ns())
        try:
            while True:
                self._wait([root_fd, self._output_fd, interrupts.fileno()])
                self._read_output()
                has_ended = subprocesses.is_readable(root_fd)
                self._look_at_job(at_once=has_ended)
                self._act(now_ns())
                if interrupts.first is not None:
                    return "interrupt"
                if has_ended:
                    self._read_output()
                    self._look_at_job(at_once=True)
                    return "exit"
                if now_ns() - self._view.started_ns > self._scenario.timeout_ns:
                    return "timeout"
                if self._output_fd < 0 and self._trains_on():
                    return "attached"
        finally:
            os.close(root_fd)

    def _trains_on(self) -> bool:
        """Returns whether all faults have struck and the job has resumed; asked often, it looks once in a while."""
        if self._pending.left or self._queue or now_ns() < self._asked_ns:
            return False
        self._asked_ns = now_ns() + _ASK_NS
        is_seen = all(each.is_seen for each in self._strikes) and all(each.is_seen for each in self._ongoing)
        return is_seen and all(
            recovery.resume_ns is not None and self.events[-1].at_ns - recovery.resume_ns > _ASK_NS
            for recovery in ExternalRun([*self.events, CommandEnded(now_ns(), None, "attached")]).recoveries()
        )

    def _wait(self, descriptors: list[int]) -> None:
        """Waits for output, an end, a signal or the next tick."""
        now = now_ns()
        waits = [
            (_TICK_S if self._pending.left else _CALM_S) * 1e9,
            *([self._queue[0][0] - now] if self._queue else []),
        ]
        if (wait_ns := least_wait_ns(self._pending.left, self._pending.came_ns, now)) is not None:
            waits.append(wait_ns)
        poll = select.poll()
        for descriptor in descriptors:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        for process in self._processes.ranks.values():
            if process.pid in self._processes.alive:
                poll.register(process.pidfd, select.POLLIN)
        for descriptor, _ in poll.poll(max(0.0, min(waits) / 1e6)):
            if descriptor not in descriptors:
                self._look_ns = 0  # a rank has ended

    def _look_at_job(self, *, at_once: bool = False) -> None:
        """Reads the reports of steps, and looks for processes if it is time to."""
        for report in self._source.read():
            self._note_step(report)
        now = now_ns()
        if now >= self._look_ns or at_once:
            self._look_ns = now + _LOOK_NS
            begun, ended = self._processes.look()
            for process in ended:
                self._note(RankEnded(now, process.rank or 0, process.pid))
            for process in begun:
                self._note_begun(process)
            self._look_for_silence(now)
        if any(each.moment.during == "checkpoint" for each in self._pending.left):
            is_writing = self._sees_writing()
            self._view.is_writing = is_writing and bool(self._view.steps)  # files of the start are no checkpoint
        self._view.restarted = frozenset(
            rank
            for rank, times in self._begun.items()
            if times > 1 and (newest := self._processes.rank(rank)) and newest.pid not in self._reported
        )

    def _look_for_silence(self, now: int) -> None:
        """Notes the ranks that stand still while no step is reported."""
        if now < self._sign_ns:
            return
        self._sign_ns = now + _SIGN_NS
        ranks = {rank: each for rank, each in self._processes.ranks.items() if not each.has_ended}
        signs = {rank: each.sign(self._view.steps.get(rank, -1)) for rank, each in sorted(ranks.items())}
        signs_of = {rank: sign for rank, sign in signs.items() if sign is not None}
        for rank, (since_ns, why) in self._silence.look(signs_of, now).items():
            self._note(RankStill(now, rank, signs_of[rank].pid, since_ns, why))

    def _sees_writing(self) -> bool:
        """Returns whether a file of the pattern has appeared or changed since the last look."""
        files = {}
        for path in glob.glob(self._scenario.checkpoint.replace(_FOLDER, str(self._own)), recursive=True):
            with contextlib.suppress(OSError):
                facts = os.stat(path)
                files[path] = (facts.st_size, facts.st_mtime_ns)
        before, self._files = self._files, files
        return before is not None and any(before.get(path) != state for path, state in files.items())

    def _note_begun(self, process: JobProcess, reported_ns: int = 0) -> None:
        """Notes that a rank has begun; one that stood by while the rank before it lived begins with its report."""
        rank = process.rank or 0
        self._begun[rank] = self._begun.get(rank, 0) + 1
        ended = (each.at_ns for each in self.events if isinstance(each, RankEnded) and each.rank == rank)
        stood_by = reported_ns and process.began_ns < max(ended, default=0)
        begin_ns = reported_ns if stood_by else max(process.began_ns, self._view.started_ns)
        self._note(RankBegan(begin_ns, rank, process.pid))

    def _note_step(self, report: StepReport) -> None:
        pid = int(report.process) if report.process.isdecimal() else 0
        if report.rank is not None and (process := self._processes.take_rank(pid, report.rank)) is not None:
            self._note_begun(process, report.at_ns)
        owner = self._processes.alive.get(pid)
        if owner is not None and owner.rank is not None:  # its launcher may count ranks otherwise
            report = report._replace(rank=owner.rank)
        self._reported.add(pid)
        self._silence.step()
        self._sign_ns = report.at_ns + STILL_NS // 2
        self._view.steps[ANY_RANK if report.rank is None else report.rank] = report.step
        self._note(report)

    def _read_output(self) -> None:
        if self._output_fd < 0:  # of a job that others have started
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output_fd, _MOST_LINE_BYTES):
                os.write(self._log_fd, data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                self._rest = self._rest[-_MOST_LINE_BYTES:]
                for line in lines:
                    self._note_line(line.decode("utf-8", "replace"), now_ns())

    def _note_line(self, line: str, at_ns: int) -> None:
        self._hear(line)
        launcher = self._scenario.launcher
        if is_notice(launcher, line):
            for numbers in blamed(launcher, line) or [{}]:
                self._note(LauncherLine(at_ns, line[:500], self._blamed_rank(numbers)))

    def _blamed_rank(self, numbers: Mapping[str, int]) -> int | None:
        """Returns the rank that a line of the launcher blames, by the pid that it names if there is one."""
        if "pid" in numbers:
            began = [each for each in self.events if isinstance(each, RankBegan) and each.pid == numbers["pid"]]
            if began:
                return began[-1].rank
        return numbers.get("rank", numbers.get("local_rank"))

    def _act(self, now: int) -> None:
        """Looks for effects, then strikes and sends the signals that are due, as a signal may end an effect."""
        self._look()
        for fault in self._pending.due(self._view, now):
            self._begin(fault)
        while self._queue and self._queue[0][0] <= now_ns():
            _, _, strike, timed = heapq.heappop(self._queue)
            self._send(strike, timed)
        for ongoing in [*self._ongoing]:
            if now_ns() >= ongoing.until_ns:
                ongoing.effect.end()
                self._ongoing.remove(ongoing)

    def _look(self) -> None:
        """Notes the effects that show by now."""
        for strike in self._strikes:
            if not strike.is_seen and all(self._shows(strike, victim) for victim in strike.victims):
                strike.is_seen = True
                how = "the process has ended" if strike.victims[0].has_ended else "the process stands still"
                self._note(EffectSeen(now_ns(), strike.fault.id, how))
        for ongoing in self._ongoing:
            if not ongoing.is_seen and (how := ongoing.effect.seen()):
                ongoing.is_seen = True
                self._note(EffectSeen(now_ns(), ongoing.fault.id, how))

    def _begin(self, fault: ExternalFault) -> None:
        group = fault.target.group
        ranks = fault.target.numbers if group is None else self._processes.group(group)
        victims = self._victims(fault.target, ranks)
        if isinstance(victims, str):
            self._note(EffectSeen(now_ns(), fault.id, victims, why_not=True))
            return
        kind = self._kinds[fault.do]
        parameters = kind.with_defaults(fault.parameters)
        if fault.do in BEYOND_SIGNALS:
            at_ns = now_ns()
            effect = begin_effect(fault, victims)
            if isinstance(effect, str):
                self._note(EffectSeen(now_ns(), fault.id, effect, why_not=True))
                return
            self._ongoing.append(_Ongoing(fault, effect, at_ns + int(parameters.get("for_ns", 1 << 62))))
            self._note(StrikeMade(at_ns, fault.id, ranks, tuple(each.pid for each in victims)))
            return
        strike = _Strike(fault, kind, victims, signals_of(kind, parameters), now_ns())
        if self._send(strike, next(strike.signals)):
            self._strikes.append(strike)
            pids = tuple(each.pid for each in victims)
            still_ns = 0 if fault.do == "slow" else int(parameters.get("for_ns", 0))
            self._note(StrikeMade(strike.at_ns, fault.id, ranks, pids, still_ns))
        else:
            self._note(EffectSeen(now_ns(), fault.id, "its victim had ended by then", why_not=True))

    def _send(self, strike: _Strike, timed: TimedSignal) -> bool:
        """Sends a signal to all victims, and plans the next one from now on; returns whether any victim lived."""
        if timed.number == signal.SIGSTOP and self._stopping_fd >= 0:
            os.write(self._stopping_fd, "".join(f"{victim.pid}\n" for victim in strike.victims).encode())
        has_reached = [victim.send(timed.number) for victim in strike.victims]
        strike.last = timed.number
        following = next(strike.signals, None)
        if following is not None and any(has_reached):
            at_ns = now_ns() + following.after_ns - timed.after_ns
            heapq.heappush(self._queue, (at_ns, next(self._order), strike, following))
        return any(has_reached)

    def _shows(self, strike: _Strike, victim: JobProcess) -> bool:
        signs: tuple[tuple[Sign, object], ...] = (("state", victim.state), ("exit", -strike.last))
        parameters = strike.kind.with_defaults(strike.fault.parameters)
        return any(
            strike.kind.shows(sign, value, parameters) for sign, value in signs if sign == "state" or victim.has_ended
        )

    def _victims(self, target: ExternalTarget, ranks: Sequence[int]) -> list[JobProcess] | str:
        """Returns the processes to strike, those of `ranks` or their children, or why there are none."""
        if target.launcher:
            launching = self._processes.launching()
            return "no process of the job has started its ranks" if launching is None else [launching]
        if target.group is not None and not ranks:
            groups = {each.group for each in self._processes.ranks.values() if each.group is not None}
            groups_text = ", ".join(map(str, sorted(groups))) or "none"
            return f"no rank of group {target.group} lives (groups seen: {groups_text})"
        victims = []
        for number in ranks:
            process = self._processes.rank(number)
            if process is None:
                ranks_text = ", ".join(map(str, sorted(self._processes.ranks))) or "none"
                return f"no process of rank {number} lives (ranks seen: {ranks_text})"
            below = [process] if target.child is None else self._processes.children(process, target.child)
            if not below:
                return f"no child of rank {number} matches {target.child!r}"
            victims += below
        return victims

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the command: SIGTERM, then SIGKILL for what is left after a grace period."""
        for member in self._processes.alive.values():
            member.send(signal.SIGCONT)
        process.terminate()
        until_s = time.monotonic() + _GRACE_S
        while process.poll() is None and time.monotonic() < until_s:
            self._read_output()  # a full pipe would hold it up
            time.sleep(_TICK_S)
        process.kill()
        process.wait()

    def _left(self) -> list[str]:
        """Returns the processes that live on behind the end of the command."""
        until_s = time.monotonic() + _GONE_S
        while True:
            self._processes.look()
            if not self._processes.alive or time.monotonic() > until_s:
                return [f"process {each.pid} ({each.words()})" for each in self._processes.alive.values()]
            time.sleep(_TICK_S)

    def _note(self, event: ExternalEvent) -> None:
        self.events.append(event)
        fields = event._asdict() if isinstance(event, StepReport) else asdict(event)
        text = json.dumps({"event": type(event).__name__, **fields}, separators=(",", ":"))
        append_linked(self._events_fd, text)


def _sources(scenario: ExternalScenario, folder: Path, reported: Path, own: Path) -> list[ProgressSource]:
    """Returns where the steps of a job can be read: its own reports first, then what the scenario names."""
    sources: list[ProgressSource]
    progress, sources = scenario.progress, [ReportedSteps(reported)]
    if pattern := progress.output or scenario.launcher.progress:
        sources.append(OutputSteps(folder / _LOG, pattern))
    if progress.jsonl:
        sources.append(JsonSteps(Path(progress.jsonl.replace(_FOLDER, str(own)))))
    if progress.tensorboard:
        sources.append(TensorBoardSteps(Path(progress.tensorboard.replace(_FOLDER, str(own)))))
    return sources


@contextlib.contextmanager
def _swept(mark: str) -> Iterator[int]:
    """Ends all processes with a mark if this process dies inside the block; yields the pid of the one that does it."""
    sweeper, alive_fd = subprocesses.start_sweeper(mark)
    try:
        yield sweeper.pid
    finally:
        sweeper.kill()
        subprocesses.end(sweeper, _GONE_S)
        os.close(alive_fd)
