"""What every test shares: one compute thread, set before anything imports torch, and hypothesis without a stopwatch."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # torch asks for the name of its store, and maybe nobody answers
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="bamboo-tests-")  # the notes of runs are no user's

import hypothesis
import pytest

from tests.soaked import halve

atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# A deadline would make the verdict depend on how busy the machine is, dice on luck: the same tree has the same verdict.
# Another search: --hypothesis-profile=search.
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.register_profile("bamboo", deadline=None, derandomize=True)
hypothesis.settings.load_profile("bamboo")

gc.disable()  # until all tests are collected, which takes a quarter less: most of what that makes stays


@pytest.hookimpl(tryfirst=True)  # before the marks decide
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves some cases to the soak."""
    halve(items)


def pytest_collection_finish() -> None:
    """Spares what is loaded by now, such as torch, from collections: tests of pure code take a third less."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()
