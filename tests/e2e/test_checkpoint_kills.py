"""Real kills before, during and after the writing of checkpoints: the weights stay, and the last step is kept whole."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.faults.fault import WHENS
from engine.core.job.job import Job
from engine.core.manifest import LayerHash
from engine.files.checkpoint_folder import checkpoints_at
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, differences, lives
from tests.kills import parse_kills

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120), pytest.mark.usefixtures("shared_etcd")]

STRUCK = ((1, 0), (4, 1), (7, 3))  # steps and stages


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs; it runs the twin once."""
    return Runs(tmp_path_factory.mktemp("checkpoints"), server)


@pytest.mark.parametrize("whens", [WHENS, *(pytest.param([when] * 3, marks=pytest.mark.soak) for when in WHENS)])
def test_a_death_at_a_checkpoint_changes_nothing(runs: Runs, whens: Sequence[str]) -> None:
    """The victims write the first stage, one in the middle and the last one, in one run."""
    job = Job(model="mlp", stages=4, microbatches=4, steps=11, validate_every=0, checkpoint_every="1")
    kills = tuple(f"{step}:{stage}:CHECKPOINT:{when}" for when, (step, stage) in zip(whens, STRUCK, strict=True))
    ending, events = runs.run(job, parse_kills(kills, job))
    assert list(differences(ending, runs.twin(job))) == []
    struck = [event for event in events if event["event"] == "fault"]
    assert [event["fault"] for event in struck] == list(kills)
    assert list(lives(events, {event["of"] for event in struck})) == []
    folder = checkpoints_at(runs.last / "checkpoints")
    last = folder.verify(folder.names()[-1])
    rows = [row for row in ending.view.run_state.rows if row.step == job.steps - 1]
    assert last.layers == tuple(LayerHash(row.layer, row.state, row.buffers) for row in rows)
