"""The pods that KubeRay v1.7.0 makes of a RayService, as plain Pods that podman can play.

Filled in as KubeRay does: the `ray start` command, its environment, the container that waits for the head
(ray-operator/controllers/ray/common/pod.go). Left to the test: what the kubelet does (probes, preStop).
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.checks import kuberay
from tests.k8s.checks.model import Object, part
from tests.k8s.pods_volumes import Volumes

ROOT = Path(__file__).resolve().parents[2]
HEAD_SERVICE = "trackway-head-svc.trackway.svc.cluster.local"
GCS_PORT = 6379

_AS_RAYSERVICE = {
    "RAY_timeout_ms_task_wait_for_death_info": "0",
    "RAY_gcs_server_request_timeout_seconds": "5",
    "RAY_SERVE_KV_TIMEOUT_S": "5",
    "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
}
_WAIT = f"until ray health-check --address {HEAD_SERVICE}:{GCS_PORT}; do sleep 5; done"
_WAIT_RESOURCES = {"limits": {"cpu": "200m", "memory": "256Mi"}, "requests": {"cpu": "200m", "memory": "256Mi"}}


@dataclass(frozen=True)
class Surroundings:
    """What a cluster gives to a pod by name."""

    volumes: Volumes
    secrets: dict[str, dict[str, str]]
    settings: dict[str, dict[str, str]]
    """ConfigMaps."""
    addresses: dict[str, str]
    """Names of Services, and where they are."""


def plain_pod(name: str, template: Object, around: Surroundings) -> Object:
    """A pod template as a Pod: environment resolved, volumes as folders, names of Services in its hosts file."""
    spec = copy.deepcopy(template["spec"])
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for of_kubelet in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "ports", "envFrom"):
            given = container.pop(of_kubelet, None)
            if of_kubelet == "envFrom":
                container["env"] = [*_settings(given or [], around), *_values(container.get("env", []), around)]
    kept = ("initContainers", "containers", "securityContext", "restartPolicy")
    aliases = [{"ip": address, "hostnames": [service]} for service, address in around.addresses.items()]
    volumes = [around.volumes.folder(name, volume, around.secrets) for volume in spec.get("volumes", [])]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": part(template, "metadata.labels") or {}},
        "spec": {**{key: spec[key] for key in kept if key in spec}, "hostAliases": aliases, "volumes": volumes},
    }


def ray_pod(name: str, service: Object, group: Object, around: Surroundings) -> Object:
    """A pod of a worker group, or of the head, whose group has no name."""
    pod = plain_pod(name, group["template"], around)
    [ray] = pod["spec"]["containers"]
    worker = "groupName" in group
    head = HEAD_SERVICE if worker else "127.0.0.1"
    token = around.secrets[part(service, "spec.rayClusterConfig.authOptions.secretName")]["auth_token"]
    added = {
        **({"FQ_RAY_IP": head} if worker else {}),
        **{"RAY_ADDRESS": f"{head}:{GCS_PORT}", "RAY_PORT": str(GCS_PORT), "RAY_CLOUD_INSTANCE_ID": name},
        **{"RAY_NODE_TYPE_NAME": group.get("groupName", kuberay.HEAD)},
        **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **_AS_RAYSERVICE},
    }
    ray["env"] += [{"name": key, "value": value} for key, value in added.items()]
    ray["command"] = ["/bin/bash", "-c", "--"]
    ray["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {ray_start(group)}"]
    if worker:
        waits = {
            key: ray[key] for key in ("image", "imagePullPolicy", "securityContext", "env", "volumeMounts", "command")
        }
        waits |= {"name": "wait-gcs-ready", "args": [_WAIT], "resources": _WAIT_RESOURCES}
        pod["spec"]["initContainers"] = [waits]
    return pod


def ray_start(group: Object) -> str:
    """KubeRay's command line of a node."""
    worker = "groupName" in group
    offered = kuberay.capacity(group)
    custom = {name: value for name, value in offered.items() if name not in ("CPU", "GPU", "memory")}
    params = {
        **({"address": f"{HEAD_SERVICE}:{GCS_PORT}"} if worker else {"dashboard-host": "0.0.0.0"}),
        **{"metrics-export-port": "8080", "dashboard-agent-listen-port": "52365"},
        **{"num-cpus": str(int(offered["CPU"])), "memory": str(int(offered["memory"]))},
        **({"resources": f"'{json.dumps(custom)}'"} if custom else {}),
        **group.get("rayStartParams", {}),
    }
    options = [f"--{key}={value}" for key, value in sorted(params.items())]
    return " ".join(["ray start", *([] if worker else ["--head"]), "--block", *options])


def probe(group: Object) -> list[str]:
    """A worker's readiness probe, as the manifest writes it."""
    [ray] = part(group, "template.spec.containers")
    return part(ray, "readinessProbe.exec.command")


def _settings(sources: list[Object], around: Surroundings) -> list[Object]:
    found = [around.settings[source["configMapRef"]["name"]] for source in sources]
    return [{"name": key, "value": value} for settings in found for key, value in settings.items()]


def _values(entries: list[Object], around: Surroundings) -> list[Object]:
    """The entries, those that refer to a Secret with its value."""
    plain = [entry for entry in entries if "value" in entry]
    references = [(entry["name"], part(entry, "valueFrom.secretKeyRef")) for entry in entries if "valueFrom" in entry]
    return plain + [
        {"name": name, "value": around.secrets[reference["name"]][reference["key"]]}
        for name, reference in references
        if reference and not reference.get("optional")
    ]


def settings_of(objects: list[Object], **replaced: str) -> dict[str, dict[str, str]]:
    """The ConfigMaps of an overlay, with some settings replaced."""
    maps = {
        part(manifest, "metadata.name"): dict(manifest.get("data", {}))
        for manifest in objects
        if manifest["kind"] == "ConfigMap"
    }
    return {name: {key: str(replaced.get(key, value)) for key, value in data.items()} for name, data in maps.items()}


def secrets_from(documents: list[Object]) -> dict[str, dict[str, str]]:
    """Secrets by name."""
    return {part(secret, "metadata.name"): dict(secret["stringData"]) for secret in documents}
