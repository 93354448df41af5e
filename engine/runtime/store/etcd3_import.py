"""Imports the `etcd3` package under any protobuf that is in use.

etcd3 ships message classes that an old compiler has generated; protobuf 4 and newer refuse to load them. What they
are generated from still stands in those files, as serialized descriptors. So the classes are built anew from these,
with protobuf's public functions, and stand in `sys.modules` before etcd3 looks for them. No code of the generated
files is run, and no setting of protobuf is touched. The descriptors live in a pool of their own: their names
(`kv.proto`, `rpc.proto`) are so plain that another package may use them too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from engine.core.errors import EnvironmentLacksError

_PACKAGE = "etcd3.etcdrpc"
# Each may use those before it.
_FILES = ("kv", "auth", "rpc")


def import_etcd3() -> ModuleType:
    """Returns the package. Raises EnvironmentLacksError when it is not there, or another one has its name."""
    if "etcd3" not in sys.modules:
        _install_messages(_find_folder())
    return importlib.import_module("etcd3")


def _find_folder() -> Path:
    found = importlib.util.find_spec("etcd3")
    places = (found and found.submodule_search_locations) or [""]
    folder = Path(places[0]) / "etcdrpc"
    if not all((folder / f"{name}_pb2.py").is_file() for name in _FILES):
        raise EnvironmentLacksError("the client of etcd is not installed: pip install etcd3==0.12.0")
    return folder


def _install_messages(folder: Path) -> None:
    pool = DescriptorPool()
    for name in _FILES:
        pool.AddSerializedFile(read_descriptor(folder / f"{name}_pb2.py"))
        module = _build_module(pool, name)
        sys.modules[module.__name__] = module


def read_descriptor(path: Path) -> bytes:
    """Returns the serialized descriptor in a generated file. Raises EnvironmentLacksError when it has none."""
    text = path.read_text(encoding="utf-8")
    # The statement is parsed alone: the whole file has thousands of lines, and this one everything.
    start = text.find("\nDESCRIPTOR = ")
    end = text.find("\n)\n", start)
    if min(start, end) >= 0:
        for node in ast.walk(ast.parse(text[start : end + 3])):
            if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
                # Written as a text in which each character stands for a byte.
                return str(ast.literal_eval(node.value.args[0])).encode("latin1")
    raise EnvironmentLacksError(f"{path} is not of etcd3 0.12: pip install etcd3==0.12.0")


def _build_module(pool: DescriptorPool, name: str) -> ModuleType:
    """Returns what the generated module would hold: the file's messages, and the values of its enumerations."""
    module = ModuleType(f"{_PACKAGE}.{name}_pb2")
    descriptor = pool.FindFileByName(f"{name}.proto")
    for message in descriptor.message_types_by_name.values():
        setattr(module, message.name, GetMessageClass(message))
    for enum in descriptor.enum_types_by_name.values():
        for value in enum.values:
            setattr(module, value.name, value.number)
    return module
