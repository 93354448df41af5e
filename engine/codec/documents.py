"""The values of a run's keys in the store, as text and back: the state of its coordinator, and keys for readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from engine.codec.values import read, text_of
from engine.core.errors import InvariantError
from engine.core.job.job import Job
from engine.core.program.ballot import Commit
from engine.core.protocol.coordinator_state import COMMIT, FACTS, STATE, CoordinatorState, resumed
from engine.core.protocol.run_status import Heartbeats, Member, RunStatus, Verdicts, status_of
from engine.core.protocol.state import DECIDED, State, again

_FACTS = ("started", "validated", "kept", "raised", "codes", "deadly", "monitors")


def _form(of: type, names: tuple[str, ...]) -> type:
    """Returns the form of some fields of a named tuple as an object."""
    hints = get_type_hints(of)
    return msgspec.defstruct(of.__name__, [(name, hints[name]) for name in names])


_FORM_OF_STATE = _form(State, DECIDED)
_FORM_OF_FACTS = _form(CoordinatorState, _FACTS)
_FORM_OF_COMMIT = _form(Commit, Commit._fields)


def _fields_of(text: str, form: type, called: str) -> dict[str, Any]:
    return msgspec.structs.asdict(read(text, form, called))


def state_text(state: State) -> str:
    """Returns the state of the membership protocol as one line, without its times."""
    return text_of(dict(zip(DECIDED, state, strict=False)), sort_keys=True)


def state_of(text: str, now_ns: int) -> State:
    """Returns the state of another coordinator on this one's clock; raises InvariantError for another text."""
    return again(_fields_of(text, _FORM_OF_STATE, "state of the membership protocol"), now_ns)


def documents(state: CoordinatorState) -> dict[str, str]:
    """Returns the value of each key in the store, as one line of JSON."""
    facts = {name: getattr(state, name) for name in _FACTS}
    texts = {STATE: state_text(state.membership), FACTS: text_of(facts, sort_keys=True)}
    return texts if state.commit is None else texts | {COMMIT: text_of(state.commit._asdict())}


def resume(job: Job, texts: Mapping[str, str], now_ns: int) -> CoordinatorState:
    """Returns the state kept in `documents`, on this coordinator's clock; raises InvariantError for another form."""
    membership = state_of(texts[STATE], now_ns)
    facts = _fields_of(texts.get(FACTS, ""), _FORM_OF_FACTS, "facts of a coordinator")
    commit = _fields_of(texts[COMMIT], _FORM_OF_COMMIT, "commit of a coordinator") if COMMIT in texts else None
    return resumed(job, membership, facts, None if commit is None else Commit(**commit), now_ns)


def status_of_keys(run_id: str, keys: Mapping[str, bytes], now_ns: int) -> RunStatus:
    """Returns the status of a live run from its keys at a time of the launcher's clock.

    Raises:
        InvariantError: they have another form.
    """
    try:
        state = state_of(keys[STATE].decode(), 0)
        beats = read(keys["heartbeats"], Heartbeats, "heartbeats") if "heartbeats" in keys else Heartbeats(now_ns)
        members = {
            int(key.removeprefix("members/")): read(value, Member, "member")
            for key, value in keys.items()
            if key.startswith("members/")
        }
        verdicts = read(keys.get("verdicts", b"[]"), Verdicts, "list of verdicts")
        return status_of(run_id, state, verdicts, beats, members, now_ns)
    except (KeyError, ValueError, InvariantError) as error:
        raise InvariantError(f"the keys of run {run_id} hold something else: {error!r}") from error
