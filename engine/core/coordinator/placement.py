"""The placement of the next step: the shadows that the heal will have made, and the deadly hosts.

The coordinator names these when training begins, and whenever others become deadly. A host that is deadly only until
the heal is done is not named.
"""

from __future__ import annotations

from functools import lru_cache

from engine.core.coordinator.outputs import CoordinatorOutput, Note, Write
from engine.core.coordinator.state import CoordinatorState
from engine.core.history.process_records import DeadlyRecord
from engine.core.membership.deadly_hosts import NO_MORE, deadly_hosts, deadly_in_words
from engine.core.ownership import Ownership, healed

_healed = lru_cache(maxsize=256)(healed)


def healed_soon(state: CoordinatorState, ownership: Ownership) -> Ownership:
    """Returns the ownership in the step after this one, as the workers compute it too."""
    job, given = state.job, (state.membership.members, state.leaving, state.wanted, state.hosts)
    return _healed(ownership, job.redundancy, job.redundancy_level, *given)


def warned_of(state: CoordinatorState, soon: Ownership) -> tuple[CoordinatorState, tuple[CoordinatorOutput, ...]]:
    """Returns the state and the warning about the deadly hosts of an ownership, if they are others than before."""
    hosts = deadly_hosts(state.membership._replace(owners=soon.owners, shadows=soon.shadows))
    text = deadly_in_words(hosts, state.job.slot_noun)
    if text == state.deadly:
        return state, ()
    record = DeadlyRecord(hosts=tuple(hosts), text=text or NO_MORE)
    return state._replace(deadly=text), (Note(record.text), Write(record))
