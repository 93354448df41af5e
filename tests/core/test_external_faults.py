"""Faults in jobs of other launchers: their moments, their signals, and the ranks that a launcher's variables name."""

from __future__ import annotations

from dataclasses import replace

from engine.core.faults.external import (
    ANY_RANK,
    ExternalFault,
    ExternalMoment,
    ExternalScenario,
    ExternalTarget,
    JobView,
    PendingFaults,
    external_problems,
)
from engine.core.faults.launchers import LAUNCHERS, PLAIN, Launcher, blamed, is_notice, launcher_of
from tests.looped import looped

MS = 1_000_000
RANK_1 = ExternalTarget(1)
TORCHRUN = LAUNCHERS["torchrun"]


def scenario(*faults: ExternalFault) -> ExternalScenario:
    """Returns a scenario with faults, of a job of 100 steps."""
    return ExternalScenario("mine", "", ("torchrun",), TORCHRUN, faults, steps=100, checkpoint="*.pt")


def fault(moment: ExternalMoment, target: ExternalTarget = RANK_1) -> ExternalFault:
    """Returns a kill."""
    return ExternalFault("first", moment, target, "kill")


@looped(
    ("moment", "before", "after"),
    [
        (ExternalMoment(step=5, rank=1), JobView(0, {0: 5, 1: 4}), JobView(0, {0: 5, 1: 5})),
        (ExternalMoment(step=5), JobView(0, {0: 4}), JobView(0, {0: 4, 1: 5})),
        (ExternalMoment(step=5, rank=1), JobView(0, {ANY_RANK: 4}), JobView(0, {ANY_RANK: 6})),
        (ExternalMoment(progress="50%"), JobView(0, {0: 48}), JobView(0, {0: 49})),
        (ExternalMoment(after_ns=70 * MS), JobView(40 * MS), JobView(30 * MS)),
        (ExternalMoment(during="checkpoint"), JobView(0), JobView(0, is_writing=True)),
    ],
)
def test_a_moment_comes_once_and_not_before(moment: ExternalMoment, before: JobView, after: JobView) -> None:
    wanted = fault(moment)
    pending = PendingFaults(scenario(wanted), [wanted])
    assert pending.due(before, 100 * MS) == []
    assert pending.due(after, 100 * MS) == [wanted]
    assert pending.due(after, 100 * MS) == []


def test_a_delay_counts_from_the_moment() -> None:
    wanted = fault(ExternalMoment(step=5, delay_ns=20 * MS))
    pending = PendingFaults(scenario(wanted), [wanted])
    assert [bool(pending.due(JobView(0, {0: 5}), at * MS)) for at in (100, 119, 120)] == [False, False, True]


def test_a_restart_is_awaited_behind_another_fault_only() -> None:
    first, again = fault(ExternalMoment(step=5)), replace(fault(ExternalMoment(during="restart")), id="second")
    pending = PendingFaults(scenario(first, again), [first, again])
    assert pending.due(JobView(0, restarted=frozenset({1})), 0) == []
    assert pending.due(JobView(0, {0: 5}), 0) == [first]
    assert pending.due(JobView(0, {0: 5}, frozenset({0})), 0) == []
    assert pending.due(JobView(0, {0: 5}, frozenset({0, 1})), 0) == [again]


@looped(
    ("given", "of_launcher", "field", "hint"),
    [
        (fault(ExternalMoment(step=5), ExternalTarget(2)), TORCHRUN, "faults.0.target", "the command starts 2"),
        (fault(ExternalMoment(step=5, rank=2)), TORCHRUN, "faults.0.at.rank", "the command starts 2"),
        (fault(ExternalMoment(step=5), ExternalTarget()), TORCHRUN, "faults.0.target", "name the victim"),
        (
            fault(ExternalMoment(step=5), ExternalTarget(launcher=True)),
            PLAIN,
            "faults.0.target.launcher",
            "plain has no process above its ranks",
        ),
        (fault(ExternalMoment(progress="150%")), TORCHRUN, "faults.0.at.progress", ""),
        (
            fault(ExternalMoment(during="restart")),
            TORCHRUN,
            "faults.0.at.during",
            "another fault must make the rank start again",
        ),
        (fault(ExternalMoment(step=5), ExternalTarget(1, child="(")), TORCHRUN, "faults.0.target.child", "missing"),
    ],
)
def test_what_can_never_strike_is_refused(given: ExternalFault, of_launcher: Launcher, field: str, hint: str) -> None:
    wanted = replace(scenario(given), launcher=of_launcher)
    (problem,) = external_problems(wanted, 2, is_attached=False)
    assert problem.field == field and problem.hint.startswith(hint)


