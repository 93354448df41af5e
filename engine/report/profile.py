"""What the actions of a run took: a profile for the search of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.action import Op
from engine.core.errors import Problem, UserError
from engine.core.program.schedule_search import Profile

if TYPE_CHECKING:
    import pandas as pd


def profile_of(actions: pd.DataFrame, stages: int, copy_time: float | None = None) -> Profile:
    """Returns the medians of the actions of a run, in milliseconds; the first step is left out if there are others.

    A backward that the run did not split counts as two equal parts. A transfer lasts from the end of a SEND to the end
    of its RECV, where that was waited for; to a neighbour on the same worker it takes no time. `copy_time` is what the
    run measured of copies to the host, in forwards. Raises UserError if some stage has no forward or no backward.
    """
    steady = actions[~(actions["redundant"] | actions["replayed"])]
    if steady["step"].nunique() > 1:
        steady = steady[steady["step"] > steady["step"].min()]
    lengths = (steady["end_ns"] - steady["start_ns"]) / 1e6
    costs = lengths.groupby([steady["op"], steady["stage"]]).median().to_dict()
    parts = []
    for stage in range(stages):
        forward, whole = costs.get((Op.F, stage)), costs.get((Op.B, stage), 0.0)
        for_input, for_weights = (costs.get((op, stage), whole / 2) for op in (Op.I, Op.W))
        if not forward or not for_input:
            raise UserError(
                [Problem("--profile", f"forwards and backwards of stages 0 to {stages - 1}", f"none of {stage}")]
            )
        parts.append((forward, for_input, for_weights))
    forwards, for_inputs, for_weights = zip(*parts, strict=True)
    transfers = tuple(_transfer(steady, stage) for stage in range(stages - 1))
    return Profile(forwards, for_inputs, for_weights, transfers, copy_time)


def _transfer(actions: pd.DataFrame, stage: int) -> float:
    """Returns the median of the transfers from a stage to the next one, and of those back."""
    keys = ["step", "pipeline", "microbatch"]
    took = []
    for sender, send, receiver, receive in (
        (stage, Op.SEND_F, stage + 1, Op.RECV_F),
        (stage + 1, Op.SEND_B, stage, Op.RECV_B),
    ):
        sent = actions[(actions["op"] == send) & (actions["stage"] == sender)]
        received = actions[(actions["op"] == receive) & (actions["stage"] == receiver)]
        both = sent.merge(received, on=keys, suffixes=(" sent", " received"))
        waited = both[both["start_ns received"] < both["end_ns sent"]]
        took += list((waited["end_ns received"] - waited["end_ns sent"]).clip(lower=0) / 1e6)
    return float(sorted(took)[len(took) // 2]) if took else 0.0
