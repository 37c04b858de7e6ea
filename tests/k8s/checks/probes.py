"""Probes: each serving container has them, on open ports, and a Ray pod's probe asks the replicas on the pod."""

import re
from collections.abc import Iterator

from tests.k8s.checks.environment import environment
from tests.k8s.checks.model import Fault, Object
from tests.k8s.checks.placement import held
from tests.k8s.checks.pods import Container, Pod
from tests.k8s.checks.render import Render

_AGENT = 52365
_ASKS_REPLICAS = re.compile(r"\bpython -m trackway\.deploy\.probe(?![\w.-])")
_FOLDER = "TRACKWAY_PROBE_DIR"
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
    """The readiness probe of a worker pod asks the replicas on it, and those of no service that cannot run there."""
    for pod in render.pods:
        if pod.ray is None or not (services := {deployment.name for _, deployment in held(render, pod)}):
            continue
        path, probe = f"{pod.ray.path}.readinessProbe", _said(pod.ray.spec.get("readinessProbe") or {})
        if not _ASKS_REPLICAS.search(probe):
            expected = "a command with `python -m trackway.deploy.probe`"
            yield Fault(pod.owner, path, expected, probe or "KubeRay's own", "ask the replicas on the pod")
        if not environment(render, pod.ray).get(_FOLDER):
            remedy = "set it for every Ray pod"
            yield Fault(
                pod.owner, f"{pod.ray.path}.env", f"{_FOLDER}, the folder of the probe's sockets", "none", remedy
            )
        unknown = sorted({*_required(pod.ray.spec)} - services)
        if unknown:
            expected = f"services of this group ({', '.join(sorted(services))})"
            yield Fault(pod.owner, path, expected, ", ".join(unknown), "name no others")


def _required(container: Object) -> list[str]:
    """The services that the probe expects on the pod: what follows the script and its name."""
    command = ((container.get("readinessProbe") or {}).get("exec") or {}).get("command") or []
    return [str(word) for word in command[4:]]


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
