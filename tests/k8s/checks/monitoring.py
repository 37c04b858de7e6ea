"""What the Prometheus operator is told to scrape is there: Services and their ports, services' routes, pods' ports."""

import re
from collections.abc import Iterator

from checks.addresses import LOOPBACK, within
from checks.model import Fault, Object, part, title
from checks.render import Render
from checks.selectors import matches
from checks.serve import configs

_ALL_REPLICAS = "/replicas/metrics"
_OF_A_NAMESPACE = re.compile(r"[a-z0-9-]+(\.svc(\.cluster\.local)?)?")
"""What follows a Service's name in a name of the cluster."""


def faults(render: Render) -> Iterator[Fault]:
    """Targets that nobody answers at."""
    for one in render.of("ScrapeConfig"):
        yield from _no_such_route(render, one)
        for at, group in enumerate(part(one, "spec.staticConfigs") or []):
            for target in group["targets"]:
                yield from _leads_nowhere(render, one, f"spec.staticConfigs[{at}].targets", target)
    for one in render.of("PodMonitor"):
        yield from _no_such_port(render, one)


def _no_such_route(render: Render, one: Object) -> Iterator[Fault]:
    path = part(one, "spec.metricsPath") or "/metrics"
    routes = {f"{app.route_prefix}{_ALL_REPLICAS}" for config in configs(render) for app in config.schema.applications}
    if path.endswith(_ALL_REPLICAS) and path not in routes:
        expected = f"a service of the Serve config ({', '.join(sorted(routes))})"
        yield Fault(title(one), "spec.metricsPath", expected, path, "name one of those")


def _leads_nowhere(render: Render, one: Object, path: str, target: str) -> Iterator[Fault]:
    host, _, port = target.partition(":")
    name, _, rest = host.partition(".")
    space = part(one, "metadata.namespace")
    service = next((found for found in render.services if part(found, "metadata.name") == name), {})
    ports = {str(entry["port"]) for entry in part(service, "spec.ports") or []}
    if within(space, host) is None or host in LOOPBACK:
        if service and _OF_A_NAMESPACE.fullmatch(rest):
            expected = f"{name}.{space}.svc, which the Service is called"
            yield Fault(title(one), path, expected, target, "name the overlay's namespace")
    elif not service:
        names = ", ".join(sorted(part(found, "metadata.name") for found in render.services))
        yield Fault(title(one), path, f"a Service of the overlay ({names})", target, "name one of those")
    elif port not in ports:
        expected = f"a port of {title(service)} ({', '.join(sorted(ports))})"
        yield Fault(title(one), path, expected, target, "name one of those")


def _no_such_port(render: Render, one: Object) -> Iterator[Fault]:
    chosen = [pod for pod in render.pods if matches(part(one, "spec.selector"), pod.labels)]
    if not chosen:
        yield Fault(title(one), "spec.selector", "labels of the overlay's pods", "none has them", "change the selector")
    for at, endpoint in enumerate(part(one, "spec.podMetricsEndpoints") or []):
        name = endpoint.get("port")
        if any(pod.port(name) is None for pod in chosen):
            path = f"spec.podMetricsEndpoints[{at}].port"
            yield Fault(title(one), path, "a port of each pod that is chosen", str(name), "name a port that they open")
