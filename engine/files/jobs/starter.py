"""The files that `bamboo init` writes: a job, a scenario and a matrix of it, and a workflow of GitHub or GitLab.

For a job of another launcher it is a scenario with its command, and a workflow.

Rules: a file that exists is kept. A workflow has constraints beside it: the versions of this installation, whose bits
are those that the user knows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from engine.core.faults.launchers import launcher_of
from engine.core.job.hugging_face import MODEL as HUGGING_FACE
from engine.core.units import Scalar
from engine.files.atomic_write import create_file
from engine.files.templates import rendered

JOB = "bamboo.yaml"
SCENARIO = "scenarios/first.yaml"
MATRIX = "scenarios/matrix.yaml"
WORKFLOW = ".github/workflows/bamboo.yml"
GITLAB, INCLUDES = ".gitlab/bamboo.yml", ".gitlab-ci.yml"
CONSTRAINTS, REQUIREMENTS = "constraints.txt", "requirements.txt"
CiSystem = Literal["none", "github", "gitlab"]
_TEMPLATES = {JOB: "starter_job.j2", SCENARIO: "starter_scenario.j2", MATRIX: "starter_matrix.j2"}


def reference(installed: Distribution | None = None) -> str:
    """Returns the place from which pip can get this bamboo: where it was `installed` from, else the repository."""
    package = installed or distribution("bamboo-train")
    origin: dict[str, Any] = json.loads(package.read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if not url.startswith("file:") and urlsplit(url).password is None:  # a file has no meaning on another machine
        if "vcs_info" in origin:
            return f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
        if "archive_info" in origin:
            return url
    labelled = [each.partition(", ") for each in package.metadata.get_all("Project-URL") or ()]
    return next((f"git+{url}" for label, _, url in labelled if label.lower() in ("repository", "source")), "")


def workflow(source: str, ci: CiSystem = "github", *, of_command: bool = False) -> str:
    """Returns the workflow; `source` is the place from which pip installs bamboo."""
    template, file = ("starter_workflow.j2", WORKFLOW) if ci == "github" else ("starter_gitlab.j2", GITLAB)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    values = {"reference": json.dumps(source), "file": file, "python": python, "of_command": of_command}
    return rendered(__package__, template, **values)


def constraints() -> str:
    """Returns the versions of the packages here, one a line, without bamboo and what was built here."""
    pins = {
        str(package.metadata["Name"]): package.version.partition("+")[0]  # the build of torch is the runner's
        for package in distributions()
        if not package.read_text("direct_url.json") and package.metadata["Name"] != "bamboo-train"
    }
    lines = (f"{name}=={pins[name]}\n" for name in sorted(pins, key=str.lower))
    return "".join(("# The versions with which `bamboo init` was called: pip install --constraint.\n", *lines))


def starter(
    ci: CiSystem = "none", model: str = "mlp", data: str = "", stages: int = 3, args: Mapping[str, Scalar] | None = None
) -> dict[str, str]:
    """Returns the files of a new project, path -> text, for a job with this model and data, and their `args`."""
    values: dict[str, Any] = {"model": model, "data": data, "stages": stages, "model_args": {}, "data_args": {}}
    for name, value in (args or {}).items():
        field, _, argument = name.partition(".")
        values[field][argument] = value
    files = {path: rendered(__package__, template, **values) for path, template in _TEMPLATES.items()}
    if ci != "none" and model == HUGGING_FACE:
        files[REQUIREMENTS] = "transformers\naccelerate\ndatasets\n"
    return files | _of_ci(ci)


def command_starter(command: Sequence[str], limit: str, ci: CiSystem = "none") -> dict[str, str]:
    """Returns the files for the job of another launcher, as `starter` does; training may stall so long: ``60s``."""
    launcher = launcher_of(command)
    rank = max(0, (launcher.starts(command) or 1) - 1)  # a rank but the first one, if that is known
    values = {"command": list(command), "launcher": launcher.name, "rank": rank, "limit": limit}
    return {SCENARIO: rendered(__package__, "starter_command.j2", **values)} | _of_ci(ci, of_command=True)


def _of_ci(ci: CiSystem, *, of_command: bool = False) -> dict[str, str]:
    if ci == "none":
        return {}
    text = workflow(reference(), ci, of_command=of_command)
    files = {WORKFLOW: text} if ci == "github" else {GITLAB: text, INCLUDES: f"include:\n  - local: {GITLAB}\n"}
    return files | {CONSTRAINTS: constraints()}


def write_new(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Writes those files that do not exist yet below `folder`, and returns their paths.

    Raises:
        StorageError: a file could not be written, or its folder is a link.
    """
    written = []
    for name, text in files.items():
        path = folder / name
        if path.exists() or path.is_symlink():
            continue
        create_file(path, folder, text)
        written.append(path)
    return written
