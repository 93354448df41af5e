"""Checks of a run whose hosts were struck: one epoch for each host lost, the other processes go on, who ended how.

Rules: as in `expectations`: a fault that did not strike, or whose effect was not seen, makes the case invalid. The
times of strikes and ends were taken outside of the hosts, by one clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.checks.expectations import Check
from engine.core.errors import ExitCode
from engine.core.faults.host_fault import LOSES_A_HOST, HostFault
from engine.core.history.process_records import RestartRecord, StartedRecord
from engine.core.history.record import AGENT
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ConfirmedRecord, EpochRecord, FaultRecord
from engine.core.texts import counted, numbered

_KILLED = -9  # by SIGKILL
# A member of etcd that is cut off may lead for two election timeouts, and answers renewals meanwhile. The next leader
# begins all leases afresh, later than that, so the last answered renewal still tells when a lease could expire.
_STILL_LEADS_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class HostStrike:
    """A fault has struck host `node` in `step`, with `workers` on it at that time.

    `ended_ns` is the time from the strike until the struck processes had ended; None if they were not seen to end.
    `spare_ns` is the time from then until the lease of a host that was cut off could expire, None if it is not known.
    """

    fault: HostFault
    node: str
    step: int
    at_ns: int
    workers: tuple[int, ...]
    ended_ns: int | None = None
    spare_ns: int | None = None

    @property
    def loses_host(self) -> bool:
        """Whether the run loses the host by it."""
        return self.fault.do in LOSES_A_HOST

    @property
    def lost(self) -> tuple[int, ...]:
        """The workers that are lost by it."""
        if self.fault.do == "kill-worker" and self.fault.worker is not None:
            return (self.fault.worker,)
        return self.workers if self.loses_host else ()

    def records(self) -> Iterator[FaultRecord | ConfirmedRecord]:
        """Yields the records of the strike: one for each worker that is lost, and one for its effect."""
        told: dict[str, Any] = {"worker": AGENT, "at_ns": self.at_ns, "fault": self.fault.id}
        for worker in self.lost:
            yield FaultRecord(**told, do=self.fault.do, step=self.step, of=worker, slot=None)
        if self.ended_ns is not None:
            told["at_ns"] += self.ended_ns
            yield ConfirmedRecord(**told, how=f"{self.fault.do} {self.node}, from outside")


def host_checks(
    faults: Sequence[HostFault],
    strikes: Sequence[HostStrike],
    codes: Mapping[str, int],
    history: RunHistory,
    lease_ns: int,
) -> tuple[Check, ...]:
    """Returns the checks of what was struck; `codes` are the exit codes of the agents, by host."""
    checks = [_struck(faults, strikes), _epochs(strikes, history), _processes(strikes, history)]
    checks.append(_agents(strikes, codes))
    cut = [each for each in strikes if each.fault.do == "cut-host"]
    return (*checks, *([_lease(cut, lease_ns)] if cut else []))


def _judged(name: str, wrong: Sequence[str], text: str) -> Check:
    return Check(name, "failed" if wrong else "passed", "; ".join(wrong) or text)


def _struck(faults: Sequence[HostFault], strikes: Sequence[HostStrike]) -> Check:
    by_id = {each.fault.id: each for each in strikes}
    wrong = [f"{each.id} did not strike ({each})" for each in faults if each.id not in by_id]
    wrong += [f"{each.fault.id} struck, but its effect was not seen" for each in strikes if each.ended_ns is None]
    told = ", ".join(f"{each.fault.do} {each.node} in step {each.step}" for each in strikes)
    return Check("faults", "invalid" if wrong else "passed", "; ".join(wrong) or told)


def _epochs(strikes: Sequence[HostStrike], history: RunHistory) -> Check:
    """Checks that each host lost is one epoch, whose verdict names its workers and no other."""
    found = [sorted(out.worker for out in each.verdict if out.is_loss) for each in history.of(EpochRecord)]
    found = [each for each in found if each]
    wanted = [sorted(each.lost) for each in strikes if each.lost]
    wrong = [f"no epoch puts out {_named(each)}" for each in wanted if each not in found]
    wrong += [f"an epoch puts out {_named(each)}, which no fault did" for each in found if each not in wanted]
    wrong += [f"{counted(len(found), 'epoch')} for {counted(len(wanted), 'loss', 'losses')}"] * (
        len(found) != len(wanted) and not wrong
    )
    text = ", then ".join(f"one epoch puts out {_named(each)}" for each in found)
    return _judged("epochs", wrong, text or "no epoch puts out a worker")


def _processes(strikes: Sequence[HostStrike], history: RunHistory) -> Check:
    """Checks that the workers that were not struck are the same processes from the start to the end."""
    started: dict[int, set[tuple[str, int]]] = {}
    for each in history.of(StartedRecord):
        started.setdefault(each.of, set()).add((each.node, each.child))
    wrong = [f"worker {of} was {len(found)} processes" for of, found in sorted(started.items()) if len(found) > 1]
    wrong += ["all workers were started again"] * bool(history.of(RestartRecord))
    lost = {worker for each in strikes for worker in each.lost}
    return _judged("processes", wrong, f"{len(started.keys() - lost)} of {len(started)} workers went on as they were")


def _agents(strikes: Sequence[HostStrike], codes: Mapping[str, int]) -> Check:
    """Checks that the agents of struck hosts ended as they have to, and all others with one code."""
    due: dict[str, int] = {}
    for each in strikes:
        if each.loses_host:
            due[each.node] = int(ExitCode.FENCED) if each.fault.do == "cut-host" else _KILLED
    wrong = [
        f"the agent of {node} ended with {codes.get(node)}, not {code}"
        for node, code in due.items()
        if codes.get(node) != code
    ]
    others = {node: code for node, code in codes.items() if node not in due}
    if len(set(others.values())) > 1:
        wrong.append("agents ended with several codes: " + ", ".join(f"{node} {code}" for node, code in others.items()))
    told = [f"{node} with {code}" for node, code in {**others, **due}.items()]
    return _judged("agents", wrong, ", ".join(told))


def _lease(cut: Sequence[HostStrike], lease_ns: int) -> Check:
    """Checks that the workers of hosts that were cut off had ended when their leases could expire."""
    wrong: list[str] = []
    told: list[str] = []
    for each in cut:
        if each.ended_ns is None or each.spare_ns is None:
            wrong.append(f"it is not known when the workers of {each.node} had ended, or when its lease could expire")
            continue
        is_late = each.ended_ns > lease_ns + _STILL_LEADS_NS or each.spare_ns <= 0
        text = f"the workers of {each.node} had ended {each.ended_ns / 1e9:.3f} s after the cut"
        text += (
            f", {abs(each.spare_ns) / 1e9:.3f} s {'after' if each.spare_ns <= 0 else 'before'} its lease could expire"
        )
        (wrong if is_late else told).append(text)
    return _judged("lease", wrong, "; ".join(told))


def _named(workers: Sequence[int]) -> str:
    return numbered("worker", workers, " and ")
