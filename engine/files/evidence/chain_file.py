"""Reads the chains in a file of records, and names the line in which one breaks."""

from __future__ import annotations

from pathlib import Path

from engine.core.evidence.chain import Chains
from engine.core.evidence.proof import Flaw
from engine.files.evidence.evidence_file import evidence_lines


def chain_flaws(run: Path, file: str) -> tuple[bool, list[Flaw]]:
    """Returns whether the lines of a file in the folder of a run are linked, and the place where a chain breaks.

    Raises the errors of `evidence`, but for a file that is gone.
    """
    chains = Chains()
    try:
        for line in evidence_lines(run, file):
            chains.take(line)
    except FileNotFoundError:
        return False, [Flaw(file, "it is gone")]
    return chains.num_links > 0, broken_chain(chains, file)


def broken_chain(chains: Chains, file: str) -> list[Flaw]:
    """Returns the place where a chain breaks in a file that was read to its end; nothing if all are whole."""
    chains.end()
    if chains.broken is None:
        return []
    number, why = chains.broken
    return [Flaw(f"{file}:{number}", why)]
