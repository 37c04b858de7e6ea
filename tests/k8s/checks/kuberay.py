"""The objects that KubeRay v1.7.0 creates for a RayService: labels, Services, the autoscaler, Ray resources.

Facts from its sources (ray-operator/controllers/ray/common/pod.go, service.go, utils/util.go, constant.go).
"""

import json
import math
import re
import shlex
from collections.abc import Iterator

from tests.k8s.checks.model import Object, called, part, title
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.quantity import quantity

HEAD = "headgroup"
UNBOUNDED = 2147483647
"""maxReplicas of a group that says none."""

_DEFAULT_PORTS = {"client": 10001, "gcs-server": 6379, "dashboard": 8265, "serve": 8000}
_METRICS = 8080
_OWN_LABELS = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/created-by": "kuberay-operator"}
"""A pod's own win over them, and then a RayService's Service of the head selects no pod."""
_FIXED_LABELS = ("ray.io/node-type", "ray.io/group", "ray.io/cluster")


def groups(service: Object) -> Iterator[tuple[str, str, Object]]:
    """(name, path, spec) of the head and of every worker group."""
    cluster = part(service, "spec.rayClusterConfig") or {}
    yield HEAD, "spec.rayClusterConfig.headGroupSpec", cluster.get("headGroupSpec") or {}
    for at, group in enumerate(cluster.get("workerGroupSpecs") or []):
        path = f"spec.rayClusterConfig.workerGroupSpecs[{called(group, at)}]"
        yield group.get("groupName", str(at)), path, group


def autoscales(service: Object) -> bool:
    """Whether Ray's autoscaler makes the worker pods."""
    return part(service, "spec.rayClusterConfig.enableInTreeAutoscaling") is True


def most_nodes(service: Object, group: Object) -> int:
    """The most pods of a worker group."""
    most = group.get("maxReplicas", UNBOUNDED) if autoscales(service) else group.get("replicas", 0)
    return most * group.get("numOfHosts", 1)


def pods(service: Object) -> Iterator[Pod]:
    """The head's pod and one of each worker group, labelled as KubeRay labels them."""
    if service.get("kind") != "RayService":
        return
    name, namespace = part(service, "metadata.name"), part(service, "metadata.namespace")
    for group_name, path, group in groups(service):
        head = group_name == HEAD and path.endswith("headGroupSpec")
        template = group.get("template") or {}
        serves = not head or not part(service, "spec.excludeHeadPodFromServeSvc")
        own = {**(part(template, "metadata.labels") or {}), **(group.get("labels") or {})}
        labels = {
            **_OWN_LABELS,
            "ray.io/is-ray-node": "yes",
            "ray.io/identifier": f"{name}-?????-{'head' if head else 'worker'}",
            **{key: value for key, value in own.items() if key not in _FIXED_LABELS},
            "ray.io/cluster": f"{name}-?????",  # a new one with each upgrade
            "ray.io/node-type": "head" if head else "worker",
            "ray.io/group": group_name,
            "ray.io/serve": "true" if serves else "false",
        }
        added = (_autoscaler(service),) if head and autoscales(service) else ()
        spec = template.get("spec") or {}
        yield Pod(title(service), namespace, f"{path}.template", labels, spec, group_name, added)


def services(service: Object) -> Iterator[Object]:
    """The Services that KubeRay creates for a RayService: for the head, and for the pods with a proxy."""
    name = part(service, "metadata.name")
    head = next(pods(service)).ray
    declared = [(port.get("name"), port["containerPort"]) for port in (head.spec.get("ports") or [] if head else [])]
    ports = {name or f"{number}-port": number for name, number in declared} or dict(_DEFAULT_PORTS)
    ports.setdefault("metrics", _METRICS)
    serving = {name: number for name, number in ports.items() if name == "serve" or name.startswith("serve-")}
    serve_name = part(service, "spec.serveService.metadata.name") or f"{name}-serve-svc"
    namespace = part(service, "metadata.namespace")
    for title_, exposed, selector in (
        (f"{name}-head-svc", ports, {**_OWN_LABELS, "ray.io/node-type": "head"}),
        (serve_name, serving, {"ray.io/serve": "true"}),
    ):
        entries = [{"name": key, "port": number} for key, number in exposed.items()]
        yield {
            "kind": "Service",
            "metadata": {"name": title_, "namespace": namespace},
            "spec": {"selector": selector, "ports": entries},
        }


def capacity(group: Object) -> dict[str, float]:
    """The Ray resources of one pod of the group. Raises ValueError if `ray start` could not parse them."""
    params, listed = group.get("rayStartParams") or {}, group.get("resources") or {}
    containers = part(group, "template.spec.containers") or [{}]
    asked = containers[0].get("resources") or {}
    limits, requests = asked.get("limits") or {}, asked.get("requests") or {}
    gpus = sum(quantity(value) for key, value in limits.items() if is_gpu(key))
    cpu = limits.get("cpu", requests.get("cpu", 0))
    offered = {"CPU": math.ceil(quantity(cpu)), "GPU": gpus, "memory": quantity(limits.get("memory", 0))}
    for name, value in listed.items():
        known = {"cpu": "CPU", "memory": "memory"}.get(name.lower(), "GPU" if is_gpu(name.lower()) else name)
        offered[known] = quantity(value)
    for flag, known in {"num-cpus": "CPU", "num-gpus": "GPU", "memory": "memory"}.items():
        if flag in params:
            offered[known] = float(params[flag])
    if "resources" in params:
        words = shlex.split(params["resources"])  # bash reads it before Ray does
        custom = json.loads(words[0]) if len(words) == 1 else None
        if not isinstance(custom, dict) or not all(isinstance(value, int | float) for value in custom.values()):
            raise ValueError(f"expected one JSON object of numbers in quotes for bash, got {params['resources']!r}")
        offered |= {name: float(value) for name, value in custom.items()}
    return offered


def is_gpu(resource: str) -> bool:
    """Whether KubeRay counts the resource as GPUs."""
    return resource.endswith("gpu") or re.search(r"nvidia\.com/mig-\d+g\.\d+gb$", resource) is not None


def _autoscaler(service: Object) -> Container:
    """The autoscaler container: the head's image and KubeRay's resources, unless autoscalerOptions override them."""
    path = "spec.rayClusterConfig.autoscalerOptions"
    ample = {"cpu": "500m", "memory": "512Mi"}
    resources = {"limits": ample, "requests": ample}
    return Container(path, {"name": "autoscaler", "resources": resources, **(part(service, path) or {})})
