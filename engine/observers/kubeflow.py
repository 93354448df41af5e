"""The logger `kubeflow`: reports progress to Kubeflow Trainer, which shows it in the status of the TrainJob.

Rule: the controller (2.2 or later, with the feature gate ``TrainJobStatus``) names its address in the environment of a
pod; without it, nothing is sent. A report that is not taken is logged, and the next one has the newer figures.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from engine.core.job.job import Job
from engine.core.texts import printable
from engine.observers.loggers import CoverDone, RecoveryDone, StepDone, TrainingDone

URL, CA, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
_EVERY_S = 5.0  # as Kubeflow's own client
_TIMEOUT_S = 5.0
_MOST_S = 2**31 - 1  # of the field for the remaining time


class KubeflowLogger:
    """Posts a `trainerStatus` at most every five seconds, and at the end."""

    def __init__(self) -> None:
        self._steps = 0
        self._posted_s = -_EVERY_S
        self._last: StepDone | None = None
        self._step_s = 0.0  # of a step without a recovery, averaged over the last ones
        self._counts = {"recoveries": 0, "uncovered_stages": 0}

    def start(self, job: Job, folder: Path) -> None:
        """Notes the number of steps."""
        self._steps = job.steps
        if URL not in os.environ:
            print(
                f"{URL} is not set: no TrainJob, or its controller has the feature gate TrainJobStatus off", flush=True
            )

    def step(self, done: StepDone) -> None:
        """Posts the progress if the last report is five seconds old."""
        if not done.recoveries:
            self._step_s += (done.seconds - self._step_s) * (0.1 if self._step_s else 1.0)
        self._last = done
        if time.monotonic() >= self._posted_s + _EVERY_S:
            self._post()

    def recovery(self, done: RecoveryDone) -> None:
        """Counts a recovery."""
        self._counts["recoveries"] += 1

    def cover(self, done: CoverDone) -> None:
        """Notes the number of stages without a second replica."""
        self._counts["uncovered_stages"] = len(done.uncovered)

    def finish(self, done: TrainingDone) -> None:
        """Posts the last progress."""
        self._post()

    def _post(self) -> None:
        if self._last is None or URL not in os.environ:
            return
        self._posted_s = time.monotonic()
        figures = {**self._last.metrics, "step": self._last.step, **self._counts}
        status: dict[str, object] = {
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in figures.items()],
            "lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if self._steps:
            left = max(0, self._steps - self._last.step - 1)
            status["progressPercentage"] = 100 * (self._steps - left) // self._steps
            status["estimatedRemainingSeconds"] = min(round(left * self._step_s), _MOST_S)
        try:
            request = urllib.request.Request(  # noqa: S310 - the controller's own address
                os.environ[URL],
                json.dumps({"trainerStatus": status}).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {_token()}"},
            )
            trusted = ssl.create_default_context(cafile=os.environ.get(CA))
            urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trusted).close()  # noqa: S310
        except (OSError, ValueError) as error:
            print(printable(f"the progress was not taken: {error}"), flush=True)


def _token() -> str:
    """Returns the token, which the kubelet renews in its file."""
    return Path(os.environ[TOKEN]).read_text(encoding="utf-8").strip() if TOKEN in os.environ else ""
