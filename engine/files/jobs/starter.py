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

JOB = "bamboo.yaml"
SCENARIO = "scenarios/first.yaml"
MATRIX = "scenarios/matrix.yaml"
WORKFLOW = ".github/workflows/bamboo.yml"

_JOB = """\
# The job: what is trained, and how. Train it: bamboo run bamboo.yaml. `bamboo run --help` lists every field.
# With code of your own, the commands that only find this file take --trust-code: bamboo inject, bamboo matrix.
version: 1
model: mlp # a built-in model, or your own as module:factory
stages: 3
microbatches: 4
steps: 20
redundancy: lazy
"""
_SCENARIO = """\
# The worker of the middle stage dies in the middle of a step. Run it: bamboo inject scenarios/first.yaml
version: 1
name: first
about: the death of the middle stage changes no bit
job: {from: ../bamboo.yaml, steps: 8} # your job, of which 8 steps are enough here
faults:
  - at: {step: 3, stage: 1}
    do: kill
expect:
  outcome: recovered
  trajectory: identical
  steps_lost: 0
  culprit: exact
"""
_MATRIX = """\
# One cell for each stage and action. Run it: bamboo matrix scenarios/matrix.yaml
version: 1
name: deaths
about: the death of any stage, in a forward or a backward, changes no bit
job: {from: ../bamboo.yaml, steps: 4}
expect: {outcome: recovered, trajectory: identical, steps_lost: 0, culprit: exact}
axes:
  stage: [first, middle, last]
  action: [F, B]
cases:
  - name: kill
    faults: [{at: {step: 1, stage: $stage, action: $action}, do: kill}]
"""
_WORKFLOW = """\
# Kills workers of your training job, and fails when a single bit of the weights differs.
name: bamboo
on:
  push:
    branches: [main]
  pull_request:

permissions:
  contents: read

env:
  # The files of this project may name its own code, such as model: module:factory; this job runs that code anyway.
  BAMBOO_TRUST_CODE: "1"
  # Where pip finds bamboo, such as git+https://HOST/OWNER/REPOSITORY@COMMIT. A wheel in wheels/ goes first.
  BAMBOO: $REFERENCE
  # The runner has no GPU: torch's CPU build is two gigabytes smaller.
  PIP_EXTRA_INDEX_URL: https://download.pytorch.org/whl/cpu

jobs:
  faults:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - name: install bamboo
        run: |
          if ls wheels/*.whl > /dev/null 2>&1; then
            python -m pip install wheels/*.whl
          elif [ -n "$BAMBOO" ]; then
            python -m pip install "$BAMBOO"
          else
            echo "::error::bamboo is on no public index: set BAMBOO in $WORKFLOW_FILE, or put a wheel into wheels/"
            exit 1
          fi
      - name: install the packages of this project
        run: if [ -f requirements.txt ]; then python -m pip install -r requirements.txt; fi
      - run: bamboo validate bamboo.yaml scenarios/*.yaml
      - run: bamboo inject scenarios/first.yaml
      - run: bamboo matrix scenarios/matrix.yaml --junit cells.xml
      - name: write the page of the last run, also of one that failed
        if: always()
        run: bamboo report || true
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: bamboo
          path: |
            cells.xml
            results
"""


def reference(installed: Distribution | None = None) -> str:
    """Returns the place from which pip can install this bamboo elsewhere; empty if it is not known.

    It is the repository and commit, or the archive, from which bamboo was `installed`; else its project's repository.
    """
    found = installed or distribution("bamboo-train")
    origin: dict[str, Any] = json.loads(found.read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    if not url.startswith("file:") and urlsplit(url).password is None:  # a file has no meaning on another machine
        if "vcs_info" in origin:
            return f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
        if "archive_info" in origin:
            return url
    labelled = [each.partition(", ") for each in found.metadata.get_all("Project-URL") or ()]
    return next((f"git+{url}" for label, _, url in labelled if label.lower() in ("repository", "source")), "")


def workflow(source: str) -> str:
    """Returns the workflow; `source` is the place from which pip installs bamboo."""
    return _WORKFLOW.replace("$REFERENCE", json.dumps(source)).replace("$WORKFLOW_FILE", WORKFLOW)


def starter(with_workflow: bool) -> dict[str, str]:
    """Returns the files for a new project: path below the user's folder -> text."""
    files = {JOB: _JOB, SCENARIO: _SCENARIO, MATRIX: _MATRIX}
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
