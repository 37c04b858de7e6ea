"""RayServices that KubeRay v1.7.0 rejects although its schema allows them, and our own requirements."""

import contextlib
from collections.abc import Iterator

from tests.k8s.checks import kuberay
from tests.k8s.checks.model import Fault, Object, part, title
from tests.k8s.checks.quantity import quantity
from tests.k8s.checks.render import Render

_UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
_CLUSTER = "spec.rayClusterConfig"
_LONGEST_NAME = 47


def faults(render: Render) -> Iterator[Fault]:
    """RayServices that the operator would reject, that lack authentication, or that place replicas wrongly."""
    for service in render.of("RayService"):
        yield from _service(service)
        for name, path, group in kuberay.groups(service):
            if name == kuberay.HEAD:
                yield from _head(service, path, group)
            else:
                yield from _worker(service, path, group)
            yield from _any_group(service, path, group)


def _service(service: Object) -> Iterator[Fault]:
    name, where = part(service, "metadata.name"), title(service)
    if len(name) > _LONGEST_NAME:
        yield Fault(where, "metadata.name", f"at most {_LONGEST_NAME} characters", f"{len(name)}", "shorten it")
    upgrade = part(service, "spec.upgradeStrategy.type")
    if upgrade is not None and upgrade not in _UPGRADES:
        yield Fault(where, "spec.upgradeStrategy.type", " or ".join(_UPGRADES), upgrade, "KubeRay refuses others")
    mode = part(service, f"{_CLUSTER}.authOptions.mode")
    if mode != "token":
        remedy = "without it anyone who reaches the head can run code on the cluster"
        yield Fault(where, f"{_CLUSTER}.authOptions.mode", "token", str(mode), remedy)
    if not part(service, f"{_CLUSTER}.rayVersion"):
        yield Fault(where, f"{_CLUSTER}.rayVersion", "Ray's version, which token mode needs", "none", "name it")
    if part(service, f"{_CLUSTER}.headGroupSpec.headService.metadata.name"):
        path = f"{_CLUSTER}.headGroupSpec.headService.metadata.name"
        yield Fault(where, path, "none, in a RayService", "a name", "leave it out")


def _head(service: Object, path: str, group: Object) -> Iterator[Fault]:
    params = group.get("rayStartParams") or {}
    if params.get("num-cpus", part(group, "resources.CPU")) != "0":
        got = str(params.get("num-cpus", "what its limits say"))
        yield Fault(title(service), f"{path}.rayStartParams.num-cpus", '"0": no replica on the head', got, "set it")
    if part(service, f"{_CLUSTER}.gcsFaultToleranceOptions") and "redis-password" in params:
        yield Fault(title(service), f"{path}.rayStartParams.redis-password", "none", "one", "use redisPassword")


def _worker(service: Object, path: str, group: Object) -> Iterator[Fault]:
    least, most = group.get("minReplicas", 0), group.get("maxReplicas", kuberay.UNBOUNDED)
    if least > most:
        yield Fault(title(service), f"{path}.minReplicas", f"at most maxReplicas ({most})", str(least), "swap them")
    if not kuberay.autoscales(service) and not {"minReplicas", "maxReplicas"} <= group.keys():
        expected = "minReplicas and maxReplicas, without the autoscaler"
        yield Fault(title(service), path, expected, "one of them at most", "set both")
    yield from _gpus(service, path, group)


def _gpus(service: Object, path: str, group: Object) -> Iterator[Fault]:
    [first, *_] = part(group, "template.spec.containers") or [{}]
    limits = {name: quantity(most) for name, most in (part(first, "resources.limits") or {}).items()}
    gpus = {name: most for name, most in limits.items() if kuberay.is_gpu(name)}
    tolerated = [
        toleration
        for toleration in part(group, "template.spec.tolerations") or []
        if kuberay.is_gpu(toleration.get("key", ""))
    ]
    if bool(gpus) != bool(tolerated):
        expected = f"a toleration of {min(gpus)}" if gpus else "no toleration of GPU nodes, where no GPU is asked for"
        got = tolerated[0]["key"] if tolerated else "none"
        remedy = "GPU pods go to GPU nodes, and others stay off them"
        yield Fault(title(service), f"{path}.template.spec.tolerations", expected, got, remedy)
    runtime = part(group, "template.spec.runtimeClassName")
    if bool(gpus) != bool(runtime):
        expected = "nvidia, or containers may see no GPU" if gpus else "none, where no GPU is asked for"
        yield Fault(
            title(service), f"{path}.template.spec.runtimeClassName", expected, str(runtime or "none"), "set it so"
        )
    offered = part(group, "resources.GPU")
    with contextlib.suppress(ValueError):  # `placement` reports it
        if offered and quantity(offered) != sum(gpus.values()):
            expected = f"GPU {sum(gpus.values()):g}, as the container's limits"
            yield Fault(title(service), f"{path}.resources", expected, offered, "change one of them")


def _any_group(service: Object, path: str, group: Object) -> Iterator[Fault]:
    params = group.get("rayStartParams") or {}
    if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & params.keys():
        expected = "resources either in rayStartParams or in resources"
        yield Fault(title(service), path, expected, "both", "KubeRay refuses that; keep one")
    if "labels" in params:
        yield Fault(title(service), f"{path}.rayStartParams.labels", "none", "some", "use the group's labels")
    restart = part(group, "template.spec.restartPolicy") or "Never"
    if part(service, f"{_CLUSTER}.autoscalerOptions.version") == "v2" and restart != "Never":
        expected = "Never or nothing, under autoscaler v2"
        yield Fault(title(service), f"{path}.template.spec.restartPolicy", expected, restart, "leave it out")
    yield from _object_store(service, path, group)


def _object_store(service: Object, path: str, group: Object) -> Iterator[Fault]:
    below, shared = "rayStartParams.object-store-memory", _shared_memory(group)
    store = part(group, below)
    if store and not store.isdecimal():
        yield Fault(title(service), f"{path}.{below}", "bytes, a whole number", store, "`ray start` reads no units")
    elif store and shared is not None and int(store) > shared:
        expected = f"at most what /dev/shm has ({shared:g})"
        yield Fault(title(service), f"{path}.{below}", expected, store, "lower it")


def _shared_memory(group: Object) -> float | None:
    """Size of the volume at /dev/shm, in bytes."""
    [first, *_] = part(group, "template.spec.containers") or [{}]
    names = [mount["name"] for mount in first.get("volumeMounts") or [] if mount["mountPath"] == "/dev/shm"]
    volumes = part(group, "template.spec.volumes") or []
    limits = [part(volume, "emptyDir.sizeLimit") for volume in volumes if volume["name"] in names]
    return quantity(limits[0]) if limits and limits[0] else None
