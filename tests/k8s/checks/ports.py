"""Ports: Serve's is the same everywhere, and each Service's target port is open on its pods."""

from collections.abc import Iterator

from ray.serve.config import ProxyLocation

from tests.k8s.checks.addresses import LOOPBACK, behind
from tests.k8s.checks.environment import environment
from tests.k8s.checks.model import Fault, part, title
from tests.k8s.checks.render import Render
from tests.k8s.checks.serve import PATH, Config, configs
from trackway.serving import ServiceSettings

_BASE_URL: str = ServiceSettings.model_fields["base_url"].default


def faults(render: Render) -> Iterator[Fault]:
    """Ports that do not match."""
    for service in render.services:
        for at, entry in enumerate(part(service, "spec.ports") or []):
            for pod, port in behind(render, service, entry["port"]):
                if port is None:
                    target = str(entry.get("targetPort", entry["port"]))
                    path = f"spec.ports[{entry.get('name', at)}]"
                    expected = f"a port of the pods of {pod.owner}{f' ({pod.group})' if pod.group else ''}"
                    yield Fault(title(service), path, expected, target, "name a port that a container declares")
    for config in configs(render):
        yield from _of_serve(render, config)


def _of_serve(render: Render, config: Config) -> Iterator[Fault]:
    where = title(config.service)
    options, port = f"{PATH}.http_options", config.schema.http_options.port
    if config.schema.http_options.host != "0.0.0.0":
        got = config.schema.http_options.host
        yield Fault(where, f"{options}.host", "0.0.0.0, so that the Service reaches it", got, "change the host")
    if config.schema.proxy_location != ProxyLocation.EveryNode:
        expected = "EveryNode: pods call one another through the proxy of their own"
        yield Fault(where, f"{PATH}.proxy_location", expected, str(config.schema.proxy_location), "change it")
    for pod in render.pods:
        if pod.owner != where or pod.ray is None:
            continue
        if pod.port("serve") != port:
            remedy = "KubeRay's Service and probes follow the port of that name; change one of them"
            path = f"{pod.ray.path}.ports[serve]"
            yield Fault(where, path, f"Serve's port, {port}, of the name serve", str(pod.port("serve")), remedy)
        known = environment(render, pod.ray).get("TRACKWAY_BASE_URL", _BASE_URL)
        for application in config.schema.applications:
            url = str(application.args.get("base_url", known)).rstrip("/")
            if any(host in url for host in LOOPBACK) and not url.endswith(f":{port}"):
                path = f"{PATH}.applications[{application.name}].args.base_url"
                yield Fault(where, path, f"the pod's own proxy, port {port}", url, "set TRACKWAY_BASE_URL or the port")
