"""Addresses of other services, in commands, environments and config files: each one is a Service of the overlay."""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tests.k8s.checks import collector
from tests.k8s.checks.environment import mounted_files, words
from tests.k8s.checks.model import Fault, Object, part, title
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.render import Render
from tests.k8s.checks.selectors import matches

_PORTS = {
    **{"http": 80, "https": 443, "ws": 80, "wss": 443, "grpc": 4317, "ray": 10001},
    **{"postgres": 5432, "postgresql": 5432, "mysql": 3306, "redis": 6379, "rediss": 6379},
}
"""By scheme; in other URLs, such as s3://bucket/weights, the first word is no host."""
_URL = re.compile(r"\b([a-z][a-z0-9+]*)://(?:[^/@\s\"']*@)?(\[[0-9a-f:]+\]|[A-Za-z0-9.-]+)(?::(\d+|\$\S*))?")
_HOST_AND_PORT = re.compile(r"([a-z][a-z0-9.-]*):(\d{2,5})")
_HOST = re.compile(r"[a-z][a-z0-9.-]*")
_OWN_NODE = "node"
"""Value of TRACKWAY_DIRECT_HOST: the address of the pod itself."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_ANY = ("0.0.0.0", "[::]")
_RAY_LISTENS = {6379, 8265, 10001, 52365}
"""What Ray opens in its pods, declared or not."""


class Address(NamedTuple):
    """A host and port in a pod's configuration."""

    pod: Pod
    path: str
    text: str
    host: str
    port: int | None

    def fault(self, expected: str, remedy: str) -> Fault:
        """The problem with this address."""
        return Fault(self.pod.owner, self.path, expected, self.text, remedy)

    @property
    def service(self) -> str | None:
        """The name of its Service; None for an address outside the namespace."""
        return None if self.host in LOOPBACK else within(self.pod.namespace, self.host)


def within(space: str | None, host: str) -> str | None:
    """The name of the Service that a host refers to; None for a host outside the namespace."""
    name, _, rest = host.partition(".")
    return name if rest in ("", space, f"{space}.svc", f"{space}.svc.cluster.local") else None


def faults(render: Render) -> Iterator[Fault]:
    """Addresses of Services or ports that do not exist."""
    for address in addresses(render):
        if address.host in LOOPBACK:
            declared = {
                port["containerPort"]
                for container in address.pod.containers
                for port in container.spec.get("ports") or []
            }
            listening = declared | (_RAY_LISTENS if address.pod.group else set())
            if address.port not in listening:
                yield address.fault(f"a port of this pod ({_said(listening)})", "name a port that a container declares")
        elif address.service is not None:
            yield from _leads_nowhere(render, address)


@lru_cache(maxsize=1)
def addresses(render: Render) -> list[Address]:
    """All addresses in the pods' configuration."""
    told = (_told(render, pod, container) for pod in render.pods for container in pod.containers)
    return list(dict.fromkeys(address for found in told for address in found))


def service_of(render: Render, address: Address) -> Object | None:
    """The Service of an address."""
    return next((service for service in render.services if part(service, "metadata.name") == address.service), None)


def behind(render: Render, service: Object, port: int | None) -> list[tuple[Pod, int | None]]:
    """(pod, target port) of every pod behind a port of a Service; the port is None if the pod does not open it."""
    selector = {"matchLabels": part(service, "spec.selector") or {}}
    entry = next((entry for entry in part(service, "spec.ports") or [] if port in (None, entry["port"])), {})
    chosen = [pod for pod in render.pods if selector["matchLabels"] and matches(selector, pod.labels)]
    return [(pod, pod.port(entry.get("targetPort", entry.get("port")))) for pod in chosen]


def _leads_nowhere(render: Render, address: Address) -> Iterator[Fault]:
    service = service_of(render, address)
    if service is None:
        names = ", ".join(sorted(part(service, "metadata.name") for service in render.services))
        yield address.fault(f"a Service of the overlay ({names})", "name one of those")
        return
    ports = {port["port"] for port in part(service, "spec.ports") or []}
    elsewhere = part(service, "spec.type") == "ExternalName"  # an ExternalName is an alias without ports
    if address.port is not None and address.port not in ports and not elsewhere:
        yield address.fault(f"a port of {title(service)} ({_said(ports)})", "name one of those")


def _told(render: Render, pod: Pod, container: Container) -> Iterator[Address]:
    for path, text in _texts(render, pod, container):
        for scheme, host, port in _URL.findall(text):
            if scheme.partition("+")[0] in _PORTS and host not in _ANY and not port.startswith("$"):
                yield Address(pod, path, f"{scheme}://{host}:{port}".rstrip(":"), host, _number(scheme, port))
        for host, port in [found.groups() for word in text.split() if (found := _HOST_AND_PORT.fullmatch(word))]:
            yield Address(pod, path, f"{host}:{port}", host, int(port))
        if path.endswith("HOST]") and _HOST.fullmatch(text) and text != _OWN_NODE:
            yield Address(pod, path, text, text, None)


def _texts(render: Render, pod: Pod, container: Container) -> Iterator[tuple[str, str]]:
    """The texts of the container's spec and of the ConfigMaps that it mounts."""
    yield from words(render, container)
    if container.ray and pod.labels.get("ray.io/node-type") == "head":
        owner = render.find(*pod.owner.split("/"))
        path = "spec.rayClusterConfig.gcsFaultToleranceOptions.redisAddress"
        yield path, part(owner, path) or ""
    config = collector.in_use(render, pod, container)
    if config:
        yield f"{container.path}.args[--config]", collector.text(render, container, config)
        return
    for file, text in mounted_files(render, pod, container).items():
        yield f"{container.path}.volumeMounts[{file}]", text


def _number(scheme: str, port: str) -> int | None:
    return int(port) if port else _PORTS.get(scheme.partition("+")[0])


def _said(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
