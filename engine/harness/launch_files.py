"""The files with which another system launches a run on several hosts, and their submission by its own program.

Rules: the manifests contain the job file, because pods have no shared disk. Certificates and keys are in a file that
only this user can read and that is never printed. A missing program is named, with exit code 4.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.core.errors import MASK, EnvironmentLacksError, ExitCode, Problem
from engine.core.hosts.launch import TLS_FILES, LaunchPlan
from engine.files.atomic_write import open_to_append, storage_errors, write_atomically
from engine.files.templates import rendered
from engine.runtime.store.etcd_settings import PASSWORD, PASSWORD_FILE, USER

# place -> the program that takes the file, and the words before the file
_SENDERS: dict[str, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "k8s": ("kubectl", "apply", "--filename"),
    "ray": ("ray", "job", "submit", "--no-wait", "--working-dir", ".", "--", "python"),
    "ssh": ("bash",),
}
_NEEDS = {"ssh": "ssh"}  # beside the sender
_SUFFIXES = {"slurm": ".sbatch", "ray": "_ray.py", "ssh": ".sh"}
_FOR = {"slurm": "Slurm", "k8s": "Kubernetes", "ray": "Ray (pip install 'bamboo-train[ray]')", "ssh": "OpenSSH"}
_LET_IN = (*TLS_FILES.values(), USER, PASSWORD_FILE)
_MOST_S = 60.0


@dataclass(frozen=True, slots=True)
class LaunchFile:
    """A file; `shown` is its printable text."""

    name: str
    text: str
    shown: str


def launch_files(place: str, plan: LaunchPlan) -> list[LaunchFile]:
    """Returns the files; the last one is submitted."""
    if place == "k8s":
        return _manifests(plan)
    name = f"{plan.name}{_SUFFIXES[place]}"
    if place == "slurm":
        text = _filled(place, plan)
    else:  # these hosts inherit no environment: they need the program, and the variables for etcd
        program = shutil.which("bamboo") or "bamboo"
        variables = {name: value for name in _LET_IN if (value := os.environ.get(name, ""))}
        run = f"{plan.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        text = _filled(place, plan, program, variables=variables, folder=str(Path.cwd()), run=run)
    return [LaunchFile(name, text, text)]


def _filled(place: str, plan: LaunchPlan, program: str = "bamboo", job_file: str = "", **values: Any) -> str:
    words = {"agent": plan.words(program, job_file), "asks": plan.asks(program)}
    return rendered("engine.harness", f"{place}.j2", plan=plan, ExitCode=ExitCode, **words, **values)


def _manifests(plan: LaunchPlan) -> list[LaunchFile]:
    tls = {}
    for file, variable in TLS_FILES.items():
        if path := os.environ.get(variable, ""):
            with storage_errors("read", Path(path)):
                tls[file] = base64.b64encode(Path(path).read_bytes()).decode()
    job_path = Path(plan.job_file)
    with storage_errors("read", job_path):
        job_text = job_path.read_text(encoding="utf-8")
    values: dict[str, Any] = {"job_file": "/etc/bamboo/job.yaml", "job_text": job_text, "TLS_FILES": TLS_FILES}
    texts = [_filled("k8s", plan, tls=each, **values) for each in (tls, dict.fromkeys(tls, MASK))]
    return [LaunchFile(f"{plan.name}.yaml", *texts)]


def refused_variables(place: str) -> list[Problem]:
    """Returns problems for variables that would not reach the agents: a password is never written to a file."""
    lost = {"ssh": (PASSWORD,), "ray": (PASSWORD,), "k8s": (USER, PASSWORD, PASSWORD_FILE)}.get(place, ())
    hint = "certificates let the pods in" if place == "k8s" else f"{PASSWORD_FILE} names a file, on every host"
    return [Problem(name, f"none for {place}", "a value", hint) for name in lost if os.environ.get(name)]


def write_files(files: Sequence[LaunchFile], folder: Path) -> None:
    """Writes the files, readable only by this user; scripts are executable."""
    with storage_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        path = folder / file.name
        write_atomically(path, file.text)
        if file.text.startswith("#!"):
            path.chmod(0o700)


def submit(place: str, path: Path) -> str:
    """Submits a file, returns the program's output; raises EnvironmentLacksError if it is missing or refuses."""
    words = [*_SENDERS[place], str(path)]
    for program in (words[0], _NEEDS.get(place, words[0])):
        if shutil.which(program) is None:
            text = f"{program} is not on the PATH of this machine: {_FOR[place]} has it; {path} can be sent elsewhere"
            raise EnvironmentLacksError(text)
    if place == "ssh":  # which lasts as long as the run
        log = path.with_suffix(".log")
        with open(open_to_append(log), "ab") as output:
            child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        return f"process {child.pid} holds the connections; their output is in {log}"
    try:
        result = subprocess.run(words, capture_output=True, text=True, timeout=_MOST_S, check=False)
    except subprocess.TimeoutExpired:
        raise EnvironmentLacksError(f"{words[0]} did not answer within {_MOST_S:g} s") from None
    if result.returncode:
        reason = result.stderr.strip() or result.stdout.strip()
        raise EnvironmentLacksError(f"{words[0]} exited with {result.returncode}: {reason}")
    return result.stdout.strip()
