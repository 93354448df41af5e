"""The tables of time: where the wall clock of each worker went, read off the actions and chores that it recorded.

Rules: the time from the first action of a worker to its last is cut into kinds; none is counted twice or left out.

- Where actions overlap, the earlier one counts, and the later one from then on. A chore inside an action (the load of
  a microbatch in its forward, or in a wait) is taken off it; one beside the computation of a GPU counts for nothing.
- Time without an action or a chore is *control*: the coordinator, recoveries, and what lies between two actions. So is
  a vote.
- A receive waits until its SEND has ended, and is *transfer* from then on. A sum of gradients waits until the last
  worker has begun it, a shadow until the owner has begun to stream or log, an optimizer step until the last vote.
- A wait has these causes, in this order: *straggler*, as far as the awaited worker meanwhile ended computations that
  took over `SLOW` times their median, by the time above the median; *bubble*, as far as the worker waits as long for
  the same in the dry run of its program, with the medians of this run; else what was late: *upstream* an activation,
  *downstream* a gradient, *peers* sums, logs or votes. A step with a change of members has no bubble.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd

from engine.core.action import (
    COMPUTE_OPS,
    FORWARD_OPS,
    OP_TABLE,
    RECEIVE_OPS,
    SEND_OPS,
    STASH_OPS,
    Action,
    LegendEntry,
    Op,
    OpRow,
    Work,
)
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import (
    EpochRecord,
    FinishedRecord,
    HostLinkRecord,
    PartitionRecord,
    PureCheckRecord,
)
from engine.core.history.step_files import CHORES, Chore
from engine.core.job.job import Job
from engine.core.ownership import Ownership
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.offload import with_copy_times

SLOW = 1.5  # times the median
WAITS = ("straggler", "bubble", "upstream", "downstream", "peers")
_OF_WORK = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.FOR_INPUT: "backward_input",
    Work.FOR_WEIGHTS: "backward_weights",
}
_PARTS = (_OF_WORK[Work.FOR_INPUT], _OF_WORK[Work.FOR_WEIGHTS])
_SHOWN_AS = {LegendEntry.TRANSFER: "transfer", LegendEntry.WAITING: "transfer", LegendEntry.HEAL: "heal"}


def _kind_of(op: Op, row: OpRow) -> str:
    if row.work is not None:
        return _OF_WORK[row.work]
    if row.shown is LegendEntry.REDUCE:
        return "reduce" if row.meets else "log"
    return _SHOWN_AS.get(row.shown, "optimizer" if op is Op.STEP else "control")


_KIND_OF = {op: _kind_of(op, row) for op, row in OP_TABLE.items()}
TIMES = (
    *(Chore.DATA.value, *_OF_WORK.values(), "redundant", "replayed", "transfer", "reduce", "log", "heal", "optimizer"),
    *(*(each.value for each in CHORES if each is not Chore.DATA), "control"),
    *(f"wait_{cause}" for cause in WAITS),
)
_SLOT_WORK = frozenset({*COMPUTE_OPS, Op.STEP})  # is redundant or replayed where the table of actions says so

# An event that others wait for, and the waits for it, have the same key. Those of a step have no slot in it.
_KEY = ["step", "epoch", "for_pipeline", "for_stage", "microbatch", "what"]
_SAME = {Op.SEND_F: "F", Op.RECV_F: "F", Op.SEND_B: "B", Op.RECV_B: "B", Op.COMMIT: Op.STEP.value}
_FURTHER = {Op.SEND_F: 1, Op.SEND_B: -1}  # stages
_CAUSE = {Op.RECV_F: "wait_upstream", Op.RECV_B: "wait_downstream"}
_PEERS = "wait_peers"  # of all others
_FOLLOWED = (Op.LOG, Op.STREAM)  # at a shadow they wait for those of the owner


_COLUMNS = ["worker", "step", "pipeline", "stage", "microbatch", "op", "epoch", "redundant", "replayed"]
_OF_ROWS = ["worker", "step", "pipeline", "stage"]
_MIB = 2**20


# TFLOP/s of dense matrix products that the makers of GPUs state, by the name of a GPU: in float32, in 16 bits.
_PEAKS = {
    "NVIDIA A100-SXM4-40GB": (19.5, 312.0),
    "NVIDIA A100-SXM4-80GB": (19.5, 312.0),
    "NVIDIA A100 80GB PCIe": (19.5, 312.0),
    "NVIDIA H100 80GB HBM3": (67.0, 989.0),
    "NVIDIA H100 PCIe": (51.0, 756.0),
    "NVIDIA H200": (67.0, 989.0),
    "NVIDIA L4": (30.3, 121.0),
    "Tesla T4": (8.1, 65.0),
    "Tesla V100-SXM2-16GB": (15.7, 125.0),
}


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What is known of the stages of a run; a stage that is not known has no entry.

    `outputs` has the bytes of a microbatch's output, `flops` those of its forward and its backward; `gpus` the name of
    the GPU of each worker. `copy_time` is the longest that a worker measured of its copies to the host, in forwards.
    """

    outputs: Mapping[int, int] = field(default_factory=dict)
    flops: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    gpus: Mapping[int, str] = field(default_factory=dict)
    copy_time: float | None = None

    def peak(self, worker: int, job: Job) -> float:
        """Returns the FLOP/s that the GPU of a worker can do at most, for matrix products; NaN if not known."""
        name = self.gpus.get(worker, "").partition("(")[2].removesuffix(")")
        return _PEAKS.get(name, (math.nan, math.nan))[job.dtype != "float32"] * 1e12


