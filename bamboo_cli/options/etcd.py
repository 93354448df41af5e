"""The options for a kept etcd cluster as the coordinator's store; without them a run starts a private one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
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
PlainHttp = Annotated[
    bool,
    typer.Option(
        "--etcd-plain-http",
        help="Allow clear text to an etcd that is not on this host.",
        rich_help_panel="Coordination",
    ),
]


def etcd_settings(endpoints: str, plain_http: bool, environment: Mapping[str, str] = os.environ) -> EtcdSettings | None:
    """Returns the settings of the kept cluster, or None for a private one; raises UserError with every problem."""
    from engine.runtime.store.etcd_settings import read_settings

    source = "--etcd" if environment.get("BAMBOO_ETCD") != endpoints else "BAMBOO_ETCD"
    return read_settings(endpoints, environment, allow_plain_http=plain_http, source=source) if endpoints else None
