"""The files that `bamboo init` writes: a job, a first scenario, and a GitHub workflow that runs the matrices.

Rule: if one of the files exists, none is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.core.errors import Problem, UserError
from engine.files.atomic_write import storage_errors

JOB = "bamboo.yaml"
SCENARIO = "scenarios/first.yaml"
WORKFLOW = ".github/workflows/fault-matrix.yml"

INSTALL = 'python -m pip install "bamboo-train"'

_JOB = """\
# The job: what is trained, and how. `bamboo run` reads it; `bamboo run --help` lists every field.
version: 1
model: mlp
stages: 3
microbatches: 4
steps: 20
redundancy: lazy
"""
_SCENARIO = """\
# The worker of the middle stage dies in the middle of a step. Run it: bamboo inject --scenario scenarios/first.yaml
version: 1
name: first
about: the death of the middle stage changes no bit
job: {model: mlp, stages: 3, microbatches: 4, steps: 8, validate_every: 0}
faults:
  - at: {step: 3, stage: 1, action: B, microbatch: 2}
    do: kill
expect:
  outcome: recovered
  trajectory: identical
  steps_lost: 0
  culprit: exact
"""
_WORKFLOW = """\
# Kills workers of a real training job, and fails when a single bit of the weights differs.
name: fault-matrix
on:
  push:
    branches: [main]
  pull_request:
  schedule:
    - cron: "41 3 * * 6" # the whole matrix once a week

permissions:
  contents: read

env:
  # The runner has no GPU: torch's CPU build is two gigabytes smaller.
  PIP_EXTRA_INDEX_URL: https://download.pytorch.org/whl/cpu
  MATRIX: ${{ github.event_name == 'schedule' && 'matrix-full' || 'matrix-smoke' }}
  SHARDS: ${{ github.event_name == 'schedule' && '8' || '2' }}

jobs:
  plan:
    runs-on: ubuntu-latest
    timeout-minutes: 15
    outputs:
      matrix: ${{ steps.plan.outputs.matrix }}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: INSTALL
      - id: plan
        run: |
          matrix=$(bamboo matrix "$MATRIX" --format github --shards "$SHARDS")
          echo "matrix=$matrix" >> "$GITHUB_OUTPUT"

  cells:
    needs: plan
    runs-on: ubuntu-latest
    timeout-minutes: 15
    strategy:
      fail-fast: false
      matrix: ${{ fromJSON(needs.plan.outputs.matrix) }}
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: INSTALL
      - run: bamboo matrix "${{ matrix.matrix }}" --shard "${{ matrix.shard }}" --junit cells.xml --shrink
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: cells-${{ strategy.job-index }}
          path: |
            cells.xml
            results/matrices
"""


def workflow(install: str = INSTALL) -> str:
    """Returns the workflow; `install` is the command that installs bamboo."""
    return _WORKFLOW.replace("INSTALL", install)


def starter(with_workflow: bool) -> dict[str, str]:
    """Returns the files for a new project: path below the user's folder -> text."""
    files = {JOB: _JOB, SCENARIO: _SCENARIO}
    return files | ({WORKFLOW: workflow()} if with_workflow else {})


def write_new(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Writes new files below `folder` and returns their paths.

    Raises:
        UserError: some of the files exist already; none has been written.
        StorageError: a file could not be written.
    """
    there = [name for name in files if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise UserError(Problem("init", "no such file yet", repr(str(folder / name)), "move it away") for name in there)
    written = []
    for name, text in files.items():
        path = folder / name
        with storage_errors("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        written.append(path)
    return written
