"""The libraries of NCCL as they are released: what bamboo's binding assumes of them, without a GPU.

`make nccl-wheels` fetches their wheels, a gigabyte; without them each test is skipped with the reason.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine.files.accelerators import LEAST_NCCL
from engine.runtime.transport import nccl_library
from engine.runtime.transport.nccl_library import Config

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".venv" / "nccl-wheels"
VERSIONS = ("cu12-2.27.5", "cu13-2.28.9", "cu13-2.29.7", "cu13-2.32.3")
FUNCTIONS = set(re.findall(r"\bnccl(?:Comm|Get|Group|Send|Recv)\w*", Path(nccl_library.__file__).read_text()))
# What a program in C knows of a header, with the types of CUDA that it names.
STUBS = {
    "cuda_runtime.h": "typedef struct S *cudaStream_t;\ntypedef struct E *cudaEvent_t;\n#define CUDART_VERSION 0\n",
    "cuda_fp16.h": "",
}
CONSTANTS = {
    "NCCL_UNIQUE_ID_BYTES": 128,
    "initial.magic": nccl_library._MAGIC,
    "ncclUint8": nccl_library._UINT8,
    "ncclSuccess": nccl_library._SUCCESS,
    "ncclInProgress": nccl_library._IN_PROGRESS,
    "ncclUnhandledCudaError": nccl_library._OF_CUDA,
}
TEXTS = {
    1: "unhandled cuda error",
    2: "unhandled system error",
    3: "internal error",
    4: "invalid argument",
    5: "invalid usage",
    6: "remote process exited",
    7: "NCCL operation in progress",
}
ASKED = """
import ctypes, json, sys
from engine.runtime.transport.nccl_library import NcclLibrary
found, nothing = NcclLibrary(sys.argv[1]), ctypes.c_void_p()
found.begin_group(); found.end_group(); found.abort(nothing); found.revoke(nothing)
told = {"version": found.version, "ids": [found.new_id().hex() for _ in range(2)], "refused": []}
told["texts"] = [found._c.ncclGetErrorString(each).decode() for each in range(9)]
told["missing"] = [each for each in sys.argv[2].split() if not hasattr(found._c, each)]
for call in (lambda: found.progress(nothing), lambda: found.begin_join(bytes(128), 3, 2)):
    try:
        call()
    except RuntimeError as error:
        told["refused"].append(str(error))
print(json.dumps(told))
"""

pytestmark = pytest.mark.soak


def wheel(name: str) -> Path:
    """Returns the wheel of a version, or skips."""
    kind, _, version = name.partition("-")
    found = sorted(WHEELS.glob(f"nvidia_nccl_{kind}-{version}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of NCCL {name} in {WHEELS}: make nccl-wheels fetches it")
    return found[0]


@pytest.mark.parametrize("name", VERSIONS)
def test_each_library_has_what_is_called_or_is_refused(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel(name)) as packed:
        at = packed.extract("nvidia/nccl/lib/libnccl.so.2", tmp_path)
    command = [sys.executable, "-c", ASKED, at, " ".join(FUNCTIONS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    shutil.rmtree(tmp_path)
    version = tuple(map(int, name.partition("-")[2].split(".")))
    if version < LEAST_NCCL:
        least = ".".join(map(str, LEAST_NCCL))
        assert f"NCCL {name.partition('-')[2]} was found, and {least} or newer is needed" in done.stderr
        return
    told = json.loads(done.stdout)
    assert (tuple(told["version"]), told["missing"]) == (version, [])
    assert len(set(told["ids"])) == 2 and {len(each) for each in told["ids"]} == {256}
    assert {code: told["texts"][code][: len(text)] for code, text in TEXTS.items()} == TEXTS
    no_communicator, no_driver = told["refused"]
    assert no_communicator.startswith("invalid argument")
    assert no_driver.startswith(("unhandled cuda error", "invalid argument"))  # the latter with a driver


@pytest.mark.parametrize("name", VERSIONS)
def test_each_header_has_the_configuration_or_its_beginning(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    with zipfile.ZipFile(wheel(name)) as packed:
        header = packed.read("nvidia/nccl/include/nccl.h").decode()
    for path, text in {**STUBS, "nccl.h": header}.items():
        (tmp_path / path).write_text(text)
    own = [each[0] for each in Config._fields_]
    block = header[header.index("typedef struct ncclConfig") : header.index("} ncclConfig_t;")]
    theirs = [each for each in re.findall(r"(\w+);", block) if each in own]
    rows = [f'P("{each}", offsetof(ncclConfig_t, {each}))' for each in theirs]
    rows += [f'P("{each}", {each})' for each in CONSTANTS]
    rows += ['P("undefined", NCCL_CONFIG_UNDEF_INT)']
    text = "\n".join(f"#include <{each}>" for each in ("stddef.h", "stdio.h", "nccl.h"))
    text += '\n#define P(name, value) printf(name " %lld\\n", (long long)(value));\n'
    (tmp_path / "told.c").write_text(
        f"{text}int main(void) {{ ncclConfig_t initial = NCCL_CONFIG_INITIALIZER; {' '.join(rows)} return 0; }}\n"
    )
    subprocess.run([compiler, "-I.", "-o", "told", "told.c"], cwd=tmp_path, check=True, timeout=60)
    lines = subprocess.run([tmp_path / "told"], capture_output=True, text=True, check=True, timeout=10).stdout
    told = [line.split() for line in lines.splitlines()]
    found = {key: int(value) for key, value in told[: len(theirs)]}
    assert list(found) == own[: len(found)], "the fields that are older than ours are the first ones"
    assert found == {each: getattr(Config, each).offset for each in found}
    rest = {key: int(value) for key, value in told[len(theirs) :]}
    assert {each: rest[each] for each in CONSTANTS} == CONSTANTS
    assert rest["undefined"] == nccl_library._UNDEFINED
    assert len(found) >= 15
