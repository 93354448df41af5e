"""The files that `bamboo init` writes: a job, a scenario and a matrix of it, and a GitHub workflow that runs them.

Rule: a file that exists is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.files.atomic_write import create_file
from engine.files.templates import rendered

JOB = "bamboo.yaml"
SCENARIO = "scenarios/first.yaml"
MATRIX = "scenarios/matrix.yaml"
WORKFLOW = ".github/workflows/bamboo.yml"
_TEMPLATES = {JOB: "starter_job.j2", SCENARIO: "starter_scenario.j2", MATRIX: "starter_matrix.j2"}


def reference(installed: Distribution | None = None) -> str:
    """Returns the place from which pip can install this bamboo elsewhere; empty if it is not known.

    It is the repository and commit, or the archive, from which bamboo was `installed`; else its project's repository.
    """
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


def workflow(source: str) -> str:
    """Returns the workflow; `source` is the place from which pip installs bamboo."""
    return rendered(__package__, "starter_workflow.j2", reference=json.dumps(source), file=WORKFLOW)


def starter(with_workflow: bool) -> dict[str, str]:
    """Returns the files for a new project: path below the user's folder -> text."""
    files = {path: rendered(__package__, template) for path, template in _TEMPLATES.items()}
    return files | ({WORKFLOW: workflow(reference())} if with_workflow else {})


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
