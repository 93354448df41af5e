"""The group of a coming epoch, which members and joiners form while training goes on.

    coordinator                          members and joiners
    NextGroupMessage(number) --------->  form the group in a thread, beside the present one
    <------------ NextGroupFormedMessage
    then the epoch is prepared as any other, and the workers enter the group with it

Rules: no member waits for a joiner: until all have answered, steps are committed as ever. An attempt is given up when
an epoch comes first, when other workers are to join, or when one of them fails. After a failure the next one begins
with the next commit, three for the same workers at most; then the joiners wait for an epoch that forms its own group.
Another coordinator makes such an epoch first, so the numbers of an epoch are those of one coordinator.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.membership.state import Phase, State
from engine.core.process_messages import NextGroupFormedMessage, NextGroupMessage

_MOST_FAILURES = 3


class NextGroup(NamedTuple):
    """The last attempt; without `members` it was given up."""

    epoch: int = 0
    number: int = 0
    members: tuple[int, ...] = ()
    formed: frozenset[int] = frozenset()  # the workers that have answered
    failures: int = 0  # of attempts for the epoch with these members
    failed_after: int | None = None  # the last commit before the last failure
    is_entered: bool = False  # the last commit has begun the epoch

    @property
    def is_formed(self) -> bool:
        """Whether all have answered."""
        return bool(self.members) and self.formed.issuperset(self.members)


def attempted(group: NextGroup, state: State) -> tuple[NextGroup, NextGroupMessage | None]:
    """Returns the attempt that fits the state, and the order to the workers if it is another one."""
    members, epoch = _wanted(state), state.epoch + 1
    if group.epoch != epoch and not members:
        return NextGroup(), None  # no attempt is open: those of an earlier epoch ended with the epoch behind it
    if (group.epoch, group.members) == (epoch, members):
        is_again = group.failed_after is not None and state.committed > group.failed_after
        if not is_again or group.failures == _MOST_FAILURES:
            return group, None
        new = group._replace(number=group.number + 1, formed=frozenset(), failed_after=None)
    else:
        new = NextGroup(epoch, group.number + 1 if group.epoch == epoch else 1, members)
    return new, NextGroupMessage(new.epoch, new.number, new.members)


def heard_of(
    group: NextGroup, state: State, worker: int, told: NextGroupFormedMessage
) -> tuple[NextGroup, NextGroupMessage | None]:
    """Returns the attempt after the answer of a worker, and the order to give it up if it failed there."""
    is_open = group.failed_after is None and (group.epoch, group.number) == (told.epoch, told.number)
    if not is_open or worker not in group.members:
        return group, None
    if not told.failure:
        return group._replace(formed=group.formed | {worker}), None
    new = group._replace(failures=group.failures + 1, failed_after=state.committed, formed=frozenset())
    return new, NextGroupMessage(group.epoch, group.number, ())


def ready_joiners(group: NextGroup, state: State) -> tuple[int, ...]:
    """Returns the workers that can join with the commit of the open step: the group has formed with them."""
    is_due = group.is_formed and group.epoch == state.epoch + 1 and group.members == _wanted(state)
    return state.joiners if is_due else ()


def _wanted(state: State) -> tuple[int, ...]:
    """Returns the members of the group that is wanted; none if no worker can join with the coming commit."""
    is_last = state.committed + 1 >= state.last_step
    if not state.waiting or state.phase is not Phase.RUNNING or is_last or not (joiners := state.joiners):
        return ()
    return tuple(sorted((*state.members, *joiners)))
