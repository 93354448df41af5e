"""Who inherits the slots of the dead and of those who leave, and who of the leaving is still needed."""

from __future__ import annotations

from engine.core.protocol.events import Notice
from engine.core.protocol.state import Options, Phase, State, begin
from engine.core.protocol.verdicts import free_to_leave, handed_over, heirs, leavers, unable_to_leave
from tests.core.membership_cases import S, running, told
from tests.looped import looped

Shadows = tuple[tuple[int, ...], ...]


def leaving(*workers: int) -> State:
    """Returns a running job of which some workers have given notice."""
    return told(running(), *(Notice(5, worker, S) for worker in workers))


@looped(
    ("shadows", "dead", "owners", "left", "lost"),
    [
        (((2,), (0,), (1,)), (), (0, 1, 2), ((2,), (0,), (1,)), ()),
        (((2,), (0,), (1,)), (1,), (0, 0, 2), ((2,), (), ()), ()),
        (((2, 1), (0, 2), (1, 0)), (1,), (0, 0, 2), ((2,), (2,), (0,)), ()),
        (((2, 1), (0, 2), (1, 0)), (0, 1), (2, 2, 2), ((), (), ()), ()),
        (((2,), (0,), (1,)), (1, 2), (0, 0, 2), ((), (), ()), (2,)),
        (((2,), (0,), (1,)), (0, 1), (2, 1, 2), ((), (), ()), (1,)),
        (((), (), ()), (1,), (0, 1, 2), ((), (), ()), (1,)),
        (((7,), (7,), (7,)), (1,), (0, 1, 2), ((), (), ()), (1,)),
    ],
)
def test_the_first_live_shadow_inherits(
    shadows: Shadows, dead: tuple[int, ...], owners: tuple[int, ...], left: Shadows, lost: tuple[int, ...]
) -> None:
    assert heirs(running()._replace(shadows=shadows), dead) == (owners, left, lost)


def test_the_same_stage_of_another_pipeline_inherits_after_the_shadows() -> None:
    state = running()._replace(
        options=Options(stages=2, redundant=True),
        members=(0, 1, 2, 3, 4, 5),
        owners=(0, 1, 2, 3, 4, 5),
        shadows=((),) * 6,
    )
    assert heirs(state, (1,)).owners == (0, 3, 2, 3, 4, 5), "the next pipeline first"
    assert heirs(state, (1, 3)).owners == (0, 5, 2, 5, 4, 5)
    assert heirs(state, (1, 3, 5)).lost == (1, 3, 5)
    shadowed = state._replace(shadows=((), (2,), (), (), (), ()))
    assert heirs(shadowed, (1,)).owners == (0, 2, 2, 3, 4, 5), "a shadow of its own first"
    assert heirs(shadowed, (3, 5)).owners == (0, 1, 2, 1, 4, 1)
    assert heirs(shadowed, (1, 3, 5)).owners == (0, 2, 2, 2, 4, 2), "the shadow of one pipeline serves them all"
    assert heirs(shadowed, (1, 3, 5)).shadows == ((), (), (), (), (), ())


def test_a_shard_goes_to_its_own_shadow_only() -> None:
    state = running()._replace(
        options=Options(stages=2, redundant=True, sharded=True),
        members=(0, 1, 2, 3),
        owners=(0, 1, 2, 3),
        shadows=((1,), (0,), (), (2,)),
    )
    assert heirs(state, (1,)) == ((0, 0, 2, 3), ((), (), (), (2,)), ())
    assert heirs(state, (2,)) == ((0, 1, 2, 3), ((1,), (0,), (), ()), (2,))
    assert heirs(state, (3,), hand_over=True).owners == (0, 1, 2, 2)


