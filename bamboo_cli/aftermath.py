"""What came of the failures of a run: its recoveries, faults that struck or did not, and the comparison with its twin.

Rules: a case whose fault never struck is invalid, never passed. Weights are called identical only where the hashes of
the last committed step were compared with the twin's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.core.checks.recovery_log import recoveries
from engine.core.checks.recovery_times import Recovery
from engine.core.checks.twin import Comparison
from engine.core.config.job import Job
from engine.core.errors import BambooError, ExitCode
from engine.core.faults.fault import At, Fault
from engine.core.faults.scenario_rules import WHOLE_AFTERWARDS, is_part
from engine.files.events_file import has_event, read_events
from engine.files.run_folder import RunFolder

if TYPE_CHECKING:
    from engine.harness.run_driver import Screen
    from engine.runtime.agent.session import Ending
    from engine.runtime.store.etcd_settings import EtcdSettings


@dataclass(slots=True)
class Aftermath:
    """All of it; `twin_error` says why there is no comparison where one was wanted."""

    faults: tuple[Fault, ...]
    fired: frozenset[str]
    recoveries: list[Recovery]
    comparison: Comparison | None = None
    twin_error: BambooError | None = None

    @property
    def missed(self) -> list[Fault]:
        """The faults that did not strike."""
        return [each for each in self.faults if each.id not in self.fired]

    def error(self) -> BambooError | None:
        """Returns what makes a run that finished a failed one, or None."""
        if self.comparison is not None and self.comparison.difference is not None:
            error = BambooError(f"the weights are not those of the fault-free twin: {self.comparison.difference}")
            error.exit_code = ExitCode.EXPECTATION_FAILED
            return error
        if self.missed:
            faults = ", ".join(f"--kill {each.id} ({each})" for each in self.missed)
            parts = self.fired and any(isinstance(each.moment, At) and is_part(each.moment) for each in self.missed)
            why = f" ({WHOLE_AFTERWARDS})" if parts else ""
            error = BambooError(f"the case is invalid, nothing was proved: did not strike: {faults}{why}")
            error.exit_code = ExitCode.INVALID_CASE
            return error
        return self.twin_error

    def lines(self, committed: int) -> list[str]:
        """Returns one line per recovery; `committed` is the last committed step."""
        proved = ""
        if self.comparison is not None and self.comparison.difference is None and self.comparison.num_steps:
            last = self.comparison.last_step
            proved = ", weights identical" if last == committed else f", weights identical up to step {last}"
        return [f"{each}{proved if each.pause_ns is not None or each.after_end else ''}" for each in self.recoveries]

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields of the run's summary."""
        comparison = self.comparison
        twin = comparison and {"steps_compared": comparison.num_steps, "difference": comparison.difference}
        if self.twin_error is not None:
            twin = {"error": str(self.twin_error)}
        return {
            "recoveries": [each.as_dict() for each in self.recoveries],
            "faults": [{"fault": each.id, "fired": each.id in self.fired} for each in self.faults],
            "twin": twin,
        }


def aftermath_of(
    job: Job,
    folder: RunFolder,
    ending: Ending,
    faults: Sequence[Fault],
    etcd: EtcdSettings | None,
    screen: Screen,
    *,
    with_twin: bool,
) -> Aftermath:
    """Reads the events of a run; runs its twin when faults struck, it finished and the twin is wanted."""
    fired = frozenset[str]()
    found: list[Recovery] = []
    if faults or has_event(folder.events, "epoch"):
        events = list(read_events(folder.events))
        unseen = {each["fault"] for each in events if each["event"] == "unconfirmed"}
        fired = frozenset(each["fault"] for each in events if each["event"] == "fault") - unseen
        found = recoveries(events)
    if job.fsdp:  # nobody can take over from shards, whoever was to
        found = [replace(each, heirs=()) if each.resume_ns is None else each for each in found]
    aftermath = Aftermath(tuple(faults), fired, found)
    if with_twin and fired and not ending.exit_code:
        from engine.harness.twin_run import compare_with_twin

        try:
            aftermath.comparison = compare_with_twin(job, ending.view.account.rows, folder, etcd, screen)
        except BambooError as error:
            aftermath.twin_error = error
    return aftermath
