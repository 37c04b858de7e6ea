"""Rules for every pod: not root, read-only except for volumes, resource limits, a known image, no secret in clear."""

from collections.abc import Iterator

from tests.k8s.checks.model import Fault, Object, part, title
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.quantity import quantity
from tests.k8s.checks.render import Render

_HOSTS = ("hostNetwork", "hostPID", "hostIPC")
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def faults(render: Render) -> Iterator[Fault]:
    """Violations of these rules."""
    for secret in render.of("Secret"):
        if secret.get("data") or secret.get("stringData"):
            remedy = "leave its making to k8s/secrets.sh, and name it only"
            yield Fault(title(secret), "data", "no secret in the manifests", "one with data", remedy)
    for pod in render.pods:
        yield from _of_pod(pod)
        for container in pod.containers:
            yield from _rights(pod, container)
            yield from _image(pod, container)
            yield from _bounds(pod, container)


def _of_pod(pod: Pod) -> Iterator[Fault]:
    path = f"{pod.path}.spec"
    for name in _HOSTS:
        if pod.spec.get(name):
            yield Fault(pod.owner, f"{path}.{name}", "nothing of the host", "true", "leave it out")
    for volume in pod.spec.get("volumes") or []:
        if "hostPath" in volume:
            remedy = "use a claim or an emptyDir"
            yield Fault(pod.owner, f"{path}.volumes[{volume['name']}]", "nothing of the host", "a hostPath", remedy)
    automatic = pod.spec.get("automountServiceAccountToken", True)
    if automatic:
        remedy = f"set it, and mount a token at {_ACCOUNT} of the container that calls the API server"
        yield Fault(pod.owner, f"{path}.automountServiceAccountToken", "false", str(automatic).lower(), remedy)
    for container in pod.added:
        mounts = [mount["mountPath"].rstrip("/") for mount in container.spec.get("volumeMounts") or []]
        if not automatic and _ACCOUNT not in mounts:
            expected = f"a token for the API server at {_ACCOUNT}"
            yield Fault(pod.owner, f"{container.path}.volumeMounts", expected, ", ".join(mounts) or "none", "mount one")


def _rights(pod: Pod, container: Container) -> Iterator[Fault]:
    of_pod, own = pod.spec.get("securityContext") or {}, container.spec.get("securityContext") or {}
    both = {**of_pod, **own}
    dropped = part(own, "capabilities.drop") or []
    seccomp = part(both, "seccompProfile.type")
    profile = seccomp == "RuntimeDefault" or (seccomp == "Localhost" and part(both, "seccompProfile.localhostProfile"))
    wanted = (
        ("runAsNonRoot", both.get("runAsNonRoot"), True),
        ("readOnlyRootFilesystem", own.get("readOnlyRootFilesystem"), True),
        ("allowPrivilegeEscalation", own.get("allowPrivilegeEscalation"), False),
        ("privileged", own.get("privileged", False), False),
        ("seccompProfile.type", seccomp, seccomp if profile else "RuntimeDefault, or Localhost and its profile"),
        ("capabilities.drop", "ALL" if "ALL" in dropped else dropped, "ALL"),
        ("capabilities.add", part(own, "capabilities.add") or "none", "none"),
        ("runAsUser", both.get("runAsUser") or "root", both.get("runAsUser") or "a user other than root"),
    )
    for name, got, expected in wanted:
        if got != expected:
            path = f"{container.path}.securityContext.{name}"
            remedy = "set it here or, where it may stand there, for the pod"
            yield Fault(pod.owner, path, str(expected), str(got), remedy)
    for port in container.spec.get("ports") or []:
        if port.get("hostPort"):
            path = f"{container.path}.ports[{port.get('name', port['containerPort'])}].hostPort"
            yield Fault(pod.owner, path, "nothing of the host", str(port["hostPort"]), "leave it out")


def _image(pod: Pod, container: Container) -> Iterator[Fault]:
    image = container.spec.get("image")
    if image is None and container in pod.added:  # the image of the container beside it
        return
    name, _, digest = (image or "none").partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if not digest.startswith("sha256:") and tag in ("", "latest"):
        remedy = "name a version, best in the kustomization's `images`"
        yield Fault(pod.owner, f"{container.path}.image", "a tag other than latest, or a digest", name, remedy)


def _bounds(pod: Pod, container: Container) -> Iterator[Fault]:
    path = f"{container.path}.resources"
    asked: Object = container.spec.get("resources") or {}
    for side in ("requests", "limits"):
        for name in ("cpu", "memory"):
            if not part(asked, f"{side}.{name}"):
                yield Fault(pod.owner, f"{path}.{side}.{name}", "a quantity", "none", "say what it needs and may take")
    request, limit = part(asked, "requests.memory"), part(asked, "limits.memory")
    if pod.group and request and limit and quantity(request) != quantity(limit):
        remedy = "a Ray node counts on its limit: ask for all of it"
        yield Fault(pod.owner, f"{path}.requests.memory", f"the limit ({limit})", str(request), remedy)
