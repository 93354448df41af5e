"""`bamboo launch`: the files for Slurm, Kubernetes, Ray and ssh, and that the loss of one host ends no other."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.errors import EnvironmentLacksError, UserError
from engine.core.hosts.launch import TLS_FILES

ETCD = ["--etcd", "10.0.0.1:2379", "--etcd-plain-http", "--trusted-network", "10.0.0.0/8"]
JOB = "model: gpt\nstages: 3\nsteps: 4\ncheckpoint_every: 0\n"
CODES = {"a": 0, "b": 137, "c": 0}  # of the agents: the one on b is killed


@pytest.fixture(name="job", autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        *TLS_FILES.values(),
        "BAMBOO_ETCD",
        *(f"BAMBOO_ETCD_{each}" for each in ("USER", "PASSWORD", "PASSWORD_FILE")),
    ):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "my job.yaml"  # a shell has to be told that this is one word
    path.write_text(JOB)
    return path


def launched(place: str, job: Path, *words: str) -> str:
    name = () if "--name" in words else ("--name", "tried")
    line = ["launch", place, str(job), *name, *words]
    return CliRunner().invoke(app, line, catch_exceptions=False).stdout


def program(folder: Path, name: str, text: str) -> None:
    """Puts a program of this name on the path of a test."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def bamboo_in(folder: Path, asked: int = 0) -> None:
    """A program `bamboo` that records its words, and ends as the agent of its node, or with the outcome."""
    program(
        folder,
        "bamboo",
        f"""#!{sys.executable}
import json, sys
words = sys.argv[1:]
node = words[words.index("--node") + 1] if "--node" in words else "asks"
with open({str(folder / "told")!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
sys.exit({CODES | {"asks": asked}}.get(node, 0))
""",
    )


def ran(command: list[str], folder: Path, **environment: str) -> tuple[int, list[list[str]]]:
    """Runs a file with the programs of a folder; returns its code, and the words of each agent by node."""
    variables = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(folder), **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (folder / "told").exists(), done.stderr
    told = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
    return done.returncode, sorted(told, key=node_of)


def node_of(words: list[str]) -> str:
    return words[words.index("--node") + 1] if "--node" in words else "asks"


def nodes(told: list[list[str]]) -> list[str]:
    return [node_of(words) for words in told]


