"""Probes: each serving container has them, on open ports, and a Ray pod's probe asks its services' /ready."""

import re
from collections.abc import Iterator

from tests.k8s.checks.model import Fault, Object
from tests.k8s.checks.placement import held
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.render import Render

_AGENT = 52365
_PORT_IN_A_COMMAND = re.compile(r"(?<![\w./-])(\d{2,})/")


def faults(render: Render) -> Iterator[Fault]:
    """Probes that are missing, or that ask a closed port."""
    for pod in render.pods:
        jobs = pod.owner.startswith(("Job/", "CronJob/"))
        for container in pod.containers:
            if container.init or container in pod.added:
                continue
            yield from _ports(pod, container)
            for kind in () if jobs or container.ray else ("readinessProbe", "livenessProbe"):
                if kind not in container.spec:
                    yield Fault(pod.owner, f"{container.path}.{kind}", "a probe", "none", "add one")
    yield from _ready(render)


def _ready(render: Render) -> Iterator[Fault]:
    """The readiness probe of a worker pod asks the services that may run on it."""
    for pod in render.pods:
        if pod.ray:
            routes = [f"{(app.route_prefix or '').rstrip('/')}/ready" for app, _ in held(render, pod)]
            probe = _said(pod.ray.spec.get("readinessProbe") or {})
            missing = [route for route in routes if not re.search(rf"{re.escape(route)}(?![\w-])", probe)]
            if missing:
                expected = f"a probe of {', '.join(missing)} on the Serve port"
                remedy = "ask each service that the group's resources admit"
                yield Fault(pod.owner, f"{pod.ray.path}.readinessProbe", expected, probe or "KubeRay's own", remedy)


def _ports(pod: Pod, container: Container) -> Iterator[Fault]:
    declared = {port["containerPort"] for port in container.spec.get("ports") or []}
    named = {port.get("name") for port in container.spec.get("ports") or []}
    declared |= {_AGENT} if container.ray else set()
    for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
        for path, port in _asked(container.spec.get(kind) or {}):
            if port not in declared and port not in named:
                expected = f"a port of the container ({', '.join(map(str, sorted(declared)))})"
                yield Fault(pod.owner, f"{container.path}.{kind}.{path}", expected, str(port), "name one of those")


def _asked(probe: Object) -> Iterator[tuple[str, int | str]]:
    for kind in ("httpGet", "tcpSocket", "grpc"):
        if kind in probe:
            yield f"{kind}.port", probe[kind]["port"]
    command = " ".join((probe.get("exec") or {}).get("command") or [])
    yield from (("exec.command", int(number)) for number in _PORT_IN_A_COMMAND.findall(command))


def _said(probe: Object) -> str:
    if "httpGet" in probe:
        return str(probe["httpGet"].get("path", "/"))
    return " ".join((probe.get("exec") or {}).get("command") or [])
