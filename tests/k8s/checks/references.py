"""References between objects exist: ConfigMaps, Secrets, Services, their keys and ports, claims, accounts, files."""

from collections.abc import Iterator, Set
from typing import NamedTuple

from tests.k8s.checks.environment import words
from tests.k8s.checks.model import Fault, Object, part, title, walk
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.render import Render

_IN_EVERY_NAMESPACE = {("ServiceAccount", "default"): frozenset(), ("ConfigMap", "kube-root-ca.crt"): {"ca.crt"}}
_CERTIFIED = {"cert-manager.io/issuer", "cert-manager.io/cluster-issuer", "kubernetes.io/tls-acme"}
"""Annotations of an Ingress for which cert-manager makes the Secrets."""


class Reference(NamedTuple):
    """A reference to another object, and its path."""

    path: str
    kind: str
    name: str
    keys: tuple[str, ...] = ()


def faults(render: Render) -> Iterator[Fault]:
    """References to missing objects or keys, mounts without a volume, paths to missing files."""
    for manifest in render.objects:
        for reference in _references(manifest):
            yield from _missing(render, manifest, reference)
    for pod in render.pods:
        for container in pod.containers:
            yield from _unmounted(render, pod, container)
            yield from _no_such_file(render, pod, container)


def keys_of(render: Render, kind: str, name: str) -> Set[str] | None:
    """The keys of a ConfigMap or of a user's Secret, or a Service's ports; None if there is no such object."""
    if kind == "Secret" and name in render.secrets:
        return render.secrets[name]
    manifest = next((candidate for candidate in _all(render, kind) if part(candidate, "metadata.name") == name), None)
    if manifest is None:
        return _IN_EVERY_NAMESPACE.get((kind, name))
    if kind == "Service":
        return {
            str(word) for port in part(manifest, "spec.ports") or [] for word in (port["port"], port.get("name", "-"))
        }
    return {*(manifest.get("data") or {}), *(manifest.get("binaryData") or {}), *(manifest.get("stringData") or {})}


def _all(render: Render, kind: str) -> list[Object]:
    return render.services if kind == "Service" else render.of(kind)


def _references(manifest: Object) -> Iterator[Reference]:
    for path, key, value in walk(manifest):
        match key, value:
            case _, {"optional": True}:
                continue
            case (("secretKeyRef" | "configMapKeyRef"), {"key": wanted}):
                yield Reference(path, "Secret" if key == "secretKeyRef" else "ConfigMap", _name(value), (wanted,))
            case "credentials", {"name": name, "key": wanted}:  # of a ScrapeConfig
                yield Reference(path, "Secret", name, (wanted,))
            case (("secretRef" | "configMapRef"), dict()):
                yield Reference(path, "Secret" if key == "secretRef" else "ConfigMap", _name(value))
            case (("secret" | "configMap"), dict()):
                yield Reference(path, "Secret" if key == "secret" else "ConfigMap", _name(value), _items(value))
            case "persistentVolumeClaim", {"claimName": name}:
                yield Reference(path, "PersistentVolumeClaim", name)
            case "serviceAccountName", str(name):
                yield Reference(path, "ServiceAccount", name)
            case "imagePullSecrets", list(secrets):
                yield from (Reference(path, "Secret", secret["name"]) for secret in secrets)
            case "authOptions", {"secretName": name}:
                yield Reference(f"{path}.secretName", "Secret", name, ("auth_token",))
            case "serviceName", str(name) if manifest["kind"] == "StatefulSet":
                yield Reference(path, "Service", name)
            case "service", {"name": name, "port": {"number": port} | {"name": port}} if manifest["kind"] == "Ingress":
                yield Reference(path, "Service", name, (str(port),))
            case "tls", list(entries) if manifest["kind"] == "Ingress" and not _CERTIFIED & _annotations(manifest):
                names = [entry["secretName"] for entry in entries if "secretName" in entry]
                yield from (Reference(path, "Secret", name, ("tls.crt", "tls.key")) for name in names)
            case "subjects", list(subjects):
                yield from (Reference(path, who["kind"], who["name"]) for who in subjects)
            case (("roleRef" | "scaleTargetRef"), {"kind": kind, "name": name}):
                yield Reference(path, kind, name)
            case "namespace", str(name) if path == "metadata.namespace":
                yield Reference(path, "Namespace", name)


def _name(value: Object) -> str:
    return value.get("secretName") or value.get("name") or ""


def _items(volume: Object) -> tuple[str, ...]:
    return tuple(item["key"] for item in volume.get("items") or [])


def _annotations(manifest: Object) -> Set[str]:
    return (part(manifest, "metadata.annotations") or {}).keys()


def _missing(render: Render, manifest: Object, reference: Reference) -> Iterator[Fault]:
    path, kind, name, wanted = reference
    if kind == "Namespace" and not render.of(kind):  # it is made elsewhere
        return
    has = keys_of(render, kind, name)
    if has is None:
        exist = sorted({part(candidate, "metadata.name") for candidate in _all(render, kind)} | _others(render, kind))
        remedy = "have k8s/secrets.sh make it" if kind == "Secret" else "add it, or name one of those"
        known = f"a {kind} of the overlay ({', '.join(exist) or 'it has none'})"
        yield Fault(title(manifest), path, known, name or "no name", remedy)
        return
    for key in wanted:
        if key not in has:
            word = "port" if kind == "Service" else "key"
            yield Fault(
                title(manifest), path, f"a {word} of {kind} {name} ({', '.join(sorted(has))})", key, f"add the {word}"
            )


def _others(render: Render, kind: str) -> Set[str]:
    return set(render.secrets) if kind == "Secret" else set()


def _unmounted(render: Render, pod: Pod, container: Container) -> Iterator[Fault]:
    owner_kind, _, owner = pod.owner.partition("/")
    templates = part(render.find(owner_kind, owner), "spec.volumeClaimTemplates") or []
    volumes = {volume["name"] for volume in pod.spec.get("volumes") or []}
    volumes |= {part(template, "metadata.name") or "" for template in templates}
    for mount in container.spec.get("volumeMounts") or []:
        if mount["name"] not in volumes:
            path, known = f"{container.path}.volumeMounts[{mount['name']}]", ", ".join(sorted(volumes))
            yield Fault(pod.owner, path, f"a volume of the pod ({known})", mount["name"], "add the volume")


def _no_such_file(render: Render, pod: Pod, container: Container) -> Iterator[Fault]:
    """A path in a container's spec below a mounted ConfigMap or Secret that has no such key."""
    mounts = [
        (mount, files)
        for mount in container.spec.get("volumeMounts") or []
        if (files := _files(render, pod, mount["name"])) is not None
    ]
    for path, text in words(render, container):
        for mount, files in mounts:
            _, found, below = text.partition(mount["mountPath"].rstrip("/") + "/")
            file = below.split()[0] if below.split() else ""
            if found and not mount.get("subPath") and file not in files:
                expected = f"a file of the volume {mount['name']} ({', '.join(sorted(files))})"
                yield Fault(pod.owner, path, expected, text, "name a file that is mounted")


def _files(render: Render, pod: Pod, volume: str) -> Set[str] | None:
    """The files of a volume that is a ConfigMap or a Secret."""
    spec = next((entry for entry in pod.spec.get("volumes") or [] if entry["name"] == volume), {})
    for source, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
        if source in spec:
            items = spec[source].get("items")
            return {item["path"] for item in items} if items else keys_of(render, kind, _name(spec[source]))
    return None
