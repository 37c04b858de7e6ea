"""Folders that a Ray pod writes: each is on a writable volume, since the root is read-only."""

from collections.abc import Iterator

from tests.k8s.checks import kuberay
from tests.k8s.checks.environment import environment
from tests.k8s.checks.model import Fault, title
from tests.k8s.checks.placement import held
from tests.k8s.checks.pods import Pod
from tests.k8s.checks.render import Render
from trackway.run_config.placement import NODE_RESOURCE

_RAYS = ("/tmp", "/tmp/ray", "/dev/shm", "/home/trackway")
"""Sockets, logs, the object store, caches; the last is HOME in deploy/docker/Dockerfile."""
_EVERY_SERVICES = ("TRACKWAY_TRACING__SPOOL_DIR", "TRACKWAY_PROBE_DIR")
_TRAINERS = ("TRACKWAY_OUTPUTS_DIR", "TRACKWAY_WEIGHTS_URL")
_NEVER_WRITTEN = {"configMap", "secret", "projected", "downwardAPI"}


def faults(render: Render) -> Iterator[Fault]:
    """Folders on a read-only file system."""
    for pod in render.pods:
        if pod.ray is None:
            continue
        known = environment(render, pod.ray)
        trains = any(deployment.name == "trainer" for _, deployment in held(render, pod)) or _takes_ranks(render, pod)
        told = [known.get(name, "") for name in (*_EVERY_SERVICES, *(_TRAINERS if trains else ()))]
        for folder in (*_RAYS, *(path for path in told if path.startswith("/"))):
            if not _written(pod, folder):
                mounts = ", ".join(mount["mountPath"] for mount in pod.ray.spec.get("volumeMounts") or [])
                expected = f"a volume to write at {folder}"
                yield Fault(pod.owner, f"{pod.ray.path}.volumeMounts", expected, mounts or "none", "mount one there")


def _takes_ranks(render: Render, pod: Pod) -> bool:
    """Whether ranks of a learner run here, which write their shares of checkpoints and weights."""
    services = (service for service in render.of("RayService") if title(service) == pod.owner)
    return any(
        name == pod.group and NODE_RESOURCE in (group.get("resources") or {})
        for service in services
        for name, _, group in kuberay.groups(service)
    )


def _written(pod: Pod, folder: str) -> bool:
    """Whether the innermost mount of a folder is writable."""
    mounts = (pod.ray.spec.get("volumeMounts") or []) if pod.ray else []
    above = [mount for mount in mounts if f"{folder}/".startswith(f"{mount['mountPath'].rstrip('/')}/")]
    if not above:
        return False
    mount = max(above, key=lambda mount: len(mount["mountPath"]))
    volume = next(volume for volume in pod.spec.get("volumes") or [] if volume["name"] == mount["name"])
    return not mount.get("readOnly") and not _NEVER_WRITTEN & volume.keys()
