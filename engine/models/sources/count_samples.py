"""``python -m engine.models.sources.count_samples FD`` opens the data of a job, and tells how many samples it has."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import asdict
from typing import Any

from engine.core.config.job import Job
from engine.core.errors import BambooError, UserError
from engine.models.sources.indexed_data import num_samples
from engine.models.sources.open_data import open_data
from engine.models.user_code import RAISED, exception_of


def answer_about(job: Job) -> dict[str, Any]:
    """Returns the number of samples in the training set as `samples`, or an error under another key."""
    try:
        return {"samples": num_samples(open_data(job))}
    except UserError as error:
        return {"problems": [asdict(each) for each in error.problems]}
    except BambooError as error:
        return {"error": str(error), "code": int(error.exit_code)}
    except RAISED as error:
        return {"raised": exception_of(error).at_start()}


def main() -> None:
    """Answers over the socket whose descriptor is the first argument."""
    with socket.socket(fileno=int(sys.argv[1])) as link:
        question = b"".join(iter(lambda: link.recv(65536), b""))
        link.sendall(json.dumps(answer_about(Job(**json.loads(question)))).encode())


if __name__ == "__main__":
    main()
