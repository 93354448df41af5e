"""The hosts of a run as they register, and the facts in which all of them have to agree: job, code, arithmetic."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.core.config.bit_fields import different_facts
from engine.core.errors import InvariantError


@dataclass(frozen=True, slots=True)
class RegisteredHost:
    """A host in the store. Names repeat; `incarnation` does not. `lease_id` is the lease that its key hangs on.

    `facts` are those in which all hosts of a run agree.
    """

    name: str
    incarnation: str
    address: str
    lease_id: int
    facts: Mapping[str, Any]

    def to_json(self) -> str:
        """Returns the value of its key."""
        return json.dumps(asdict(self), sort_keys=True)


def registered_host(text: str) -> RegisteredHost:
    """Returns the host of a key's value; raises InvariantError for another text."""
    try:
        return RegisteredHost(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise InvariantError(f"this is no host of a run: {text[:100]!r}") from error


def differences(hosts: Sequence[RegisteredHost]) -> list[str]:
    """Returns a line for each fact in which a host differs from the first one, with both values and both hosts."""
    first, *others = hosts
    return [
        f"{each.name}: {each.before!r} on host {first.name}, {each.now!r} on host {other.name}"
        for other in others
        for each in different_facts(first.facts, other.facts)
    ]
