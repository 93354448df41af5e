"""The built-in schedules and the limits of each; a user's own schedule is the CSV text of its compute lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.placement import Placement
from engine.core.schedules.compute import ComputeLists, Generator
from engine.core.schedules.dual_pipe_v import dual_pipe_v
from engine.core.schedules.interleaved import interleaved, interleaved_flexible, looped_bfs
from engine.core.schedules.one_stage import eager_one_f_one_b, gpipe, one_f_one_b
from engine.core.schedules.zero_bubble import zb1p, zbv


@dataclass(frozen=True, slots=True)
class Schedule:
    """A generator and the limits of its arguments. With one stage per worker both placements are the same."""

    generate: Generator
    placement: Placement = "loop"
    stages_per_worker: tuple[int, int] = (1, 1)  # least and most
    least_microbatches: Callable[[int], int] = lambda num_workers: 1
    overlaps: bool = False  # whether `with_pairs_together` is applied
    takes_blocks: bool = False  # whether a stage may be a run of blocks, see `in_blocks`

    def takes(self, stages_per_worker: int) -> bool:
        """Returns whether a worker may have this number of stages."""
        least, most = self.stages_per_worker
        return least <= stages_per_worker <= most

    def __call__(self, num_workers: int, num_microbatches: int, stages_per_worker: int = 1) -> ComputeLists:
        """Returns the compute lists of one pipeline of `num_workers` workers."""
        return self.generate(num_workers, stages_per_worker, num_microbatches)


_ANY = 4096
SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(one_f_one_b, takes_blocks=True),
    "eager-1f1b": Schedule(eager_one_f_one_b, takes_blocks=True),
    "gpipe": Schedule(gpipe, takes_blocks=True),
    "interleaved": Schedule(interleaved, stages_per_worker=(1, _ANY)),
    "interleaved-flexible": Schedule(interleaved_flexible, stages_per_worker=(1, _ANY)),
    "looped-bfs": Schedule(looped_bfs, stages_per_worker=(1, _ANY)),
    "zb1p": Schedule(zb1p),
    "zbv": Schedule(zbv, "v", (2, 2)),
    "dualpipev": Schedule(dual_pipe_v, "v", (2, 2), lambda num_workers: 2 * num_workers),
    "dualpipev-overlapped": Schedule(dual_pipe_v, "v", (2, 2), lambda num_workers: 2 * num_workers, overlaps=True),
}
