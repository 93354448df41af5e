"""The keeper of a run: works on the disk of its checkpoints, for the launcher, until the launcher lets it go.

It holds the claim of the run, publishes manifests, removes old checkpoints and spare parts, hashes the user's files,
and finds the newest good checkpoint. Rule: it decides nothing. Its launcher may give it up at any time.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.codec.values import plain_of, value_of
from engine.core.errors import StorageError
from engine.core.job.bit_fields import bit_facts
from engine.core.job.job import Job
from engine.core.manifest import Manifest, owner_of
from engine.files.checkpoint_folder import CheckpointFolder, checkpoints_at, claimed, sweep
from engine.files.host_facts import host_facts
from engine.files.jobs.checkpoint_place import weights_hash
from engine.files.jobs.user_files import code_files, data_files
from engine.runtime.process.prctl import name_process


@dataclass(slots=True)
class _Work:
    """The work for one run; `claims` are released at its end."""

    job: Job
    place: str
    run: str
    heir: str
    folder: CheckpointFolder
    claims: contextlib.ExitStack
    has_claim: bool = False
    init: str = ""
    code: tuple[tuple[str, int, str], ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)  # the parts of a manifest that are the same in all of a run


def main(fd: int) -> int:
    """Answers each question that comes through a socket, until its other end is closed."""
    with socket.socket(fileno=fd) as near, near.makefile("rwb") as lines, contextlib.ExitStack() as claims:
        plain, place, run, heir, number = json.loads(lines.readline())
        # The claim of a keeper before may still be there: it was killed, or waits for the disk for ever.
        heir = heir if number == 1 else f"{heir or run} {number}"
        work = _Work(Job(**plain), place, run, heir, checkpoints_at(place, run=run), claims)
        for line in lines:
            name, *arguments = json.loads(line)
            try:
                answer = [WORK[name](work, *arguments), ""]
            except Exception as error:  # training continues
                answer = [None, str(error) or repr(error)]
            with contextlib.suppress(OSError):  # the launcher is gone
                lines.write(json.dumps(answer).encode() + b"\n")
                lines.flush()
    return 0


def _begin(work: _Work, init: str | None, code: list[list[Any]] | None) -> tuple[Any, Any]:
    """Claims the place; returns the hash of the given weights and the code files as they are, unless they are known."""
    if work.job.checkpoints and not work.has_claim:
        work.claims.enter_context(claimed(work.place, work.run, work.heir))
        work.has_claim = True
        with contextlib.suppress(StorageError):  # then the parts of killed runs stay
            sweep(work.place)
    work.init = weights_hash(work.job.init) if init is None else init
    work.code = code_files(work.job) if code is None else _rows(code)
    return work.init, work.code


def _publish(work: _Work, draft: dict[str, Any]) -> tuple[str, int]:
    if not work.fixed:  # it reads the files of the data once
        work.fixed = {"facts": bit_facts(host_facts(Path.cwd())), "data_files": data_files(work.job)}
    manifest = replace(value_of(draft, Manifest, "the draft"), init=work.init, code_files=work.code, **work.fixed)
    return work.folder.publish(manifest).file, manifest.num_bytes


def _changed_code(work: _Work) -> list[str]:
    return sorted({name for name, _, _ in set(work.code) ^ set(code_files(work.job))})


def _newest_good(work: _Work, place: str, run: str, step: int | None, before: int | None) -> tuple[Any, ...]:
    good = checkpoints_at(place).newest_good(run, step, refuses=lambda manifest: _too_new(manifest, before))
    manifest = good.manifest
    facts = ("", None) if manifest is None else (manifest.init, plain_of(manifest.monitors))
    return good.name, facts[0], good.refused, facts[1]


def _too_new(manifest: Manifest, before: int | None) -> str:
    is_new = before is not None and manifest.step >= before
    return f"{manifest.folder}: its tensors were refused" if is_new else ""


def _end(work: _Work, wrote: bool) -> None:
    """Removes the parts of the run that no manifest names, if it `wrote` any, and releases the claim."""
    if wrote:
        with contextlib.suppress(StorageError):  # then they stay
            work.folder.remove_orphans(lambda owner: owner == owner_of(work.run))
    work.claims.close()
    work.has_claim = False


def _prune(work: _Work, best: int | None) -> None:
    stays = [name for name in work.folder.names() if name.step == best]
    work.folder.prune(work.job.keep, work.run, stays)


def _rows(plain: list[list[Any]]) -> tuple[tuple[str, int, str], ...]:
    return tuple((name, size, sha256) for name, size, sha256 in plain)


WORK: Mapping[str, Callable[..., Any]] = {
    "begin": _begin,
    "publish": _publish,
    "prune": _prune,
    "remove parts": lambda work, step, files: work.folder.remove_parts(step, files),
    "changed code": _changed_code,
    "newest good": _newest_good,
    "end": _end,
}

if __name__ == "__main__":
    name_process("bamboo-keeper")
    sys.exit(main(int(sys.argv[1])))
