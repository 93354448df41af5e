"""Guards against wrong keys, names, processes and sizes hold under ``python -O``, which drops every `assert`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

GUARDS = {
    "keys of other runs": """
from engine.runtime.store.etcd_kv import KeySpace
KeySpace("/bamboo/mine/").near(b"/bamboo/other/state")
""",
    "a range beyond the run": """
from engine.runtime.store.etcd_kv import KeySpace
keys = KeySpace("/bamboo/mine/")
keys._end = b"/bamboo/mine/"
keys.far_range("")
""",
    "a root that is no run's": """
from engine.runtime.store.etcd_kv import EtcdKV
from engine.runtime.store.etcd_settings import Endpoint, EtcdSettings
EtcdKV(EtcdSettings((Endpoint("127.0.0.1", 1),)), "/")
""",
    "a client behind a fork": """
import os
from engine.runtime.store.etcd_kv import EtcdCalls
from engine.runtime.store.etcd_settings import Endpoint, EtcdSettings
calls = EtcdCalls(EtcdSettings((Endpoint("127.0.0.1", 1),)), 1.0)
calls._pid = os.getpid() + 1
calls.check_process()
""",
    "etcd outside of the main thread": """
import threading
from pathlib import Path
from engine.core.errors import InvariantError
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
raised = []
def start():
    try:
        EmbeddedEtcd(Path("/nowhere")).start()
    except InvariantError as error:
        raised.append(error)
thread = threading.Thread(target=start)
thread.start()
thread.join()
raise raised[0]
""",
    "a run's name outside of the folder": """
from datetime import datetime
from pathlib import Path
from engine.files.run_folder import create_run_folder
create_run_folder(Path("results"), "../up", datetime.now(), "0000")
""",
    "a message that does not fit": """
import secrets
from engine.core.program.inventory import InventoryMessage
from engine.runtime.process.link import packet
packet(InventoryMessage(0, secrets.token_hex(200_000), ()))
""",
    "a value that is too large for the store": """
from engine.core.kv import MAX_VALUE_BYTES, Put
Put("key", bytes(MAX_VALUE_BYTES + 1))
""",
    "a vote of a stranger": """
from engine.core.ownership import Grid, fresh
from engine.core.program.ballot import open_ballot
from engine.core.program.ballot import SlotVote, VoteMessage
open_ballot(0, 0, fresh(Grid(2, 2, 1)), 1.0).add(9, VoteMessage(0, 0, (SlotVote(0, 0),)))
""",
}


TRY_ALL = """
import json, sys
sys.path.insert(0, sys.argv[1])
raised = {}
for name, code in json.loads(sys.argv[2]).items():
    try:
        exec(code, {})
    except Exception as error:
        raised[name] = type(error).__name__
print(json.dumps(raised))
"""


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The kind of exception that each guard raises in one process without asserts; a guard that is gone lacks."""
    command = [sys.executable, "-O", "-c", TRY_ALL, str(ROOT), json.dumps(GUARDS)]
    folder = tmp_path_factory.mktemp("guards")
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_holds_without_asserts(guard: str, raised: dict[str, str]) -> None:
    """Before, the guard was an `assert`: ``python -O`` let the wrong value pass."""
    assert raised.get(guard) == "InvariantError"
