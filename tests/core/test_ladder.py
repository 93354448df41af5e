"""The ladder: a run goes on from checkpoints a few times in an hour, then stops so that it can be resumed."""

from __future__ import annotations

from engine.core.checkpoint_rules import Ladder, next_rung
from engine.core.errors import ExitCode

S = 1_000_000_000


def test_without_a_good_checkpoint_the_state_is_lost() -> None:
    assert next_rung(Ladder(3), None, 0) == (Ladder(3), ExitCode.STATE_LOST)


def test_a_run_goes_on_until_its_restarts_are_used_up() -> None:
    ladder, codes = Ladder(2), []
    for at_s in (10, 20, 30):
        ladder, code = next_rung(ladder, 5, at_s * S)
        codes.append(code)
    assert codes == [None, None, ExitCode.STOPPED_RESUMABLE]
    assert next_rung(Ladder(0), 5, 0)[1] is ExitCode.STOPPED_RESUMABLE


def test_restarts_count_for_an_hour() -> None:
    ladder = Ladder(1, (10 * S,))
    assert next_rung(ladder, 0, 3609 * S)[1] is ExitCode.STOPPED_RESUMABLE
    assert next_rung(ladder, 0, 3610 * S)[1] is None
