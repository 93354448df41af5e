"""Imports the `etcd3` package under every version of protobuf.

etcd3 ships message classes from an old protobuf compiler, which protobuf 4 and newer refuse to load. The generated
files contain the serialized descriptors, so this module builds the classes from these with protobuf's public functions,
and puts them into `sys.modules` before it imports etcd3. No code of the generated files runs, and no setting of
protobuf changes. The descriptors have their own pool, because other packages may use the same names (`kv.proto`,
`rpc.proto`).
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
# In dependency order.
_FILES = ("kv", "auth", "rpc")


def import_etcd3() -> ModuleType:
    """Returns the package etcd3; raises EnvironmentLacksError if it is missing or another package has its name."""
    if "etcd3" not in sys.modules:
        spec = importlib.util.find_spec("etcd3")
        places = (spec and spec.submodule_search_locations) or [""]
        folder = Path(places[0]) / "etcdrpc"
        if not all((folder / f"{name}_pb2.py").is_file() for name in _FILES):
            raise EnvironmentLacksError("the client of etcd is not installed: pip install etcd3==0.12.0")
        pool = DescriptorPool()
        for name in _FILES:
            pool.AddSerializedFile(read_descriptor(folder / f"{name}_pb2.py"))
            module = _build_module(pool, name)
            sys.modules[module.__name__] = module
    return importlib.import_module("etcd3")


def read_descriptor(path: Path) -> bytes:
    """Returns the serialized descriptor in a generated file; raises EnvironmentLacksError if there is none."""
    text = path.read_text(encoding="utf-8")
    # Only this statement is parsed: the file has thousands of lines.
    start = text.find("\nDESCRIPTOR = ")
    end = text.find("\n)\n", start)
    if min(start, end) >= 0:
        for node in ast.walk(ast.parse(text[start : end + 3])):
            if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
                # Each character stands for a byte.
                return str(ast.literal_eval(node.value.args[0])).encode("latin1")
    raise EnvironmentLacksError(f"{path} is not of etcd3 0.12: pip install etcd3==0.12.0")


def _build_module(pool: DescriptorPool, name: str) -> ModuleType:
    """Returns a module with the messages and enumeration values of a file, like the generated one."""
    module = ModuleType(f"{_PACKAGE}.{name}_pb2")
    descriptor = pool.FindFileByName(f"{name}.proto")
    for message in descriptor.message_types_by_name.values():
        setattr(module, message.name, GetMessageClass(message))
    for enum in descriptor.enum_types_by_name.values():
        for value in enum.values:
            setattr(module, value.name, value.number)
    return module