@pytest.mark.parametrize(("asked", "expected"), [(0, 0), (80, 80), (69, 69), (5, 137)])  # 5: there was no run
def test_slurm_starts_an_agent_per_node_and_exits_with_the_outcome_not_with_sruns(
    tmp_path: Path, job: Path, asked: int, expected: int
) -> None:
    text = launched("slurm", job, "--hosts", "3", *ETCD, "--grace", "90", "--sbatch", "--partition=train")
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--ntasks-per-node=1", "--no-kill", "--signal=TERM@90", "--partition=train"} < set(options)
    assert {"--cpus-per-task=1", "--no-requeue"} < set(options)
    (srun,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert srun.startswith("srun --no-kill --kill-on-bad-exit=0 --wait=0 ")
    folder = tmp_path / "path"
    bamboo_in(folder, asked)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # each task looks whether srun is there
        place = f"export SLURM_SRUN_COMM_HOST=127.0.0.1 SLURM_SRUN_COMM_PORT={listener.getsockname()[1]}\n"
        tasks = 'shift 5\nfor n in a b c; do SLURMD_NODENAME=$n "$@" & done; wait; exit 137\n'
        program(folder, "srun", f"#!/bin/bash\n{place}{tasks}")
        (tmp_path / "script").write_text(text)
        code, told = ran(["bash", str(tmp_path / "script")], folder, SLURM_JOB_ID="4711")
    assert (code, nodes(told)) == (expected, ["a", "asks", "b", "c"])
    assert told.pop(1) == ["status", "--etcd", ETCD[1], "--etcd-plain-http", "--wait", "slurm-4711"]
    assert {words[words.index("--run") + 1] for words in told} == {"slurm-4711"}
    assert {words[1] for words in told} == {str(job)}


def test_a_task_of_slurm_whose_srun_is_gone_ends_the_job_after_the_run(tmp_path: Path, job: Path) -> None:
    text = launched("slurm", job, "--hosts", "3", *ETCD)
    folder = tmp_path / "path"
    bamboo_in(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # where nobody listens any more
    place = f"export SLURM_SRUN_COMM_HOST=127.0.0.1 SLURM_SRUN_COMM_PORT={port} SLURMD_NODENAME=a\n"
    program(folder, "srun", f'#!/bin/bash\n{place}shift 5\nexec "$@"\n')
    program(folder, "scancel", f'#!/bin/sh\necho "$@" $(wc --lines < {folder}/told) >> {folder}/ended\n')
    (tmp_path / "script").write_text(text)
    ran(["bash", str(tmp_path / "script")], folder, SLURM_JOB_ID="4711")
    assert (folder / "ended").read_text() == "4711 2\n"  # the agent of the task, and one that has asked for the outcome


def test_slurm_may_be_told_the_nodes_and_a_core_is_for_each_worker(job: Path) -> None:
    text = launched("slurm", job, "--hosts", "a,b", *ETCD, "--lease", "9", "--sbatch", "-p train")
    assert "#SBATCH --nodelist=a,b\n" in text and "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --cpus-per-task=2\n" in text  # three workers on two hosts
    assert text.index("#SBATCH --cpus-per-task=2") < text.index("#SBATCH -p train\n")  # the last one counts
    assert f" --hosts a,b --etcd {ETCD[1]} " in text and " --lease 9 " in text


@pytest.mark.parametrize(("asked", "expected"), [(0, 0), (143, 143), (69, 0), (5, 0)])  # without it, that of an agent
def test_ssh_starts_an_agent_per_host_and_a_lost_one_ends_no_other(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch, asked: int, expected: int
) -> None:
    folder = tmp_path / "path"
    bamboo_in(folder, asked)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (tmp_path / "pass word").write_text("x")
    (tmp_path / "pass word").chmod(0o600)
    monkeypatch.setenv("BAMBOO_ETCD_USER", "me")  # ssh takes no variables along
    monkeypatch.setenv("BAMBOO_ETCD_PASSWORD_FILE", str(tmp_path / "pass word"))
    text = launched("ssh", job, "--hosts", "me@a,b,c", *ETCD, "--set", "model_args.width=64")
    program(folder, "ssh", '#!/bin/bash\n[ "$5" = c ] && exit 255\nexec env -i bash -c "${@: -1}"\n')
    (tmp_path / "script").write_text(text)
    code, told = ran(["bash", str(tmp_path / "script")], folder)
    assert (code, nodes(told)) == (expected, ["a", "asks", "b"])  # c was not reached
    agents = [told[0], told[2]]
    assert {words[words.index("--run") + 1] for words in agents} == {told[1][-1]}
    assert agents[0][-6:-4] == ["--set", "model_args.width=64"] and "a,b,c" in agents[0]
    variables = f"env BAMBOO_ETCD_USER=me 'BAMBOO_ETCD_PASSWORD_FILE={tmp_path}/pass word' {folder}/bamboo agent "
    assert variables in text.replace("'\"'\"'", "'")


def test_a_password_for_etcd_goes_into_no_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAMBOO_ETCD_PASSWORD", "1")
    monkeypatch.setenv("BAMBOO_ETCD_USER", "me")
    for place, hosts in (("ssh", "a,b"), ("ray", "2"), ("k8s", "2")):
        with pytest.raises(UserError, match=f"BAMBOO_ETCD_PASSWORD: expected none for {place}"):
            launched(place, job, "--hosts", hosts, *ETCD)
    assert launched("slurm", job, "--hosts", "2", *ETCD)  # which takes the environment along


RAY = '''
"""A stand-in for Ray: an actor is an object, a call is a result that is ready; the node of actor 1 is lost."""
import types, sys
class exceptions:
    class RayError(Exception): pass
class _Call:
    def __init__(self, at, make): self.at, self.make = at, make
    def remote(self, *words): return (self.at, lambda: self.make(*words))
class _Actor:
    def __init__(self, at, made): self.at, self.run = at, _Call(at, made.run)
class _Class:
    def __init__(self, kind): self.kind, self.at = kind, 0
    def options(self, scheduling_strategy):
        assert scheduling_strategy[0].strategy == "STRICT_SPREAD"
        self.at = scheduling_strategy[1]
        return self
    def remote(self): return _Actor(self.at, self.kind())
def remote(**settings):
    assert settings == {"num_cpus": 1, "max_restarts": 0}
    return _Class
at = [0]
class _Context:
    def get_node_id(self): return "abc"[at[0]]
    def get_job_id(self): return "01000000"
def get_runtime_context(): return _Context()
class util:
    @staticmethod
    def get_node_ip_address(): return "10.0.0.7"
def init(): pass
def wait(waiting, num_returns): return waiting[:1], waiting[1:]
def get(ref):
    if ref is None: return None
    at[0] = ref[0]
    if ref[0] == 2: raise exceptions.RayError()
    return ref[1]()
class _Group:
    def __init__(self, bundles, strategy): self.strategy = strategy
    def ready(self): return None
def _module(name, **members):
    made = types.ModuleType(name)
    made.__dict__.update(members)
    sys.modules[name] = made
__path__ = []
_module("ray.util", get_node_ip_address=util.get_node_ip_address, __path__=[])
_module("ray.util.placement_group", placement_group=_Group)
_module("ray.util.scheduling_strategies", PlacementGroupSchedulingStrategy=lambda group, number: (group, number))
'''


def test_ray_starts_an_agent_per_node_and_a_lost_one_ends_no_other(tmp_path: Path, job: Path) -> None:
    text = launched("ray", job, "--hosts", "3", *ETCD)
    folder = tmp_path / "path"
    bamboo_in(folder)
    (folder / "ray.py").write_text(RAY)
    (tmp_path / "program.py").write_text(text)
    line = [sys.executable, str(tmp_path / "program.py")]
    code, told = ran(line, folder)
    assert (code, nodes(told)) == (0, ["a", "b"])  # the agent of b was killed, the node of c was lost
    assert told[0][-2:] == ["--address", "10.0.0.7"]
    assert len({words[words.index("--run") + 1] for words in told}) == 1
    both = ran(line, folder)[1]  # in another cluster the job has the same number
    assert len({words[words.index("--run") + 1] for words in both}) == 2


def manifests(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_manifests_pass_the_schemas_of_kubernetes(job: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for variable in TLS_FILES.values():
        monkeypatch.setenv(variable, str(job))
    found = manifests(launched("k8s", job, "--hosts", "3", "--image", "train:1", *ETCD[:2], *ETCD[3:]))
    assert set(found) == {"Secret", "Service", "ConfigMap", "Job"}
    for each in found.values():
        validate.validate(each, version, strict=True)
    found["Job"]["spec"]["backoffLimitPerIndx"] = found["Job"]["spec"].pop("backoffLimitPerIndex")
    with pytest.raises(validate.ValidationError):
        validate.validate(found["Job"], version, strict=True)


def test_a_pod_per_node_is_replaced_alone_and_has_the_job_and_the_certificates(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, variable in enumerate(TLS_FILES.values()):
        (tmp_path / f"file{number}").write_text(f"secret {number}")
        monkeypatch.setenv(variable, str(tmp_path / f"file{number}"))
    words = ["--hosts", "3", "--image", "train:1", *ETCD[:2], *ETCD[3:], "--grace", "77"]
    printed = launched("k8s", job, *words)
    assert manifests(printed)["Secret"]["data"] == dict.fromkeys(TLS_FILES, "***")
    assert launched("k8s", job, *words, "--output", "out") == "wrote out/tried.yaml\n"
    path = tmp_path / "out" / "tried.yaml"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = manifests(path.read_text())
    assert found["Secret"]["data"]["tls.key"] == base64.b64encode(b"secret 2").decode()
    assert found["ConfigMap"]["data"]["job.yaml"] == JOB
    spec = found["Job"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimitPerIndex"] > 0 and spec["maxFailedIndexes"] == 3 and "backoffLimit" not in spec
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 77)
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert env["BAMBOO_ETCD_KEY"] == "/etc/bamboo-etcd/tls.key"
    assert pod["containers"][0]["command"][-6:] == ["--run", "$(RUN)", "--node", "$(NODE)", "--address", "$(ADDRESS)"]


# The fields of JobSet 0.12 (api/jobset/v1alpha2) and Kubeflow Trainer 2.2 (pkg/apis/trainer/v1alpha1), down to the Job.
FIELDS = {
    "JobSet": "replicatedJobs network successPolicy failurePolicy startupPolicy suspend coordinator managedBy "
    "ttlSecondsAfterFinished volumeClaimPolicies",
    "ReplicatedJob": "name groupName template replicas dependsOn",
    "TrainingRuntime": "mlPolicy podGroupPolicy template",
    "MLPolicy": "numNodes torch mpi flux jax xgboost",
    "TrainJob": "runtimeRef initializer trainer runtimePatches suspend activeDeadlineSeconds managedBy",
    "RuntimeRef": "name apiGroup kind",
    "Trainer": "image command args env numNodes resourcesPerNode numProcPerNode",
}


def fields_of(kind: str, part: dict[str, Any]) -> dict[str, Any]:
    assert part.keys() <= {*FIELDS[kind].split()}, (kind, part.keys())
    return part


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_job_is_in_a_jobset_or_in_the_runtime_of_a_trainjob(job: Path, kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    words = ["--hosts", "3", "--image", "train:1", *ETCD]
    alone = manifests(launched("k8s", job, *words))["Job"]
    found = manifests(launched("k8s", job, *words, "--as", kind, "--set", "logger=csv"))
    if kind == "jobset":
        assert set(found) == {"ConfigMap", "JobSet"}  # which makes the service
        assert found["JobSet"]["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        jobs = fields_of("JobSet", found["JobSet"]["spec"])["replicatedJobs"]
    else:
        assert set(found) == {"ConfigMap", "TrainingRuntime", "TrainJob"}
        assert {found[each]["apiVersion"] for each in ("TrainingRuntime", "TrainJob")} == {
            "trainer.kubeflow.org/v1alpha1"
        }
        runtime, train = (fields_of(each, found[each]["spec"]) for each in ("TrainingRuntime", "TrainJob"))
        assert fields_of("MLPolicy", runtime["mlPolicy"]) == fields_of("Trainer", train["trainer"]) == {"numNodes": 3}
        named = {"name": found["TrainingRuntime"]["metadata"]["name"], "kind": "TrainingRuntime"}
        assert fields_of("RuntimeRef", train["runtimeRef"]) == {**named, "apiGroup": "trainer.kubeflow.org"}
        jobs = fields_of("JobSet", runtime["template"]["spec"])["replicatedJobs"]
        assert jobs[0]["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    (replicated,) = jobs
    spec = fields_of("ReplicatedJob", replicated)["template"]["spec"]
    validate.validate(alone | {"spec": spec}, "1.37", strict=True)
    pod, usual = spec["template"]["spec"], alone["spec"]["template"]["spec"]
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = {"batch.kubernetes.io/job-name": f"bamboo-tried-{replicated['name']}-0"}  # as JobSet names its first Job
    assert apart["labelSelector"]["matchLabels"] == labels
    (agent,), (before,) = pod["containers"], usual["containers"]
    logger = "csv,kubeflow" if kind == "trainjob" else "csv"
    settings = [word for word in agent["command"] if word.startswith("logger=")]
    assert settings[-1] == f"logger={logger}" and agent["env"] == before["env"]
    assert agent["name"] == "node"  # the container that Trainer gives the address for progress


@pytest.mark.parametrize(
    ("place", "words", "expected"),
    [
        ("slurm", ["--hosts", "3", *ETCD, "--as", "jobset"], ["--as: expected none for slurm"]),
        ("torchrun", ["--hosts", "3", *ETCD], ["PLACE: .*torchrun ends every process when one ends"]),
        ("kubernets", ["--hosts", "3", *ETCD], ["PLACE: .*found 'kubernets'"]),
        ("slrm", ["--hosts", "3", "--etcd", "etcd"], ["PLACE: .*did you mean 'slurm'", "--etcd"]),
        (
            "slurm",
            ["--hosts", "300", "--etcd", "etcd", "--set", "steps=no"],
            ["--etcd", "steps", "--hosts: .*1 to 256"],
        ),
        (
            "ssh",
            ["--hosts", "a,b", *ETCD, "--image", "x", "--grace", "9"],
            ["--image: .*for k8s", "--grace: .*for slurm"],
        ),
        ("k8s", ["--hosts", "a,b", *ETCD, "--sbatch", "-p x"], ["--sbatch: .*none for k8s", "--hosts: .*Kubernetes"]),
        ("ray", ["--hosts", "a,b", *ETCD], ["--hosts: expected the number of hosts, found a,b .Ray chooses"]),
        ("slurm", ["--hosts", "me@a,b", *ETCD], ["--hosts: expected names of nodes without a user"]),
        ("slurm", ["--hosts", "3", *ETCD, "--sbatch", "foo"], ["--sbatch: expected one option of sbatch.*'foo'"]),
        ("slurm", ["--hosts", "3", *ETCD, "--sbatch", "-N4"], ["--sbatch: .*-N4 .--hosts N"]),
        ("slurm", ["--hosts", "3", *ETCD, "--sbatch", "--requeue"], ["--sbatch: .*submit it again"]),
        ("slurm", ["--hosts", "3", *ETCD, "--sbatch", "-p\nrm"], ["--sbatch: expected one option"]),
        ("podman", ["--hosts", "3", *ETCD], ["PLACE: expected slurm, k8s, ray or ssh, found 'podman'"]),
        ("k8s", ["--hosts", "3", *ETCD], ["--image: expected the image of the pods"]),
        ("ssh", ["--hosts", "3", *ETCD], ["--hosts: expected the names of the hosts"]),
        (
            "slurm",
            ["--hosts", "4", "--grace", "0", "--name", "No_Name"],
            [
                "--name",
                "--grace",
                "--hosts: expected --etcd",
                "--hosts: expected at most one host",
            ],
        ),
        ("slurm", ["--hosts", "3", "--workers", "0", "--etcd", "10.0.0.1:2379"], ["--etcd: expected TLS"]),
    ],
)
def test_every_mistake_is_told_at_once(job: Path, place: str, words: list[str], expected: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        launched(place, job, *words)
    for each in expected:
        assert pytest.RaisesExc(UserError, match=each).matches(refused.value), (each, str(refused.value))


def test_a_job_file_that_is_not_there_is_told_with_the_other_mistakes() -> None:
    for line in (["launch", "slurm"], ["agent", "--run", "r"]):
        words = [*line, "nope.yaml", "--hosts", "3", "--etcd", "etcd"]
        with pytest.raises(UserError, match=r"--etcd: (.|\n)*nope.yaml: expected a file that can be read"):
            CliRunner().invoke(app, words, catch_exceptions=False)


def test_files_are_sent_by_the_placers_own_program(tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "path"
    program(folder, "sbatch", '#!/bin/sh\ngrep -c "^srun" "$1"\necho "Submitted batch job 12"\n')
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    told = launched("slurm", job, "--hosts", "3", *ETCD, "--submit").splitlines()
    assert told == ["wrote launch-tried/tried.sbatch", "1", "Submitted batch job 12"]
    program(folder, "sbatch", "#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    with pytest.raises(EnvironmentLacksError, match="sbatch exited with 1: invalid partition"):
        launched("slurm", job, "--hosts", "3", *ETCD, "--submit")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    for place, sender in (("slurm", "sbatch"), ("k8s", "kubectl"), ("ray", "ray")):
        image = ["--image", "train:1"] if place == "k8s" else []
        with pytest.raises(EnvironmentLacksError, match=f"^{sender} is not on the PATH of this machine"):
            launched(place, job, "--hosts", "3", *image, *ETCD, "--submit")
