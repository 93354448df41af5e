"""The defaults of a job that other workers can join: it shares out slots anew, and stages have blocks.

Rules: a value that is given wins, and so do the blocks in the record of a run. Without `--blocks` a stage has four, or
as many as the smallest stage has layers. It has one where the launcher does not know the layers: of a user's own model,
and of stages that are balanced by weights. More could be more than a stage has layers, and the job would be refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from engine.core.config.job import Job
from engine.core.config.offered import Offered
from engine.files.jobs.job_layers import Layer, last_with

BLOCKS = 4
FOR_JOINERS = "default with elastic or standby"  # the origin of such a value


def with_elastic_defaults(
    job: Job, layers: Sequence[Layer], given: Collection[str], offered: Offered, takes_blocks: bool
) -> Job:
    """Returns the job with these defaults; `given` has the names of the fields that a layer gives."""
    if job.standby > 0 and takes_blocks and last_with("standby", layers) > last_with("elastic", layers):
        job = replace(job, elastic=True)
    if not job.elastic or "blocks" in given or not takes_blocks:
        return job
    return replace(job, blocks=min(BLOCKS, offered.smallest_stage(job) or 1))
