"""The manifests for Kubernetes: an Indexed Job of one agent per node, its service, the job file, etcd's certificates.

Rules: a pod that fails is replaced by itself (`backoffLimitPerIndex`), and the others stay. Pods stand on different
nodes. A pod that has to leave gets SIGTERM, which is a notice, and the grace. A usage error or a difference in the
arithmetic is no reason to try again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.errors import ExitCode
from engine.core.launch.launch_plan import LaunchPlan

Resource = dict[str, Any]
_FILES = "/etc/bamboo"
_ETCD = "/etc/bamboo-etcd"
_LABEL = "app.kubernetes.io/name"
TRIES = 6  # of each index
# A file of the secret -> the variable that names it.
TLS_FILES = {"ca.crt": "BAMBOO_ETCD_CA", "tls.crt": "BAMBOO_ETCD_CERT", "tls.key": "BAMBOO_ETCD_KEY"}
_NO_TRY = (ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.NOTHING_MATCHED)


def kubernetes_manifests(plan: LaunchPlan, job_text: str, tls: Mapping[str, str]) -> list[Resource]:
    """Returns the manifests; `tls` has the files of the secret in base64, and is empty without TLS."""
    found = [_secret(plan, tls)] if tls else []
    return [*found, _service(plan), _config(plan, job_text), _job(plan, list(tls))]


def _named(kind: str, version: str, plan: LaunchPlan, part: str = "") -> Resource:
    labels = {_LABEL: "bamboo", "app.kubernetes.io/instance": plan.name}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": f"bamboo-{plan.name}{part}", "labels": labels}}


def _secret(plan: LaunchPlan, tls: Mapping[str, str]) -> Resource:
    return _named("Secret", "v1", plan, "-etcd") | {"type": "Opaque", "data": dict(tls)}


def _service(plan: LaunchPlan) -> Resource:
    """Returns the service that gives the pods names; nothing listens on its port."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": f"bamboo-{plan.name}"},
    }
    return _named("Service", "v1", plan) | {"spec": spec}


def _config(plan: LaunchPlan, job_text: str) -> Resource:
    return _named("ConfigMap", "v1", plan) | {"data": {"job.yaml": job_text}}


def _job(plan: LaunchPlan, tls: list[str]) -> Resource:
    rules = [
        {"action": "FailIndex", "onExitCodes": {"operator": "In", "values": sorted(map(int, _NO_TRY))}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": plan.num_hosts,
        "parallelism": plan.num_hosts,
        "backoffLimitPerIndex": TRIES,
        "maxFailedIndexes": plan.num_hosts,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {_LABEL: "bamboo"}}, "spec": _pod(plan, tls)},
    }
    return _named("Job", "batch/v1", plan) | {"spec": spec}


def _pod(plan: LaunchPlan, tls: list[str]) -> Resource:
    apart = {
        "labelSelector": {"matchLabels": {"batch.kubernetes.io/job-name": f"bamboo-{plan.name}"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    volumes: list[Resource] = [{"name": "job", "configMap": {"name": f"bamboo-{plan.name}"}}]
    if tls:
        volumes.append({"name": "etcd", "secret": {"secretName": f"bamboo-{plan.name}-etcd", "defaultMode": 0o400}})
    return {
        "subdomain": f"bamboo-{plan.name}",
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": plan.grace_s,
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [_container(plan, tls)],
        "volumes": volumes,
    }


def _container(plan: LaunchPlan, tls: list[str]) -> Resource:
    words = plan.words(f"{_FILES}/job.yaml")
    words += ["--run", "$(RUN)", "--node", "$(NODE)", "--address", "$(ADDRESS)"]
    fields = {"NODE": "metadata.name", "ADDRESS": "status.podIP"}
    # The identity of the job, and not its name: a job of the same name is another run.
    fields["RUN"] = "metadata.labels['batch.kubernetes.io/controller-uid']"
    env: list[Resource] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    env += [{"name": TLS_FILES[file], "value": f"{_ETCD}/{file}"} for file in tls if file in TLS_FILES]
    mounts: list[Resource] = [{"name": "job", "mountPath": _FILES, "readOnly": True}]
    if tls:
        mounts.append({"name": "etcd", "mountPath": _ETCD, "readOnly": True})
    return {"name": "agent", "image": plan.image, "command": words, "env": env, "volumeMounts": mounts}
