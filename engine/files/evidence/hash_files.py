"""The hashes that workers told, from the files of steps of a run or a twin, with one range of steps in memory."""

from __future__ import annotations

from pathlib import Path

from engine.core.errors import InvariantError
from engine.core.evidence.chain import Chains, unlinked
from engine.core.evidence.proof import Flaw, StepHashes
from engine.core.history.record_lines import TornLineError, decoded
from engine.core.history.run_records import AuditRecord
from engine.core.history.step_files import FOLDER, StepFile
from engine.files.evidence.chain_file import broken_chain
from engine.files.evidence.evidence_file import evidence_lines

_MOST_TORN = 1_000


class HashFiles:
    """The files of hashes in a `folder` of a run, such as ``twin/``, whose ranges have `span` steps.

    Flaws in files that are read are added to `flaws`.
    """

    def __init__(self, run: Path, folder: str, span: int, flaws: list[Flaw]):
        self._run, self._folder, self._span, self._flaws = run, folder, span, flaws
        self._first = -1
        self._steps: dict[int, StepHashes] | None = None

    def of(self, step: int) -> StepHashes | None:
        """Returns the hashes of a step; None if the file of its range is not there, or cannot be read."""
        first = step - step % self._span
        if first != self._first:
            self._first, self._steps = first, self._read(first)
        return None if self._steps is None else self._steps.get(step, StepHashes())

    def _read(self, first: int) -> dict[int, StepHashes] | None:
        file, found, chains = f"{self._folder}{FOLDER}/{StepFile(first, None)}", dict[int, StepHashes](), Chains()
        number = num_torn = 0
        try:
            for line in evidence_lines(self._run, file):
                number += 1
                chains.take(line)
                audit = _audit(line)
                if audit is not None:
                    found.setdefault(audit.step, StepHashes()).add(audit)
                elif (num_torn := num_torn + 1) > _MOST_TORN:
                    raise InvariantError(f"{_MOST_TORN:,} lines before it are no records")
        except FileNotFoundError:
            return None
        except InvariantError as error:
            self._flaws.append(Flaw(f"{file}:{number}", str(error)))
            return None
        self._flaws += broken_chain(chains, file)
        return found


def _audit(line: str) -> AuditRecord | None:
    """Returns the hashes in a line; None for the half of a line that a death left. Raises InvariantError."""
    try:
        record = decoded(unlinked(line)[0])
    except TornLineError:
        return None
    if not isinstance(record, AuditRecord):
        raise InvariantError("this is no record of hashes")
    return record
