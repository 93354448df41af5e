"""The Python program for Ray: one actor on each node, which starts an agent and waits for it.

Rules: the actors are spread strictly, so each is on a node of its own. An actor that is lost ends no other.
Every agent exits with the outcome of the run, so any that is left tells it.
"""

from __future__ import annotations

from engine.core.launch.launch_plan import LaunchPlan

_PROGRAM = '''"""Runs {name} on {num_hosts} nodes of Ray, one bamboo agent on each; made by `bamboo launch ray`."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOSTS = {num_hosts}
AGENT = {words}
VARIABLES = {variables!r}
LOST, NO_OUTCOME = (85, 137, 143), 69


def ends_with_its_actor():
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # a notice for its workers, if Ray ends the actor


@ray.remote(num_cpus=1, max_restarts=0)
class Host:
    def run(self, run):
        node = ray.get_runtime_context().get_node_id()[:40]
        address = ray.util.get_node_ip_address()
        words = [*AGENT, "--run", run, "--node", node, "--address", address]
        return subprocess.Popen(words, env={{**os.environ, **VARIABLES}}, preexec_fn=ends_with_its_actor).wait()


def main():
    ray.init()
    group = placement_group([{{"CPU": 1}}] * HOSTS, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    # Not the number of the job: these begin again in each cluster.
    run = f"ray-{{time.strftime('%Y%m%d-%H%M%S')}}-{{secrets.token_hex(2)}}"
    print(f"the run is called {{run}}", flush=True)
    hosts = [
        Host.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, number)).remote()
        for number in range(HOSTS)
    ]
    waiting = [each.run.remote(run) for each in hosts]
    outcome = NO_OUTCOME
    while waiting:
        (done, *_), waiting = ray.wait(waiting, num_returns=1)
        try:
            code = ray.get(done)
        except ray.exceptions.RayError as error:
            print(f"a node was lost, and the others go on: {{type(error).__name__}}", flush=True)
            continue
        print(f"an agent has ended with {{code}}", flush=True)
        if code >= 0 and code not in LOST:
            outcome = code
    return outcome


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_script(plan: LaunchPlan) -> str:
    """Returns the program."""
    words = "[\n" + "".join(f"    {each!r},\n" for each in plan.words()) + "]"
    return _PROGRAM.format(name=plan.name, num_hosts=plan.num_hosts, words=words, variables=dict(plan.variables))