def stage_facts(history: RunHistory) -> StageFacts:
    """Returns what the records of a run tell of its stages."""
    checked, cuts = history.of(PureCheckRecord), history.of(PartitionRecord)
    by_layer = {layer: (forward, backward) for each in checked for layer, forward, backward in each.flops}
    flops = {}
    for stage, (first, end) in enumerate(pairwise((*cuts[-1].starts, len(cuts[-1].layers))) if cuts else ()):
        layers = [by_layer[layer] for layer in range(first, end) if layer in by_layer]
        if len(layers) == end - first:
            flops[stage] = sum(forward for forward, _ in layers), sum(backward for _, backward in layers)
    outputs = {stage: output for done in history.of(FinishedRecord) for stage, *_, output in done.sizes}
    copy_time = max((each.copy_time for each in history.of(HostLinkRecord)), default=None)
    return StageFacts(outputs, flops, {each.worker: each.gpu for each in checked}, copy_time)


class TimeTables:
    """The tables of time of a run, from its tables of actions and chores, made when they are asked for."""

    def __init__(
        self, actions: pd.DataFrame, chores: pd.DataFrame, job: Job, epochs: Sequence[EpochRecord], facts: StageFacts
    ):
        self._job, self._epochs, self._facts = job, epochs, facts
        inside, beside = _placed(chores, actions)
        self._line = _without_overlaps(pd.concat([actions[[*_COLUMNS, "start_ns", "end_ns"]], beside]))
        of_step = self._line.groupby(["worker", "step"])
        self._wall_ns = of_step["length_ns"].sum() + of_step["gap_ns"].sum()
        key = ["worker", "start_ns", "op", "stage", "pipeline", "microbatch"]
        cut_ns = inside.groupby(key)["ns"].sum().reindex(pd.MultiIndex.from_frame(self._line[key]), fill_value=0)
        self._line["cut_ns"] = np.minimum(cut_ns.to_numpy(), self._line["length_ns"])
        self._line["length_ns"] -= self._line["cut_ns"]
        self._waits = _waits(self._line)
        of_gap = self._waits["op"] == Op.STEP.value
        self._line.loc[self._waits.index[of_gap], "gap_ns"] -= self._waits["ns"][of_gap]
        self._line.loc[self._waits.index[~of_gap], "length_ns"] -= self._waits["ns"][~of_gap]

    def time(self) -> pd.DataFrame:
        """Returns one row per worker and step: its wall clock in ms, each of `TIMES` in ms, and its FLOPs.

        The time between the last action of a step and the first one of the next belongs to the next. `flops` are those
        of the model: of forwards and backwards that count once. `mfu` is their share of what the GPU could do.
        """
        table = _sums(self._rows(), ["worker", "step"], TIMES)
        at = pd.MultiIndex.from_frame(table[["worker", "step"]])
        table.insert(2, "wall_ms", self._wall_ns.reindex(at).to_numpy(dtype="float64") / 1e6)
        flops = self._flops().groupby([self._line["worker"], self._line["step"]]).sum(min_count=1)
        table["flops"] = flops.reindex(at).to_numpy(dtype="float64")
        peaks = table["worker"].map({worker: self._facts.peak(worker, self._job) for worker in {*table["worker"]}})
        table["mfu"] = table["flops"] / (table["wall_ms"] / 1e3) / peaks
        return table

    def _flops(self) -> pd.Series:
        """Returns the FLOPs of each forward and backward that counts for the model, missing if not known."""
        shares = {"forward": (1.0, 0.0), "backward": (0.0, 1.0)} | dict.fromkeys(_PARTS, (0.0, 0.5))
        places = zip(self._line["stage"], self._line["kind_of_time"], strict=True)
        flops = {
            (stage, kind): forward * shares[kind][0] + backward * shares[kind][1]
            for stage, (forward, backward) in self._facts.flops.items()
            for kind in shares
        }
        return pd.Series([flops.get(place, math.nan) for place in places], index=self._line.index)

    def stages(self) -> pd.DataFrame:
        """Returns one row per slot: the time of all workers for it in ms, without control and waits for votes."""
        rows = self._rows()
        kinds = [kind for kind in TIMES if kind not in ("control", *CHORES) or kind == Chore.DATA]
        return _sums(rows[rows["stage"] >= 0], ["pipeline", "stage"], kinds)

    def edges(self) -> pd.DataFrame:
        """Returns a row per sender, receiver and border: number, MiB, ms of sends, and of receives without waits."""
        waits = self._waits[self._waits["op"].isin(RECEIVE_OPS) & (self._waits["by"] >= 0)]
        forward = waits["op"] == Op.RECV_F.value
        rows = pd.DataFrame(
            {
                "sender": waits["by"],
                "receiver": waits["worker"],
                "value": np.where(forward, "activation", "gradient"),
                "pipeline": waits["pipeline"],
                "from_stage": np.where(forward, waits["stage"] - 1, waits["stage"] + 1),
                "to_stage": waits["stage"],
                "send_ms": waits["sent_ns"] / 1e6,
                "receive_ms": self._line["length_ns"].reindex(waits.index) / 1e6,
            }
        )
        edges = rows.groupby([*rows.columns[:6]], as_index=False).agg(
            messages=("send_ms", "size"), send_ms=("send_ms", "sum"), receive_ms=("receive_ms", "sum")
        )
        sizes = edges[["from_stage", "to_stage"]].min(axis="columns").map(dict(self._facts.outputs)).astype("float64")
        edges.insert(7, "sent_mib", edges["messages"] * sizes / _MIB)
        return edges

    def _rows(self) -> pd.DataFrame:
        """Returns the ns of each worker, step, slot and kind of `TIMES`; -1 as pipeline and stage for no slot."""
        line, waits = self._line, self._waits.copy()
        waits.loc[waits["op"] == Op.STEP.value, ["pipeline", "stage"]] = -1
        slow_ns = np.minimum(_slow_ns(line, waits), waits["ns"])
        waits["ns"] -= slow_ns
        waits = _with_bubbles(waits, line, self._job, self._epochs, self._facts.copy_time)
        parts = [
            line[_OF_ROWS].assign(kind=line["kind_of_time"], ns=line["length_ns"]),
            line[_OF_ROWS].assign(kind="control", ns=line["gap_ns"], pipeline=-1, stage=-1),
            line[_OF_ROWS].assign(kind=Chore.DATA.value, ns=line["cut_ns"]),
            waits[_OF_ROWS].assign(kind="wait_straggler", ns=slow_ns),
            waits[_OF_ROWS].assign(kind="wait_bubble", ns=waits["bubble_ns"]),
            waits[_OF_ROWS].assign(kind=waits["cause"], ns=waits["ns"] - waits["bubble_ns"]),
        ]
        rows = pd.concat(parts, ignore_index=True)
        return rows.groupby([*_OF_ROWS, "kind"], as_index=False)["ns"].sum()


