"""Imports gRPC without its handlers of forks; every module that uses gRPC takes it from here.

Rule: a fork of this process makes no call of gRPC. The handlers, by which it could, abort it now and then (SIGABRT)
when another thread is in a call at the fork. gRPC reads the variable once, when it is imported; children do not get it.
"""

from __future__ import annotations

import os

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"

_before = os.environ.get(_VARIABLE)
os.environ[_VARIABLE] = "0"
try:
    import grpc
finally:
    if _before is None:
        del os.environ[_VARIABLE]
    else:
        os.environ[_VARIABLE] = _before

__all__ = ["grpc"]
