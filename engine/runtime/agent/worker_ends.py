"""The ends of the workers of this host: it drives the machine of `engine/core/agent/ends.py`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from engine.core.agent.ends import EndStep, HostAgent, HostEnd, KillWorker, LeaveBehind
from engine.core.history.process_records import KilledRecord, LeftBehindRecord
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.ipc.recorder import Recorder, now_ns


class WorkerEnds:
    """Kills workers, and leaves behind those that stay; `note` tells the user, `stop` and `end_step` the others."""

    def __init__(
        self,
        members: Mapping[int, WorkerHandle],
        recorder: Recorder,
        note: Callable[[str], object],
        stop: Callable[[], None],
        end_step: Callable[[int], object],
    ):
        self.host = HostAgent(frozenset(members))
        self._members = members
        self._recorder = recorder
        self._note = note
        self._stop = stop
        self._end_step = end_step

    def take(self, rule: Callable[..., HostEnd], *given: int) -> None:
        """Lets a rule of the machine decide on an input, now, and carries out its outputs."""
        self.host, outputs = rule(self.host, now_ns(), *given)
        for output in outputs:
            if isinstance(output, EndStep):
                self._end_step(output.grace_ns)
            elif isinstance(output, KillWorker):
                self._kill(output)
            elif isinstance(output, LeaveBehind):
                self._leave_behind(self._members[output.worker])
            else:
                self._stop()

    def _kill(self, kill: KillWorker) -> None:
        if kill.why:
            self._recorder.write(KilledRecord(of=kill.worker, why=kill.why))
        self._members[kill.worker].child.signal(signal.SIGKILL)

    def _leave_behind(self, member: WorkerHandle) -> None:
        member.is_left_behind = True
        self._recorder.write(LeftBehindRecord(of=member.worker, child=member.child.pid))
        self._note(f"worker {member.worker} (pid {member.child.pid}) does not end by SIGKILL and is left behind")