@looped(
    ("command", "name", "num_ranks"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun", 2),
        ("python -m torch.distributed.run --nproc_per_node=4 train.py", "torchrun", 4),
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py", "torchrun", None),
        ("torchrun --nnodes=1 --nproc-per-node 4 train.py", "torchrun", 4),
        ("/opt/bin/accelerate launch --num_processes 2 train.py", "accelerate", 2),
        ("mpirun -np 3 python train.py", "mpirun", 3),
        ("python train.py", "plain", None),
    ],
)
def test_a_command_names_its_launcher_and_its_ranks(command: str, name: str, num_ranks: int | None) -> None:
    launcher = launcher_of(command.split())
    assert (launcher.name, launcher.starts(command.split())) == (name, num_ranks)


def test_ranks_are_read_from_the_environment() -> None:
    assert TORCHRUN.rank_of({"RANK": "3", "LOCAL_RANK": "1"}) == 3
    assert TORCHRUN.rank_of({"SLURM_PROCID": "2"}) == 2 and TORCHRUN.rank_of({"LOCAL_RANK": "1"}) == 1
    assert TORCHRUN.rank_of({"RANK": "x"}) is None and TORCHRUN.rank_of({}) is None
    assert LAUNCHERS["torchft"].rank_of({"RANK": "1", "WORLD_SIZE": "2", "REPLICA_GROUP_ID": "3"}) == 7


def test_torchrun_blames_by_pid() -> None:
    line = "E1127 api.py:1002] failed (exitcode: -9) local_rank: 1 (pid: 6140) of binary: python"
    assert blamed(TORCHRUN, line) == [{"local_rank": 1, "pid": 6140}] and is_notice(TORCHRUN, line)
    assert is_notice(TORCHRUN, "W1127 api.py:1028] Sending process 6139 closing signal SIGTERM")
    assert not blamed(TORCHRUN, "rank=1 step=3") and not is_notice(PLAIN, line)


@looped(
    ("name", "line", "numbers"),
    [
        (
            "nvrx",
            "[ERROR] [ft_launcher31807@vm] failed (exitcode: -9) local_rank: 1 (pid: 31947) of binary: python",
            [{"local_rank": 1, "pid": 31947}],
        ),
        (
            "nvrx-inprocess",
            "WARNING:nvidia_resiliency_ext.inprocess.wrap:rank=0 term_ex: RankShouldRestart('Interruption.EXCEPTION on "
            "ranks={0}, Interruption.TERMINATED on ranks={1, 3}')",
            [{"rank": 1}, {"rank": 3}],
        ),
        ("ray", "\x1b[36m(TrainController pid=32477)\x1b[0m [Rank 1 Error Snippet]:", [{"rank": 1}]),
        (
            "deepspeed",
            "[2026-11-28 04:20:23,422] [INFO] [launch.py:253:sigkill_handler] Killing subprocess 12233",
            [],
        ),
        ("bamboo", "worker 1 was killed (SIGKILL) in step 51 after 1F1; worker 0 took over stage 1", [{"rank": 1}]),
        ("bamboo", "worker 1 has been silent for 10.2 s and is evicted; worker 0 takes over", [{"rank": 1}]),
        ("bamboo", "worker 1 hands over at the boundary after step 51 or a few later", [{"rank": 1}]),
        ("bamboo", "step 52/120  loss 1.9293  no step for 4 s: waiting for worker 1, silent for 5 s", []),
    ],
)
def test_words_of_launchers_as_they_wrote_them(name: str, line: str, numbers: list[dict[str, int]]) -> None:
    assert blamed(LAUNCHERS[name], line) == numbers
    assert is_notice(LAUNCHERS[name], line) or name == "bamboo"


def test_a_worker_of_bamboo_has_its_rank_in_its_title() -> None:
    launcher = LAUNCHERS["bamboo"]
    assert [launcher.rank_of({}, title) for title in ("bamboo-1", "bamboo-fork", "python")] == [1, None, None]
    assert TORCHRUN.rank_of({}, "bamboo-1") is None
