"""Scrape targets of the Prometheus operator: the Services, ports and routes exist."""

import re
from collections.abc import Iterator

from tests.k8s.checks.addresses import LOOPBACK, within
from tests.k8s.checks.model import Fault, Object, part, title
from tests.k8s.checks.render import Render
from tests.k8s.checks.selectors import matches
from tests.k8s.checks.serve import configs

_ALL_REPLICAS = "/replicas/metrics"
_OF_A_NAMESPACE = re.compile(r"[a-z0-9-]+(\.svc(\.cluster\.local)?)?")
"""What follows a Service's name in a name of the cluster."""


def faults(render: Render) -> Iterator[Fault]:
    """Targets that do not exist."""
    for manifest in render.of("ScrapeConfig"):
        yield from _no_such_route(render, manifest)
        for at, group in enumerate(part(manifest, "spec.staticConfigs") or []):
            for target in group["targets"]:
                yield from _leads_nowhere(render, manifest, f"spec.staticConfigs[{at}].targets", target)
    for manifest in render.of("PodMonitor"):
        yield from _no_such_port(render, manifest)


def _no_such_route(render: Render, manifest: Object) -> Iterator[Fault]:
    path = part(manifest, "spec.metricsPath") or "/metrics"
    routes = {f"{app.route_prefix}{_ALL_REPLICAS}" for config in configs(render) for app in config.schema.applications}
    if path.endswith(_ALL_REPLICAS) and path not in routes:
        expected = f"a service of the Serve config ({', '.join(sorted(routes))})"
        yield Fault(title(manifest), "spec.metricsPath", expected, path, "name one of those")


def _leads_nowhere(render: Render, manifest: Object, path: str, target: str) -> Iterator[Fault]:
    host, _, port = target.partition(":")
    name, _, rest = host.partition(".")
    space = part(manifest, "metadata.namespace")
    service = next((found for found in render.services if part(found, "metadata.name") == name), {})
    ports = {str(entry["port"]) for entry in part(service, "spec.ports") or []}
    if within(space, host) is None or host in LOOPBACK:
        if service and _OF_A_NAMESPACE.fullmatch(rest):
            expected = f"{name}.{space}.svc, which the Service is called"
            yield Fault(title(manifest), path, expected, target, "name the overlay's namespace")
    elif not service:
        names = ", ".join(sorted(part(found, "metadata.name") for found in render.services))
        yield Fault(title(manifest), path, f"a Service of the overlay ({names})", target, "name one of those")
    elif port not in ports:
        expected = f"a port of {title(service)} ({', '.join(sorted(ports))})"
        yield Fault(title(manifest), path, expected, target, "name one of those")


def _no_such_port(render: Render, manifest: Object) -> Iterator[Fault]:
    chosen = [pod for pod in render.pods if matches(part(manifest, "spec.selector"), pod.labels)]
    if not chosen:
        yield Fault(
            title(manifest), "spec.selector", "labels of the overlay's pods", "none has them", "change the selector"
        )
    for at, endpoint in enumerate(part(manifest, "spec.podMetricsEndpoints") or []):
        name = endpoint.get("port")
        if any(pod.port(name) is None for pod in chosen):
            path = f"spec.podMetricsEndpoints[{at}].port"
            yield Fault(
                title(manifest), path, "a port of each pod that is chosen", str(name), "name a port that they open"
            )
