"""How a pair of actions is run at once: by a handler that a user registers, else one after the other.

Whoever knows a way to run a forward and a backward together on their device (two streams, say) registers it where their
model is made, so that it is loaded in every worker. A handler gets both as calls without arguments, in the order of the
program, from the worker's main thread; it has to run each once, and to let through what they raise. Which actions are
pairs stands in `engine.core.schedules.overlap_pairs`; what is computed does not depend on how they are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from engine.core.action import Action
from engine.core.errors import InvariantError
from engine.core.schedules.overlap_pairs import OVERLAPS, Overlap, pairs_of
from engine.runtime.worker.step_end import Method

Call = Callable[[], None]
Handler = Callable[[Call, Call], None]
Entry = tuple[Action, str, Method]  # an action, its text, and what runs it
Run = Callable[[Action, str, Method], None]

_handlers: dict[Overlap, Handler] = {}


def register(op: Overlap, handler: Handler) -> None:
    """Has `handler` run the pairs of one kind in this process from now on; the last one registered counts."""
    if op not in OVERLAPS.values():
        raise ValueError(f"expected one of {', '.join(OVERLAPS.values())}, found {op!r}")
    _handlers[op] = handler


def run_in_order(entries: Sequence[Entry], check: Call, run: Run) -> None:
    """Runs actions by `run`, after a `check` each; a pair for which there is a handler through it, after one check.

    Raises InvariantError when a handler has not run each of its two once, or what they raise.
    """
    actions = [action for action, _, _ in entries]
    handlers = {each: _handlers[kind] for each, kind in pairs_of(actions) if kind in _handlers} if _handlers else {}
    for position, entry in enumerate(entries):
        if position - 1 in handlers:
            continue  # the second of a pair
        check()
        if position in handlers:
            _run_pair(handlers[position], (entry, entries[position + 1]), run)
        else:
            run(*entry)


def _run_pair(handler: Handler, pair: tuple[Entry, Entry], run: Run) -> None:
    begun: list[str] = []

    def call(entry: Entry) -> None:
        begun.append(entry[1])
        run(*entry)

    handler(partial(call, pair[0]), partial(call, pair[1]))
    texts = [text for _, text, _ in pair]
    if sorted(begun) != sorted(texts):
        raise InvariantError(f"the handler of a pair has run {begun}, not each of {texts} once")
