"""The options for a kept etcd cluster as the coordinator's store; without them a run starts a private one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from engine.core.history.process_records import StoreRecord
    from engine.runtime.store.etcd_settings import EtcdSettings

Endpoints = Annotated[
    str,
    typer.Option(
        "--etcd",
        envvar="BAMBOO_ETCD",
        metavar="HOST:PORT[,HOST:PORT]",
        help="A kept etcd cluster, instead of a private etcd for this run. TLS, user and password: "
        "BAMBOO_ETCD_CA, _CERT, _KEY, _USER, _PASSWORD or _PASSWORD_FILE.",
        rich_help_panel="Coordination",
    ),
]
EndpointsOfRun = Annotated[
    str,
    typer.Option(
        "--etcd",
        envvar="BAMBOO_ETCD",
        metavar="HOST:PORT[,HOST:PORT]",
        help="The kept etcd cluster of the run. A run folder may name any address, so bamboo asks only the addresses "
        "named here, and the private etcd of a run of yours on this host.",
        rich_help_panel="Coordination",
    ),
]
PlainHttp = Annotated[
    bool,
    typer.Option(
        "--etcd-plain-http",
        help="Allow clear text to an etcd that is not on this host.",
        rich_help_panel="Coordination",
    ),
]


def settings_of_run(logs: Path, store: StoreRecord, named: str, plain_http: bool) -> EtcdSettings | None:
    """Returns the settings for the store that a run folder names; None if the user did not name that store.

    Another user may have written the record. So the user's endpoints and credentials are taken, never the record's, and
    a private store is asked, without credentials, through its socket in `logs` of the run, if it is this user's.
    Raises UserError for a mistake in the user's settings.
    """
    from engine.runtime.store.etcd_settings import private_settings

    if store.private:
        return private_settings(logs)
    settings = etcd_settings(named, plain_http)
    is_named = settings is not None and not set(store.endpoints).isdisjoint(map(str, settings.endpoints))
    return settings if is_named else None


def etcd_settings(endpoints: str, plain_http: bool, environment: Mapping[str, str] = os.environ) -> EtcdSettings | None:
    """Returns the settings of the kept cluster, or None for a private one; raises UserError with every problem."""
    from engine.runtime.store.etcd_settings import read_settings

    source = "--etcd" if environment.get("BAMBOO_ETCD") != endpoints else "BAMBOO_ETCD"
    return read_settings(endpoints, environment, allow_plain_http=plain_http, source=source) if endpoints else None
