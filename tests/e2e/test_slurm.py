"""`bamboo launch slurm --submit` on a real Slurm of three nodes: the outcome in etcd is 0, whatever srun says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.slurm_bed import SlurmBed, slurm_bed

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]
BAMBOO = str(Path(sys.executable).with_name("bamboo"))
JOB = "model: gpt\nstages: 3\nsteps: 16\ncheckpoint_every: 0\n"
LAUNCH = ["bamboo", "launch", "slurm", "job.yaml", "--hosts", "3", "--trusted-network", "10.99.0.0/24", "--submit"]
LOST_AT = 4  # commits
OVER_S = 150.0


class Submitted:
    """A run as a job of Slurm, in a folder that all nodes share."""

    def __init__(self, bed: SlurmBed, folder: Path, *options: str):
        self.bed, self.folder = bed, folder
        folder.mkdir()
        (folder / "job.yaml").write_text(JOB)
        done = bed.ask(*LAUNCH, *options, cwd=folder)
        assert done.returncode == 0, done.stderr
        wrote, told = done.stdout.splitlines()
        assert wrote == "wrote launch-job/job.sbatch"
        self.number = told.removeprefix("Submitted batch job ")

    def until_commits(self, number: int) -> None:
        """Waits for commits of the run."""
        events = self.folder.glob
        self.bed.until(
            lambda: any(each.read_text().count('{"event":"commit"') >= number for each in events("results/*/ev*.jsonl"))
        )

    def end(self) -> str:
        """Waits for the end of the job; returns its state and its exit code."""
        self.bed.until(lambda: not self.bed.told("squeue", "--noheader", f"--job={self.number}"), OVER_S)
        told = self.bed.told("scontrol", "show", "job", self.number)
        return " ".join(re.findall(r"(?:JobState|ExitCode)=(\S+)", told))

    @property
    def log(self) -> str:
        """The words of the script, and of all agents."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("bamboo-job-*.log")))

    def outcome(self) -> int:
        """Returns the outcome in etcd."""
        return self.bed.ask("bamboo", "status", "--wait", f"slurm-{self.number}", cwd=self.folder).returncode


def trajectory_of(text: str) -> str:
    (found,) = set(re.findall(r"trajectory ([0-9a-f]+)", text))
    return str(found)


@pytest.fixture(name="one", scope="module")
def _one(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The trajectory of one host."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "job.yaml").write_text(JOB)
    command = [BAMBOO, "run", "job.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=True)
    return trajectory_of(done.stdout)


@pytest.mark.parametrize(
    ("loses", "srun", "end"),
    [
        ("nothing", "0", "COMPLETED 0:0"),
        ("a task", "137", "COMPLETED 0:0"),
        ("a node", "0", "COMPLETED 0:0"),
        ("the first node", "", "CANCELLED 0:0"),  # it has the script; another task ends the job
    ],
)
def test_the_outcome_of_a_run_is_that_of_one_host(tmp_path: Path, one: str, loses: str, srun: str, end: str) -> None:
    with slurm_bed(tmp_path) as bed:
        run = Submitted(bed, tmp_path / "work")
        run.until_commits(LOST_AT)
        if loses == "a task":
            assert (
                bed.nodes[1].run("pkill", "-KILL", "-f", "bin/bamboo agent").returncode == 0
            )  # of its processes alone
        elif loses != "nothing":
            bed.nodes[loses == "a node"].power_off()
        assert run.end() == end, run.log + bed.logs()
        assert run.outcome() == 0, run.log
        assert trajectory_of(run.log) == one
        assert "".join(re.findall(r"^srun: (\d+)$", run.log, re.MULTILINE)) == srun
        assert len(re.findall(r"^host h\d is lost: ", run.log, re.MULTILINE)) == (loses != "nothing")


def test_a_notice_before_the_time_limit_ends_the_run_with_its_last_commit(tmp_path: Path) -> None:
    with slurm_bed(tmp_path) as bed:
        run = Submitted(bed, tmp_path / "work", "--set", "steps=2000")
        run.until_commits(LOST_AT)
        bed.told("scancel", "--signal=TERM", run.number)  # what Slurm sends --grace seconds before the end
        assert run.end() == "FAILED 143:0", run.log + bed.logs()
        assert run.outcome() == 143
        assert re.search(r"interrupted: \d+ steps .* last committed step \d+", run.log)
        assert "and the run continues" not in run.log


def test_a_task_has_a_core_for_each_worker_of_its_node(tmp_path: Path) -> None:
    with slurm_bed(tmp_path) as bed:
        run = Submitted(bed, tmp_path / "work", "--set", "stages=6", "--set", "steps=2")
        assert run.end() == "COMPLETED 0:0", run.log + bed.logs()
        assert "NumCPUs=6" in bed.told("scontrol", "show", "job", run.number)