def _sums(rows: pd.DataFrame, of: list[str], kinds: Sequence[str]) -> pd.DataFrame:
    sums = rows.groupby([*of, "kind"])["ns"].sum().unstack(fill_value=0.0)
    sums = sums.reindex(columns=list(kinds), fill_value=0.0).astype("float64") / 1e6
    return sums.add_suffix("_ms").rename_axis(columns=None).reset_index()


def _placed(chores: pd.DataFrame, actions: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns the actions that a chore is inside of, with its `ns`, and the chores outside, in the form of actions."""
    places = actions.assign(begun_ns=actions["start_ns"])[[*_COLUMNS, "start_ns", "end_ns", "begun_ns"]]
    both = pd.merge_asof(
        chores.sort_values("start_ns"),
        places.sort_values("start_ns", kind="stable"),
        on="start_ns",
        by="worker",
        suffixes=("", "_in"),
    )
    is_inside = both["start_ns"] < both["end_ns_in"].fillna(0)
    same = [both[name] == both[f"{name}_in"] for name in ("pipeline", "stage", "microbatch")]
    is_own = (both["op"].isin(FORWARD_OPS) & same[0] & same[1] & same[2]) | both["op"].isin(RECEIVE_OPS)
    inside = both[is_inside & is_own]
    ns = np.minimum(inside["end_ns"], inside["end_ns_in"]) - inside["start_ns"]
    slot = {name: inside[f"{name}_in"] for name in ("pipeline", "stage", "microbatch")}
    inside = inside[["worker", "op"]].assign(start_ns=inside["begun_ns"], ns=ns, **slot)
    beside = both[~is_inside]
    beside = beside.assign(op=beside["chore"], epoch=-1, redundant=False, replayed=False)
    beside.loc[beside["chore"] != Chore.DATA, ["pipeline", "stage"]] = -1
    return inside, beside[[*_COLUMNS, "start_ns", "end_ns"]]


def _without_overlaps(actions: pd.DataFrame) -> pd.DataFrame:
    """Returns the actions of each worker in the order of time, with their kind, own length and the gap before them.

    The gap before a chore goes to the next action: an optimizer step waits for votes, then for a copy. `gap_from_ns` is
    where the gap began.
    """
    line = actions.sort_values(["worker", "start_ns", "end_ns"], kind="stable", ignore_index=True)
    new = (line["worker"] != line["worker"].shift()) | (line["step"] - line["step"].shift() > 1)
    part = new.cumsum()  # a range that no missing step interrupts
    busy_until = line.groupby(part)["end_ns"].cummax()
    free_ns = busy_until.shift(fill_value=0).where(~new, line["start_ns"])
    line["begin_ns"] = np.maximum(line["start_ns"], free_ns)
    line["length_ns"] = (line["end_ns"] - line["begin_ns"]).clip(lower=0)
    ops, of_slot = line["op"], line["op"].isin(_SLOT_WORK)
    is_chore = ops.isin(CHORES)
    index = line.index.to_series()
    behind = index.where(~is_chore).groupby(part).bfill().fillna(index)
    gap_ns = (line["begin_ns"] - free_ns).groupby(behind).transform("sum")
    line["gap_ns"] = gap_ns.where(behind == index, 0)
    line["gap_from_ns"] = free_ns.groupby(behind).transform("first")
    kinds = ops.map(_KIND_OF).astype(object).mask(is_chore, ops.astype(object))
    kinds = kinds.mask(line["replayed"] & of_slot, "replayed")
    line["kind_of_time"] = kinds.mask(line["redundant"] & of_slot, "redundant")
    is_of_step = ops.isin((Op.COMMIT, Op.STEP))
    line["what"] = ops.map(_SAME).astype(object).fillna(ops.astype(object))
    line["for_stage"] = (line["stage"] + ops.map(_FURTHER).fillna(0).astype("int64")).mask(is_of_step, 0)
    line["for_pipeline"] = line["pipeline"].mask(is_of_step | (ops == Op.REDUCE_GRAD), 0)
    return line


def _waits(line: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that wait for another worker: from `from_ns` for `ns`, for worker `by` (-1: unknown)."""
    ops = line["op"]
    follows = ops.isin(_FOLLOWED) & line["redundant"]
    events = line[ops.isin((*SEND_OPS, Op.REDUCE_GRAD, Op.COMMIT)) | (ops.isin(_FOLLOWED) & ~line["redundant"])]
    has_ended = events["op"].isin((*SEND_OPS, Op.COMMIT))
    at_ns = events["end_ns"].where(has_ended, events["start_ns"])
    events = events[_KEY].assign(at_ns=at_ns, by=events["worker"], sent_ns=events["length_ns"])
    events = events.sort_values("at_ns", kind="stable").drop_duplicates(_KEY, keep="last")
    waits = line[ops.isin((*RECEIVE_OPS, Op.REDUCE_GRAD, Op.STEP)) | follows]
    waits = waits.reset_index().merge(events, on=_KEY, how="left").set_index("index")
    of_gap = waits["op"] == Op.STEP.value
    waits["from_ns"] = waits["gap_from_ns"].where(of_gap, waits["begin_ns"])
    to_ns = waits["from_ns"] + waits["gap_ns"].where(of_gap, waits["length_ns"])
    # A SEND that is not there was cut off by the death of its worker: the receive has waited for all of its time.
    unknown_ns = to_ns.where(waits["op"].isin(RECEIVE_OPS), waits["from_ns"])
    until_ns = waits["at_ns"].fillna(unknown_ns).astype("int64")
    waits["ns"] = (np.minimum(until_ns, to_ns) - waits["from_ns"]).clip(lower=0)
    waits["by"] = waits["by"].fillna(-1).astype("int64")
    waits["cause"] = waits["op"].map(_CAUSE).astype(object).fillna(_PEERS)
    return waits


def _slow_ns(line: pd.DataFrame, waits: pd.DataFrame) -> pd.Series:
    """Returns for each wait how much longer than usual the slow computations took that its worker `by` ended in it."""
    work = line[line["op"].isin(COMPUTE_OPS)].sort_values("end_ns", kind="stable")
    usual_ns = work.groupby(["worker", "pipeline", "stage", "op"])["length_ns"].transform("median")
    above_ns = (work["length_ns"] - usual_ns).where(work["length_ns"] > SLOW * usual_ns, 0.0)
    slow_ns = pd.Series(0.0, index=waits.index)
    for worker, mine in waits.groupby("by"):
        of_worker = work["worker"] == worker
        ends, sums = work["end_ns"][of_worker].to_numpy(), np.append(0.0, above_ns[of_worker].cumsum())
        before = np.searchsorted(ends, mine["from_ns"], side="right")
        slow_ns[mine.index] = sums[np.searchsorted(ends, mine["from_ns"] + mine["ns"], side="right")] - sums[before]
    return slow_ns


def _with_bubbles(
    waits: pd.DataFrame, line: pd.DataFrame, job: Job, epochs: Sequence[EpochRecord], copy_time: float | None
) -> pd.DataFrame:
    """Returns the waits with `bubble_ns`: the same share of all waits of a worker in a step that have one cause."""
    one_epoch = line[line["epoch"] >= 0].groupby("step")["epoch"].nunique() == 1
    # The gap before an action that waits is over before the wait is: it shortens the wait, and nothing else.
    gap_ns = waits["gap_ns"].where(waits["op"] != Op.STEP.value, 0)
    loaded_ns = line["cut_ns"].where(line["op"].isin(FORWARD_OPS), 0)  # a load in a wait shortens the wait
    cost_ns = line["length_ns"] + loaded_ns + line["gap_ns"].sub(gap_ns, fill_value=0)
    costs = cost_ns.groupby([line["pipeline"], line["stage"], line["op"]]).median()
    there = set(line["epoch"])
    whole = job.pipelines * job.slots
    usable = [record for record in epochs if record.epoch in there and len(record.owners) == whole]
    dry_ns = dry_waits(job, usable, dict(costs), copy_time)
    of_epoch = zip(waits["epoch"], waits["worker"], waits["cause"], strict=True)
    expected_ns = np.array([dry_ns.get(at, 0.0) for at in of_epoch])
    of_step = [waits["worker"], waits["step"], waits["cause"]]
    waited_ns = waits["ns"].groupby(of_step).transform("sum")
    share = (expected_ns - gap_ns.groupby(of_step).transform("sum")) / waited_ns.where(waited_ns > 0, np.inf)
    waits["bubble_ns"] = waits["ns"] * share.clip(0.0, 1.0) * waits["step"].map(one_epoch).astype(bool)
    return waits


def dry_waits(
    job: Job, epochs: Iterable[EpochRecord], costs: Mapping[tuple[int, int, str], float], copy_time: float | None = None
) -> dict[tuple[int, int, str], float]:
    """Returns each worker's waits in the dry run of a step, by (epoch, worker, cause), in the unit of `costs`."""

    def cost(action: Action) -> float:
        return costs.get((action.pipeline, action.stage, action.op), 0.0)

    waits: dict[tuple[int, int, str], float] = {}
    by_ownership: dict[tuple[Ownership, str], defaultdict[tuple[int, str], float]] = {}
    for epoch in epochs:
        ownership = Ownership(job.grid, epoch.owners, epoch.shadows)
        of = ownership, epoch.schedule or job.schedule
        if of not in by_ownership:
            program = build_program(of[1], ownership, job.redundancy, log_every=job.log_every, copy_time=job.copy_time)
            idle = by_ownership[of] = defaultdict(float)
            free = dict.fromkeys(program, 0.0)
            priced = with_copy_times(copy_time or 0.0, cost)
            for start, end, worker, action in dry_run(program, ownership, priced).spans:  # of a worker in its order
                if action.op not in STASH_OPS:  # the worker goes on meanwhile
                    idle[worker, _CAUSE.get(action.op, _PEERS)] += start - free[worker]
                    free[worker] = end
        waits |= {(epoch.epoch, *each): idle for each, idle in by_ownership[of].items()}
    return waits
