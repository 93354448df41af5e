"""Verdicts on workers: one that is put out is told at once; the same end of two workers in one action ends the run.

Rules: a second worker that hangs, or exits with the same code, in the action in which another one did, shows that the
cause is the user's code: it would end one heir after the other. A worker that an injected fault struck does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.core.action import COMPUTE_OPS, Action, parse_action
from engine.core.errors import ScheduleError
from engine.core.exclusion import Cause, Exclusion
from engine.core.membership.state import State
from engine.core.ownership import Grid
from engine.core.texts import numbered
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.ipc.progress_board import ProgressBoard

_PUT_OUT = (Cause.HANG, Cause.SILENCE, Cause.NO_ANSWER)  # of workers whose processes live


class WorkerVerdicts:
    """The verdicts on the workers of one run; `is_struck` returns whether a fault has struck a worker."""

    def __init__(
        self,
        grid: Grid,
        members: Mapping[int, WorkerHandle],
        run_state: RunState,
        board: ProgressBoard | None,
        is_struck: Callable[[int], bool],
    ):
        self._grid = grid
        self._members = members
        self._run_state = run_state
        self._board = board
        self._is_struck = is_struck

    def tell(self, state: State) -> None:
        """Notes for the user the workers that the verdict puts out while their processes live, with their heirs."""
        for out in state.verdict:
            if out.cause in _PUT_OUT:
                slots = self._members[out.worker].slots
                heirs = {state.owners[self._grid.place(slot)] for slot in slots} - {out.worker}
                verb = "takes" if len(heirs) == 1 else "take"
                then = f"; {numbered('worker', sorted(heirs), ' and ')} {verb} over" if heirs else ""
                self._run_state.note(f"worker {out.worker} {out.how}{self._where(out.worker)} and is put out{then}")

    def repeated(self, state: State) -> str:
        """Returns why the user's code is the cause, if two workers ended in the same way in the same action."""
        first: dict[tuple[str, int, Action], int] = {}
        for out in state.out.values():
            end, at = self._end_of(out), self._action_of(out.worker)
            if end and at is not None and not self._is_struck(out.worker):
                other = first.setdefault((end, *at), out.worker)
                if other != out.worker:
                    same = f"worker {out.worker} {out.how}{self._where(out.worker)}, as worker {other} did"
                    parts = self._run_state.parts_of(at[1].stage)
                    return f"{same}: it comes from the user's code, not from a worker; look at {parts}"
        return ""

    def _end_of(self, out: Exclusion) -> str:
        code = self._members[out.worker].exit_code
        if out.cause is Cause.DEATH and code is not None and code >= 0:  # signals come from outside
            return f"exit code {code}"
        return "hang" if out.cause is Cause.HANG else ""

    def _action_of(self, worker: int) -> tuple[int, Action] | None:
        """Returns the step and the compute action in which a worker ended; None in any other action."""
        if self._board is None:
            return None
        progress = self._board.read(worker)
        try:
            action = parse_action(progress.action)
        except ScheduleError:  # it had begun none
            return None
        return (progress.step, action) if action.op in COMPUTE_OPS else None

    def _where(self, worker: int) -> str:
        at = self._action_of(worker)
        return f" in {at[1]} of step {at[0]}" if at else ""
