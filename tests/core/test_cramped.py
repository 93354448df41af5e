"""A newcomer without memory for one slot waits on: it is no joiner, and no verdict takes it in."""

from __future__ import annotations

from collections.abc import Mapping

from engine.codec.documents import state_of, state_text
from engine.core.history.run_records import CrampedRecord
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.core.messages import EpochMessage, GoMessage, WaitingMessage
from engine.core.ownership import Members
from engine.core.protocol.coordinator import step as coordinate
from engine.core.protocol.coordinator_state import begin as begin_coordinator
from engine.core.protocol.events import ExitSeen, MemoryShortage, Notice, WorkerWord
from engine.core.protocol.inputs_outputs import Note, Write
from engine.core.protocol.rebalancing import LOOK_AGAIN_NS, MemoryLook, look_for_memory
from engine.core.protocol.state import State
from engine.core.protocol.worker_times import WorkerTimes
from tests.core.membership_cases import running, told

JOB = Job(stages=3, blocks=4, elastic=True)
SIZE = StageBytes(weights=100, whole=100, trained=100, optimizer=200, buffers=0, output=10)  # 400 for an owner
SIZES = WorkerTimes(sizes=dict.fromkeys(range(12), SIZE))
FULL = {3: "keeps waiting: one block takes 0.4 kB, and it has 0.3 kB"}


def waits(worker: int = 3, *, joins: bool = True) -> WorkerWord[WaitingMessage]:
    return WorkerWord(5, worker, WaitingMessage(joins), "host")


def looked(
    state: State,
    free_bytes: int | None,
    newcomers: tuple[int, ...] = (3,),
    last: MemoryLook | None = None,
    now_ns: int = 7,
    times: WorkerTimes = SIZES,
) -> tuple[MemoryLook, Mapping[int, str] | None]:
    look, found = look_for_memory(last or MemoryLook(), JOB, state, newcomers, now_ns, times, lambda: free_bytes)
    return look, None if found is None else found.workers


def test_free_memory_is_shared_out_between_members_and_newcomers() -> None:
    state = told(running(), waits())
    assert looked(state, 4 * 400)[1] is None
    assert looked(state, 4 * 300)[1] == FULL
    assert looked(state, None)[1] is None, "workers compute on GPUs, and nobody knows"
    assert looked(state, 0, times=WorkerTimes())[1] is None, "no step has told the sizes of blocks"


def test_a_newcomer_is_cramped_before_it_waits() -> None:
    assert looked(running(), 4 * 300)[1] == FULL
    state = told(running(), MemoryShortage(6, FULL), waits())
    assert (state.waiting, state.joiners) == ((3,), ())


def test_memory_for_one_more_goes_to_one_that_joins_and_then_by_number() -> None:
    state = told(running(), waits(3, joins=False), waits(5), waits(4))
    found = looked(state, 4 * 400, (3, 4, 5))[1]
    assert found is not None and sorted(found) == [3, 5]
    assert looked(told(state, MemoryShortage(6, found)), 4 * 400, (3, 4, 5))[1] is None, "it keeps its part"


def test_a_cramped_worker_joins_when_more_memory_is_there_than_it_needs() -> None:
    state = told(running(), waits(), MemoryShortage(6, FULL))
    assert looked(state, 4 * 420)[1] is None, "less than a tenth more"
    assert looked(state, 4 * 440)[1] == {}
    assert told(state, MemoryShortage(8, {})).joiners == (3,)
    left = told(state, Notice(8, 0, 60_000_000_000), Notice(8, 1, 60_000_000_000))
    assert looked(left, 4 * 300)[1] == {}, "two leave, so the parts are larger"


def test_it_is_looked_at_seldom_unless_something_changes() -> None:
    state = told(running(), waits(), MemoryShortage(6, FULL))
    last, _ = looked(state, 0)
    assert looked(state, 4 * 4000, last=last, now_ns=7 + LOOK_AGAIN_NS - 1) == (last, None)
    assert looked(state, 4 * 4000, last=last, now_ns=7 + LOOK_AGAIN_NS)[1] == {}
    assert looked(told(state, waits(4)), 5 * 4000, (3, 4), last)[1] == {}
    assert looked(running(), 0, (), last) == (last, None), "nobody waits"


def test_a_verdict_leaves_a_cramped_worker_waiting() -> None:
    state = told(running(), waits(), waits(4, joins=False), MemoryShortage(6, FULL), ExitSeen(8, 1, -9))
    assert (state.members, state.waiting, dict(state.cramped)) == ((0, 2, 4), (3,), FULL)
    assert state_of(state_text(state), 0).cramped == FULL, "the next coordinator knows it"
    assert told(state, ExitSeen(9, 3, -9)).cramped == {}
    assert told(running(), MemoryShortage(6, {0: "waits on"})).cramped == {}, "a member is none"


def test_it_is_said_once_that_a_worker_waits_on_and_that_it_may_join() -> None:
    epoch = EpochMessage(1, Members.of((0, 1, 2)), False, False, None, None, GoMessage(False, False))
    state = begin_coordinator(JOB, running(), 0)._replace(epoch=epoch, started=1)
    state, early = coordinate(state, MemoryShortage(6, FULL))
    state, waiting = coordinate(state, waits())
    state, again = coordinate(state, MemoryShortage(7, {3: "waits on, in other words"}))
    state, free = coordinate(state, MemoryShortage(8, {}))
    assert early == again == ()
    assert waiting[1:] == (Write(CrampedRecord(of=3, why=FULL[3])), Note(f"worker 3 {FULL[3]}"))
    may_join = Note("worker 3 has memory for a block now, and may join")
    assert [each for each in free if isinstance(each, Write | Note)] == [Write(CrampedRecord(of=3, why="")), may_join]


def test_a_verdict_takes_in_as_many_as_are_missing() -> None:
    """What a failure costs does not grow with the workers that wait."""
    crowd = [waits(worker, joins=False) for worker in range(3, 103)]
    state = told(running(), *crowd, ExitSeen(8, 1, -9))
    assert (state.members, state.waiting) == ((0, 2, 3), tuple(range(4, 103)))
    assert told(state, ExitSeen(9, 2, -9)).members == (0, 3, 4)
    grown = told(running()._replace(members=(0, 1, 2, 3)), *crowd[1:], ExitSeen(8, 1, -9))
    assert grown.members == (0, 2, 3, 4), "more than it began with"
