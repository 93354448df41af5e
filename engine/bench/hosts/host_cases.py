"""The cases of `bamboo bench hosts`: losses on three hosts of namespaces, with an etcd of three members over TLS."""

from __future__ import annotations

from functools import partial

from engine.bench.figures.rows import Cases
from engine.bench.hosts.host_losses import bench_agents, bench_power
from engine.bench.hosts.quiet_runs import bench_clocks, bench_steps
from engine.bench.hosts.worker_deaths import bench_deaths

USUAL = 20  # deaths of each kind; what takes longer is measured a quarter as often
_QUARTER = 4


def host_cases(quick: bool, repeats: int = USUAL) -> Cases:
    """Returns the cases of `bamboo bench hosts`."""
    many = 1 if quick else repeats
    few = max(1, many // _QUARTER)
    return {
        "workers": partial(bench_deaths, many),
        "agents": partial(bench_agents, many),
        "power": partial(bench_power, few),
        "steps": partial(bench_steps, few),
        "clocks": partial(bench_clocks, few),
    }
