"""Folders that a Ray pod writes, its root being read-only: each lies on a volume that it may write."""

from collections.abc import Iterator

from checks.environment import environment
from checks.model import Fault
from checks.placement import held
from checks.pods import Pod
from checks.render import Render

_RAYS = ("/tmp", "/tmp/ray", "/dev/shm", "/home/trackway")
"""Sockets, logs, the object store, caches; the last is HOME in deploy/docker/Dockerfile."""
_EVERY_SERVICES = ("TRACKWAY_TRACING__SPOOL_DIR",)
_TRAINERS = ("TRACKWAY_OUTPUTS_DIR", "TRACKWAY_WEIGHTS_URL")
_NEVER_WRITTEN = {"configMap", "secret", "projected", "downwardAPI"}


def faults(render: Render) -> Iterator[Fault]:
    """Folders that cannot be written."""
    for pod in render.pods:
        if pod.ray is None:
            continue
        known = environment(render, pod.ray)
        trains = any(deployment.name == "trainer" for _, deployment in held(render, pod))
        told = [known.get(name, "") for name in (*_EVERY_SERVICES, *(_TRAINERS if trains else ()))]
        for folder in (*_RAYS, *(one for one in told if one.startswith("/"))):
            if not _written(pod, folder):
                mounts = ", ".join(mount["mountPath"] for mount in pod.ray.spec.get("volumeMounts") or [])
                expected = f"a volume to write at {folder}"
                yield Fault(pod.owner, f"{pod.ray.path}.volumeMounts", expected, mounts or "none", "mount one there")


def _written(pod: Pod, folder: str) -> bool:
    """Whether the innermost mount above a folder may be written."""
    mounts = (pod.ray.spec.get("volumeMounts") or []) if pod.ray else []
    above = [one for one in mounts if f"{folder}/".startswith(f"{one['mountPath'].rstrip('/')}/")]
    if not above:
        return False
    mount = max(above, key=lambda one: len(one["mountPath"]))
    volume = next(one for one in pod.spec.get("volumes") or [] if one["name"] == mount["name"])
    return not mount.get("readOnly") and not _NEVER_WRITTEN & volume.keys()
