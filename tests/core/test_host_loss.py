"""When a host counts as lost."""

from __future__ import annotations

from engine.core.deadlines import LATER_NS
from engine.core.hosts.ends import BACK_NS, SILENT_NS, HostSight
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership
from engine.core.protocol.coordinator_state import first_state
from tests.looped import looped

HEARD_NS = 10**12


def test_a_broken_transfer_is_no_proof_before_the_loss_of_its_host_is_known() -> None:
    """Else the loss would make two epochs."""
    job = Job(model="mlp", stages=3)
    looks = [
        first_state(job, fresh_ownership(job), 0, later_ns=each).membership.options.look_ns for each in (0, LATER_NS)
    ]
    assert looks[1] - looks[0] == LATER_NS > BACK_NS


@looped(
    ("ended_ns", "is_waiting", "after_ns", "why"),
    [
        (None, False, SILENT_NS - 1, ""),
        (None, False, SILENT_NS, "silent for 2 s"),
        (None, True, 10 * SILENT_NS, ""),  # its words wait here
        (HEARD_NS, False, BACK_NS - 1, ""),
        (HEARD_NS, False, BACK_NS, "its stream has ended"),
        (HEARD_NS, True, BACK_NS, "its stream has ended"),
    ],
)
def test_a_host_is_lost_if_its_stream_is_not_back_or_it_is_silent(
    ended_ns: int | None, is_waiting: bool, after_ns: int, why: str
) -> None:
    found = HostSight(HEARD_NS, ended_ns, is_waiting).why_lost(HEARD_NS + after_ns)
    assert bool(found) is bool(why)
    assert why in found
