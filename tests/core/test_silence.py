"""The ranks that stand still, from made-up signs of processes."""

from __future__ import annotations

from engine.core.checks.silence import RankSign, SilenceWatch

MS = 1_000_000
USUAL = RankSign(10, 0, "S", 0, 4)


def looked(*signs: RankSign, cpu_ms: tuple[int, ...] = (0, 0), until_ms: int = 1400) -> dict[int, str]:
    """Returns the ranks that were called still in looks every 200 ms, in which they worked so much in all."""
    watch, still = SilenceWatch(), dict[int, tuple[int, str]]()
    for now_ms in range(0, until_ms + 1, 200):
        worked = [ms * MS * now_ms // until_ms for ms in cpu_ms]
        now = {rank: sign._replace(cpu_ns=worked[rank]) for rank, sign in enumerate(signs)}
        still |= watch.look(now, now_ms * MS)
    return {rank: why for rank, (_, why) in still.items()}


def test_a_stopped_rank_is_silent_and_those_that_wait_for_it_are_not() -> None:
    assert looked(USUAL, USUAL._replace(state="T")) == {0: "", 1: "stopped"}
    assert looked(USUAL, USUAL._replace(state="D", unread=7)) == {0: "", 1: "stuck in the kernel"}


def test_unread_bytes_and_an_older_step_tell_a_silent_rank_from_a_waiting_one() -> None:
    assert looked(USUAL, USUAL._replace(unread=1204)) == {0: "", 1: "1,204 bytes of its peers unread"}
    assert looked(USUAL, USUAL._replace(step=3)) == {0: "", 1: "its newest step is 3, that of others 4"}
    assert looked(USUAL, USUAL._replace(step=-1)) == {0: "", 1: ""}, "it does not report its steps"
    assert looked(USUAL, USUAL) == {0: "", 1: ""}, "nothing tells them apart"


def test_a_rank_that_works_does_not_stand_still() -> None:
    assert looked(USUAL, USUAL, cpu_ms=(1400, 0)) == {1: ""}
    assert looked(USUAL, USUAL, cpu_ms=(20, 40)) == {0: ""}, "a watchdog thread needs a little"
    assert looked(USUAL, USUAL, until_ms=800) == {}


def test_a_step_and_a_new_process_begin_anew() -> None:
    watch = SilenceWatch()
    watch.look({0: USUAL}, 0)
    watch.step()
    assert watch.look({0: USUAL}, 1200 * MS) == {}
    assert watch.look({0: USUAL._replace(pid=11)}, 2400 * MS) == {}
    assert watch.look({}, 2500 * MS) == {}
    assert watch.look({0: USUAL._replace(pid=11)}, 3600 * MS) == {}
    assert watch.look({0: USUAL._replace(pid=11)}, 4700 * MS) == {0: (3600 * MS, "")}


def test_a_rank_is_told_once_in_a_silence_and_again_with_its_reason() -> None:
    watch = SilenceWatch()
    watch.look({0: USUAL}, 0)
    assert watch.look({0: USUAL}, 1200 * MS) == {0: (0, "")}
    assert watch.look({0: USUAL}, 1400 * MS) == {}
    assert watch.look({0: USUAL._replace(state="T")}, 1600 * MS) == {0: (0, "stopped")}
    assert watch.look({0: USUAL._replace(state="D")}, 1800 * MS) == {}
    watch.step()
    watch.look({0: USUAL}, 2000 * MS)
    assert watch.look({0: USUAL}, 3200 * MS) == {0: (2000 * MS, "")}
