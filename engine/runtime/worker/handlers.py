"""The registry of handlers: functions of a user that run the actions of one op, or a pair of forward and backward.

A handler gets one `Call` for an op and two for a pair, in the order of the program, in the worker's main thread. It
must run each call once and let its exceptions through. `engine.core.schedules.overlap_pairs` has the rule for pairs.
The result of a step does not depend on handlers. The module of a model registers them, so every worker has them:

    pair   OVERLAP_F_B: handler(forward, backward) -> F: handler(forward) -> the executor's method for F
    op                                                F: handler(forward) -> the executor's method for F
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.core.action import Action, Op
from engine.core.errors import InvariantError
from engine.core.schedules.overlap_pairs import OVERLAPS, Overlap, pairs_of

Handler = Callable[..., None]  # takes one Call for an op, two for a pair
Method = Callable[[Action, int], None]  # takes an action and the open step
QueuedAction = tuple[Action, str, Method]  # an action, its text, and the executor's method for it
RunAction = Callable[[Action, str, Method], None]

_handlers: dict[str, Handler] = {}


@dataclass(frozen=True, slots=True)
class Call:
    """One action that is ready to run: calling it runs the action."""

    action: Action
    run: Callable[[], None]

    def __call__(self) -> None:
        """Runs the action; raises its exception."""
        self.run()


def register(op: Op | Overlap, handler: Handler) -> None:
    """Runs an op or a kind of pair through `handler` in this process from now on; the last registered one counts.

    Raises ValueError if there is no such op or pair.
    """
    if op not in (*Op, *OVERLAPS.values()):
        raise ValueError(f"expected an op such as F, or one of {', '.join(OVERLAPS.values())}, found {op!r}")
    _handlers[op] = handler


def run_in_order(entries: Sequence[QueuedAction], check: Callable[[], None], run: RunAction) -> None:
    """Runs actions by `run`, each after a `check`; a pair that has a handler after one check.

    Raises InvariantError if a handler has not run each of its calls once, and the exceptions of the actions.
    """

    def run_one(entry: QueuedAction) -> None:
        handler = _handlers.get(entry[0].op)
        if handler is None:
            run(*entry)
        else:
            _hand_over(handler, (entry,), lambda each: run(*each))

    actions = [action for action, _, _ in entries]
    pairs = {each: _handlers[kind] for each, kind in pairs_of(actions) if kind in _handlers} if _handlers else {}
    for position, entry in enumerate(entries):
        if position - 1 in pairs:
            continue  # the second of a pair
        check()
        if position in pairs:
            _hand_over(pairs[position], (entry, entries[position + 1]), run_one)
        else:
            run_one(entry)


def _hand_over(handler: Handler, entries: Sequence[QueuedAction], run: Callable[[QueuedAction], None]) -> None:
    begun: list[str] = []

    def call(entry: QueuedAction) -> Call:
        def begin() -> None:
            begun.append(entry[1])
            run(entry)

        return Call(entry[0], begin)

    handler(*map(call, entries))
    texts = [text for _, text, _ in entries]
    if sorted(begun) != sorted(texts):
        raise InvariantError(f"a handler has run {begun}, not each of {texts} once")
