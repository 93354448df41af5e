"""What every test shares: one compute thread, set before anything imports torch, and hypothesis without a stopwatch."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import hypothesis

# A deadline would make the verdict depend on how busy the machine is.
hypothesis.settings.register_profile("bamboo", deadline=None, print_blob=True)
hypothesis.settings.load_profile("bamboo")
