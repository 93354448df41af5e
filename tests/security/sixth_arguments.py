"""``python -m tests.security.sixth_arguments SECRET``: prints a job that has one more field of arguments, masked.

The field stands in the source of the job and nowhere else, so every other place must derive it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

_FIELD = "    scaler_args: Args"
_NAME = "engine.core.job.job"


def add_the_field() -> None:
    """Loads the module of the job with the field `sixth_args`."""
    spec: Any = find_spec(_NAME)
    source = spec.loader.get_source(_NAME)
    assert source.count(_FIELD) == 1
    module = sys.modules[_NAME] = module_from_spec(spec)
    more = f'    sixth_args: Args = described(dict, "of a part to come")\n{_FIELD}'
    exec(source.replace(_FIELD, more), module.__dict__)  # noqa: S102


def shown(secret: str) -> dict[str, str]:
    """Returns what files, messages and commands have of a job with a secret in the field, by their names."""
    from engine.codec.records import encoded
    from engine.core.history.run_records import JobRecord
    from engine.core.job.bit_fields import bit_differences
    from engine.core.job.job_rules import ANYTHING
    from engine.files.jobs.job_file import resolve_job
    from engine.files.jobs.job_layers import masked_setting, masked_words
    from engine.files.jobs.resolved_job import explain, secret_arguments
    from engine.report.headline import command

    setting = f"sixth_args.token={secret}"
    resolved = resolve_job(None, {"BAMBOO_SIXTH_ARGS__API_KEY": secret}, [setting], offered=ANYTHING)
    job: Any = resolved.job
    assert job.sixth_args == {"token": secret, "api_key": secret}
    run: Any = SimpleNamespace(scenario=None, job=job.masked, faults=())
    return {
        "record": json.dumps(asdict(job.masked)),
        "event": encoded(JobRecord(worker=-1, pid=1, at_ns=1, version=1, job=job)),
        "values": repr(explain(resolved)),
        "to give": ", ".join(secret_arguments(job)),
        "setting": masked_setting(setting),
        "words": " ".join(masked_words(["--set", setting])),
        "command": command(run),
        "differences": repr(bit_differences({}, {}, job, {})),
    }


if __name__ == "__main__":
    add_the_field()
    print(json.dumps(shown(sys.argv[1])))
