"""Early stops on a plateau in real processes: with a newcomer in place of a dead worker, and after a lost state."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Launch

PLATEAU = "--model mlp --set model_args.depth=3 --set model_args.width=16 --stages 2 --microbatches 2 --steps 60"
PLATEAU += " --lr 0.2 --warmup-steps 1 --validate-every 2 --lr-schedule plateau --set lr_args.patience=0"
PLATEAU += " --early-stop loss:2 --best loss --checkpoint-every 2 --json"
KILLS = ["--standby 1 --kill 3:1 --kill 9:0", "--redundancy none --kill 9:1"]


@pytest.mark.parametrize(
    "kills",
    [KILLS[0], pytest.param(KILLS[1], marks=pytest.mark.soak)],
    ids=["a newcomer takes over", "from a checkpoint"],
)
def test_kills_do_not_move_the_end(kills: str, launch: Launch) -> None:
    done = launch("run", *PLATEAU.split(), *kills.split()).wait()
    assert done.code == 0, done.stderr
    result = json.loads(done.stdout)
    told = {name: result[name] for name in ("outcome", "steps", "best_step", "kept")}
    assert told == {"outcome": "finished", "steps": 19, "best_step": 13, "kept": 18}
    assert result["stopped_early"].startswith("stopped early at step 18: validation/loss did not improve in 2 ")
    assert result["twin"] == {"steps_compared": 19, "difference": None}
    assert result["next"] is None, "there is nothing to resume"