def test_who_can_never_leave_is_known_with_its_stages() -> None:
    assert unable_to_leave(running()) == unable_to_leave(leaving(1)) == unable_to_leave(leaving(0, 1)) == {}
    assert unable_to_leave(leaving(0, 1, 2)) == {0: (0,), 1: (1,), 2: (2,)}
    assert unable_to_leave(leaving(0, 1, 2)._replace(waiting=(3,), eager=(3,))) == {}, "it joins, and takes over"
    assert unable_to_leave(leaving(0, 1, 2)._replace(waiting=(3,), eager=(3,), cramped={3: "waits on"})) != {}
    none = Options(stages=3, redundant=False)
    assert unable_to_leave(leaving(1)._replace(options=none, shadows=((), (), ()))) == {1: (1,)}
    twice = leaving(1)._replace(options=none, members=(0, 1, 2, 3), owners=(0, 1, 2, 0, 3, 2), shadows=((),) * 6)
    assert unable_to_leave(twice) == {}, "another pipeline has the stage"
    assert unable_to_leave(twice._replace(owners=(0, 1, 1, 0, 3, 1))) == {1: (2,)}


def test_nobody_waits_for_a_shadow_that_never_comes() -> None:
    state = leaving(1)._replace(
        options=Options(stages=1, redundant=False), members=(0, 1), owners=(0, 0), shadows=((), (1,))
    )
    assert free_to_leave(state) == (1,)
    assert free_to_leave(state._replace(options=Options(stages=1, redundant=True))) == (1,), "nobody else could be one"
    more = state._replace(members=(0, 1, 2))
    assert free_to_leave(more) == (1,)
    assert free_to_leave(more._replace(options=Options(stages=1, redundant=True))) == ()


def test_whoever_stays_inherits_before_whoever_leaves() -> None:
    state = leaving(0)._replace(shadows=((1,), (0, 2), (0,)))
    assert heirs(state, (1,)).owners == (0, 2, 2)
    assert heirs(state, (2,)).owners == (0, 1, 0), "better than losing the slot"


def test_a_hand_over_keeps_the_replica_of_the_leaver() -> None:
    assert heirs(leaving(2), (), hand_over=True) == ((0, 1, 1), ((2,), (0,), (2,)), ())
    assert heirs(leaving(2), ()) == ((0, 1, 2), ((2,), (0,), (1,)), ()), "in the middle of a step nothing moves"


def test_nothing_is_handed_over_to_another_leaver() -> None:
    state = leaving(1, 2)
    assert heirs(state, (), hand_over=True).owners == (0, 0, 2)
    assert leavers(state) == (1,)
    assert leavers(leaving(0, 1, 2)) == ()


@looped(
    ("members", "owners", "shadows", "gone"),
    [
        ((0, 1, 2), (0, 1, 2), ((1,), (0,), (0,)), ()),  # it owns a slot
        ((0, 1, 2), (0, 1, 1), ((2,), (0,), (0,)), ()),  # it is the only shadow, and another could be
        ((0, 1, 2), (0, 1, 1), ((2, 1), (0,), (2, 0)), (2,)),
        ((0, 1, 2), (0, 1, 1), ((1,), (0,), (0,)), (2,)),
        ((0, 2), (0, 0, 0), ((2,), (2,), (2,)), (2,)),  # nobody else could be a shadow
        ((0, 1), (0, 1, 1), ((1,), (0,), (0,)), ()),  # it has gone already
    ],
)
def test_a_leaver_goes_when_every_slot_lives_without_it(
    members: tuple[int, ...], owners: tuple[int, ...], shadows: Shadows, gone: tuple[int, ...]
) -> None:
    state = leaving(2)._replace(members=members, owners=owners, shadows=shadows)
    assert free_to_leave(state) == gone


def test_the_words_of_a_move_have_the_pipeline_where_there_are_several() -> None:
    """Slots 1 and 3 of two pipelines with two stages are stage 1 in both."""
    state = begin(Options(stages=2, redundant=True), (0, 0, 1, 1), ((1,), (1,), (0,), (0,)), 9, 0)
    state = state._replace(phase=Phase.RUNNING, epoch=1)
    told = handed_over(state._replace(wanted=(0, 1, 1, 0), wanted_why="x"), 5).reason
    assert told == "stages move after step -1 (x): stage 1 of pipeline 1 to worker 0; stage 1 of pipeline 0 to worker 1"
