"""The client package is importable whatever protobuf is installed; this file runs under several of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.core.errors import EnvironmentLacksError
from engine.runtime.store.etcd3_import import import_etcd3, read_descriptor

ROOT = Path(__file__).resolve().parents[2]
OURS = "from engine.runtime.store.etcd3_import import import_etcd3\n"
SWITCH = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != SWITCH} | variables
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_plain_import_fails_and_ours_does_not() -> None:
    assert int(version("protobuf").split(".")[0]) >= 4
    plain = run("import etcd3")
    assert plain.returncode == 1 and "TypeError: Descriptors cannot be created directly" in plain.stderr
    ours = run(OURS + "print(import_etcd3().__version__, import_etcd3() is import_etcd3())")
    assert (ours.returncode, ours.stdout, ours.stderr) == (0, "0.12.0 True\n", "")


def test_protobuf_keeps_its_quick_implementation() -> None:
    code = OURS + (
        "import_etcd3()\nimport os\nfrom google.protobuf.internal import api_implementation\n"
        f"print(api_implementation.Type(), os.environ.get({SWITCH!r}))"
    )
    assert run(code).stdout == "upb None\n"
    assert run(code, **{SWITCH: "python"}).stdout == "python python\n"


def test_messages_go_to_bytes_and_back() -> None:
    rpc = import_etcd3().etcdrpc
    sent = rpc.TxnRequest(
        compare=[rpc.Compare(key=b"a", target=rpc.Compare.VERSION, result=rpc.Compare.GREATER, version=0)],
        success=[rpc.RequestOp(request_put=rpc.PutRequest(key=b"a\xff", value=b"1", lease=7))],
    )
    # Tags, numbers and lengths, as etcd has them: result 1 (greater), version 0 (set in a oneof), key; put, lease 7.
    compare, put = b"\x08\x01\x1a\x01a\x20\x00", b"\x0a\x02a\xff\x12\x011\x18\x07"
    assert sent.SerializeToString() == b"\x0a\x07" + compare + b"\x12\x0b\x12\x09" + put
    assert rpc.TxnRequest.FromString(sent.SerializeToString()) == sent
    assert (rpc.NOSPACE, rpc.AlarmRequest.DEACTIVATE, rpc.RangeRequest.DESCEND) == (1, 2, 2)


def test_another_package_may_have_the_same_file_names() -> None:
    code = (
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "for name in ('kv.proto', 'auth.proto', 'rpc.proto'):\n"
        "    descriptor_pool.Default().Add(descriptor_pb2.FileDescriptorProto(name=name, package='other'))\n"
    )
    done = run(code + OURS + "print(import_etcd3().etcdrpc.PutRequest(key=b'a').key)")
    assert (done.stdout, done.stderr) == ("b'a'\n", "")


@pytest.mark.parametrize("blocked", ["", "etcd3/etcdrpc/kv_pb2.py"])
def test_another_package_of_that_name_is_not_taken(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "etcd3").mkdir()
    (tmp_path / "etcd3" / "__init__.py").write_text("raise ImportError('of another client')\n")
    if blocked:
        (tmp_path / "etcd3" / "etcdrpc").mkdir()
        (tmp_path / blocked).write_text("")
    done = run(OURS + "import_etcd3()", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "EnvironmentLacksError: the client of etcd is not installed: pip install etcd3==0.12.0" in done.stderr


@pytest.mark.parametrize("text", ["", "\nDESCRIPTOR = new_way(\n  1\n)\n", "\nDESCRIPTOR = x("])
def test_a_generated_file_of_another_kind_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kv_pb2.py"
    path.write_text(text)
    with pytest.raises(EnvironmentLacksError, match=r"kv_pb2\.py is not of etcd3 0\.12"):
        read_descriptor(path)
