"""Launchers of training jobs, one row each: how their ranks are recognised, and their words for a failure.

Adding a launcher is adding a row, or a package of the user with an entry point of the group `LAUNCHERS_GROUP`. Patterns
are searched in each line of the job's output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Launcher:
    """One launcher.

    `programs` name it in a command, as programs or modules. The first of `variables` that is in the environment of a
    process is its rank; with `group`, the rank counts the ranks of the groups before. Where none is, the `title` that
    the kernel shows may have the rank. `root_rank` is that of the command itself where nothing says one. `num_ranks`
    finds their number in the command. `blame` has a group (?P<rank>...), or local_rank or pid, or ranks for several; a
    line that it fits is the launcher's first notice too, as is one that `notice` fits. `progress` finds steps in the
    output, with a group (?P<step>...), where a scenario says nothing else.
    """

    name: str
    programs: tuple[str, ...] = ()
    variables: tuple[str, ...] = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
    group: str = ""
    title: str = ""
    root_rank: int | None = None
    num_ranks: str = ""
    several_hosts: str = ""
    blame: str = ""
    notice: str = ""
    progress: str = ""
    has_launcher: bool = True

    def starts(self, words: Sequence[str]) -> int | None:
        """Returns how many ranks a command starts on this host; None if its words do not say."""
        text = " ".join(words)
        if self.several_hosts and re.search(self.several_hosts, text):
            return None
        match = re.search(self.num_ranks, text) if self.num_ranks else None
        return int(match[1]) if match else None

    def rank_of(self, environment: Mapping[str, str], title: str = "") -> int | None:
        """Returns the rank of a process with this environment and title; None if it is none."""
        rank = next((int(text) for name in self.variables if (text := environment.get(name, "")).isdecimal()), None)
        group, size = environment.get(self.group, ""), environment.get("WORLD_SIZE", "")
        if rank is not None and group.isdecimal() and size.isdecimal():
            return int(group) * int(size) + rank
        if rank is None and self.title and (match := re.fullmatch(self.title, title)):
            return int(match[1])
        return rank

    def group_of(self, environment: Mapping[str, str]) -> int | None:
        """Returns the group of a process: of replicas, of the agent of torchrun, or of the node; None without one."""
        names = (self.group,) if self.group else _GROUPS
        return next((int(text) for name in names if (text := environment.get(name, "")).isdecimal()), None)


_GROUPS = ("GROUP_RANK", "SLURM_NODEID", "OMPI_COMM_WORLD_NODE_RANK")
LAUNCHERS_GROUP = "bamboo.launchers"  # of entry points: each is a `Launcher`, under its name

_TORCHRUN = Launcher(
    "torchrun",
    ("torchrun", "torch.distributed.run", "torch.distributed.launch"),
    num_ranks=r"--nproc[-_]per[-_]node[= ](\d+)",
    several_hosts=r"--nnodes[= ](?!1(?::1)?(?: |$))",
    blame=r"failed \(exitcode: \S+\) local_rank: (?P<local_rank>\d+) \(pid: (?P<pid>\d+)\)",
    notice=r"(?:Closing|Sending) process \d+ (?:via|closing) signal|worker group .*will restart",
)
ANY = "any"  # in a scenario: the launcher that the command names
PLAIN = Launcher("plain", root_rank=0, has_launcher=False)
LAUNCHERS = {
    launcher.name: launcher
    for launcher in (
        replace(_TORCHRUN, name="torchft", programs=("torchft",), group="REPLICA_GROUP_ID"),
        _TORCHRUN,
        replace(_TORCHRUN, name="nvrx", programs=("ft_launcher", "nvidia_resiliency_ext.fault_tolerance.launcher")),
        # `inprocess.Wrapper` numbers the processes anew in each restart, so a rank is whoever reports as it.
        Launcher(
            "nvrx-inprocess",
            variables=(),
            blame=r"Interruption\.(?!EXCEPTION)\w+ on ranks=\{(?P<ranks>[\d, ]+)\}",
            notice=r"nvidia_resiliency_ext\.inprocess\.wrap:rank=\d+ (?:fn|term)_ex: ",
        ),
        replace(
            _TORCHRUN,
            name="accelerate",
            programs=("accelerate", "accelerate.commands.launch"),
            num_ranks=r"--num[-_]processes[= ](\d+)",
            several_hosts=r"--num[-_]machines[= ](?!1\b)",
        ),
        Launcher(
            "deepspeed",
            ("deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch"),
            num_ranks=r"--num_gpus[= ](\d+)",
            notice=r"Killing subprocess \d+",
        ),
        # The command itself is rank 0, and starts the others with LOCAL_RANK.
        Launcher(
            "lightning",
            ("lightning",),
            ("RANK", "LOCAL_RANK"),
            root_rank=0,
            blame=r"Child process with PID (?P<pid>\d+) terminated",
            has_launcher=False,
        ),
        Launcher(
            "bamboo",
            ("bamboo", "bamboo_cli"),
            title=r"bamboo-(\d+)",
            blame=r"^worker (?P<rank>\d+) (?:was killed|has been silent for|hands over)",
        ),
        Launcher(
            "ray",
            ("ray",),
            blame=r"\[Rank (?P<rank>\d+) Error Snippet\]",
            notice=r"\(raylet\).* A worker died or was killed|\[FailurePolicy\]",
        ),
        Launcher("srun", ("srun",), blame=r"task (?P<rank>\d+): (?:Killed|Terminated|Exited)"),
        Launcher("mpirun", ("mpirun", "mpiexec"), num_ranks=r" -(?:n|np) (\d+)", blame=r"rank (?P<rank>\d+) with PID"),
        PLAIN,
    )
}


def launcher_of(words: Sequence[str]) -> Launcher:
    """Returns the launcher that a command names, behind any others such as `python -m`; else the plain one."""
    names = [word.rpartition("/")[2] for word in words]
    named = (launcher for launcher in LAUNCHERS.values() if any(name in launcher.programs for name in names))
    return next(named, PLAIN)


def blamed(launcher: Launcher, line: str) -> list[dict[str, int]]:
    """Returns, for each process that a line of output blames, the numbers that it has there, such as its pid."""
    match = re.search(launcher.blame, line) if launcher.blame else None
    groups = {} if match is None else {name: text for name, text in match.groupdict().items() if text}
    if ranks := groups.get("ranks"):
        return [{"rank": int(number)} for number in re.findall(r"\d+", ranks)]
    return [{name: int(text) for name, text in groups.items()}] if groups else []


def is_notice(launcher: Launcher, line: str) -> bool:
    """Returns whether a line of output says that the launcher has noticed a failure."""
    return any(pattern and re.search(pattern, line) is not None for pattern in (launcher.blame, launcher.notice))
