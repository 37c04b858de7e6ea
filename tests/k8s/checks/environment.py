"""The environment of a container."""

import re
from collections.abc import Iterator

from tests.k8s.checks.model import Object, part
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.render import Render


def environment(render: Render, container: Container) -> dict[str, str]:
    """The container's variables; one from a Secret has the Secret's name and key as its value."""
    known: dict[str, str] = {}
    for source in container.spec.get("envFrom") or []:
        settings = render.find("ConfigMap", part(source, "configMapRef.name") or "")
        prefix = source.get("prefix", "")
        known |= {f"{prefix}{key}": str(value) for key, value in (part(settings, "data") or {}).items()}
    for entry in container.spec.get("env") or []:
        value = _value(render, entry)
        if value is not None:
            known[entry["name"]] = _expanded(value, known)
    return known


def words(render: Render, container: Container) -> Iterator[tuple[str, str]]:
    """(path, text) of a container's command, arguments and environment."""
    known = environment(render, container)
    for kind in ("command", "args"):
        for at, word in enumerate(container.spec.get(kind) or []):
            yield f"{container.path}.{kind}[{at}]", _expanded(str(word), known)
    for name, value in known.items():
        yield f"{container.path}.env[{name}]", value


def mounted_files(render: Render, pod: Pod, container: Container) -> dict[str, str]:
    """Text by path of the files that the container mounts from ConfigMaps."""
    files: dict[str, str] = {}
    for mount in container.spec.get("volumeMounts") or []:
        volume = next((volume for volume in pod.spec.get("volumes") or [] if volume["name"] == mount["name"]), {})
        data = part(render.find("ConfigMap", part(volume, "configMap.name") or ""), "data") or {}
        listed = part(volume, "configMap.items") or [{"key": key, "path": key} for key in data]
        for item in listed:
            whole = mount.get("subPath") == item["path"]
            path = mount["mountPath"] if whole else f"{mount['mountPath'].rstrip('/')}/{item['path']}"
            files[path] = data.get(item["key"], "")
    return files


def filled(text: str, known: dict[str, str]) -> str:
    """Expand `${env:NAME:-default}` as the OpenTelemetry collector does; unknown variables are left unchanged."""
    pattern = r"\$\{(?:env:)?(\w+)(?::-([^}]*))?\}"
    return re.sub(pattern, lambda found: known.get(found[1]) or (found[0] if found[2] is None else found[2]), text)


def _value(render: Render, entry: Object) -> str | None:
    source = entry.get("valueFrom")
    if not source:
        return str(entry.get("value") or "")
    wanted = source.get("configMapKeyRef") or {}
    if wanted:
        return (part(render.find("ConfigMap", wanted.get("name", "")), "data") or {}).get(wanted["key"])
    secret = source.get("secretKeyRef")
    if not secret:
        return None
    name, key = secret.get("name", ""), secret["key"]
    return None if secret.get("optional") and key not in render.secrets.get(name, ()) else f"{name}-{key}"


def _expanded(text: str, known: dict[str, str]) -> str:
    """Expand `$(NAME)` as Kubernetes does, with the variables defined so far."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: known.get(found[1], found[0]), text)
