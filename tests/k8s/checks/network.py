"""NetworkPolicies: they let through what the pods need of one another."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from checks import kuberay
from checks.addresses import addresses, behind, service_of
from checks.model import Fault, Object, part, title
from checks.pods import Pod
from checks.render import Render
from checks.selectors import FOR_PODS_OF_YOURS, matches
from checks.serve import Config, configs

_RAY_PORTS = (1024, 6379, 10002, 43210, 65535)
"""Ray's processes listen on ports of their own choice; these stand for all."""
_DASHBOARD = 8265
_OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}  # whether Helm or kustomize installed it


class Elsewhere(NamedTuple):
    """What is no pod of the overlay: a pod of another namespace, or an address outside of the cluster."""

    name: str
    labels: Mapping[str, str] | None = None


OPERATOR = Elsewhere("KubeRay's operator", _OPERATOR)
CLIENT = Elsewhere("a pod of a client", {"trackway.io/client": "true"})
PROMETHEUS = Elsewhere("Prometheus", {"app.kubernetes.io/name": "prometheus"})
DNS = Elsewhere("the cluster's DNS", {"k8s-app": "kube-dns"})
API_SERVER = Elsewhere("the API server")
End = Pod | Elsewhere


class Way(NamedTuple):
    """A connection that something needs."""

    source: End
    target: End
    port: int
    reason: str
    protocol: str = "TCP"


def faults(render: Render) -> Iterator[Fault]:
    """Connections that are needed and that a policy forbids."""
    reported: set[tuple[str, ...]] = set()
    chosen = {(pod, side): _isolating(render, pod, side) for pod in render.pods for side in ("ingress", "egress")}
    for way in ways(render):
        for side, end in (("ingress", way.target), ("egress", way.source)):
            policies = chosen[end, side] if isinstance(end, Pod) else []
            if policies and not any(_allows(policy, side, way) for policy in policies):
                names = ", ".join(title(policy) for policy in policies)
                key = (names, side, way.reason, _named(way.source))
                if key not in reported:
                    reported.add(key)
                    expected = f"a rule that lets {_named(way.source)} reach {_named(way.target)}, port {way.port}"
                    yield Fault(names, f"spec.{side}", expected, f"none, needed for {way.reason}", "add the rule")


def ways(render: Render) -> Iterator[Way]:
    """All that the overlay's pods need."""
    for address in addresses(render):
        service = service_of(render, address) if address.service else None
        for pod, port in behind(render, service, address.port) if service else []:
            if port is not None:
                yield Way(address.pod, pod, port, address.text)
        host = part(service, "spec.externalName") or (address.host if address.service is None else "")
        if "." in host and not host[0].isdigit() and address.port:
            yield Way(address.pod, Elsewhere(host), address.port, address.text)
    for pod in render.pods:
        yield Way(pod, DNS, 53, "names", "UDP")
        metrics = pod.port("metrics")
        if metrics:
            yield Way(PROMETHEUS, pod, metrics, "metrics")
    for config in configs(render):
        yield from _of_ray(config, [pod for pod in render.pods if pod.owner == title(config.service)])


def _of_ray(config: Config, pods: list[Pod]) -> Iterator[Way]:
    for source in pods:
        for target in pods:
            yield from (Way(source, target, port, "Ray among its nodes") for port in _RAY_PORTS)
    for pod in pods:
        if pod.labels["ray.io/serve"] == "true":
            yield Way(CLIENT, pod, config.schema.http_options.port, "the services' clients")
            yield Way(PROMETHEUS, pod, config.schema.http_options.port, "the services' metrics")
        if pod.group == kuberay.HEAD:
            yield Way(OPERATOR, pod, _DASHBOARD, "the operator that deploys and watches the Serve applications")
            if kuberay.autoscales(config.service):
                yield Way(pod, API_SERVER, 443, "Ray's autoscaler")


def _isolating(render: Render, pod: Pod, side: str) -> list[Object]:
    """The policies that choose the pod for this direction."""
    found = []
    for policy in render.of("NetworkPolicy"):
        kinds = part(policy, "spec.policyTypes") or ["Ingress", *(["Egress"] if part(policy, "spec.egress") else [])]
        if side.capitalize() in kinds and matches(part(policy, "spec.podSelector") or {}, pod.labels):
            found.append(policy)
    return found


def _allows(policy: Object, side: str, way: Way) -> bool:
    other = way.source if side == "ingress" else way.target
    for rule in part(policy, f"spec.{side}") or []:
        peers = rule.get("from" if side == "ingress" else "to")
        if (not peers or any(_is(peer, other, policy) for peer in peers)) and _port(rule.get("ports"), way):
            return True
    return False


def _is(peer: Object, end: End, policy: Object) -> bool:
    """Whether a rule's peer is that end."""
    if "ipBlock" in peer:
        return isinstance(end, Elsewhere) and end.labels is None
    namespaces, pods = peer.get("namespaceSelector"), peer.get("podSelector")
    if end.labels is None or (pods is not None and not matches(pods, end.labels)):
        return False
    if isinstance(end, Elsewhere):  # which namespace it has is the cluster's affair, unless that is one of yours
        yours = (part(namespaces, "matchLabels") or {}).keys() & FOR_PODS_OF_YOURS
        return namespaces is not None and yours <= end.labels.keys()
    own = {"kubernetes.io/metadata.name": part(policy, "metadata.namespace")}
    return namespaces is None or matches(namespaces, own)


def _port(ports: list[Object] | None, way: Way) -> bool:
    for one in ports or []:
        wanted = one.get("port")
        if isinstance(wanted, str):
            wanted = way.target.port(wanted) if isinstance(way.target, Pod) else None
        first_to_last = wanted is not None and wanted <= way.port <= one.get("endPort", wanted)
        open_for_all = "port" not in one
        if one.get("protocol", "TCP") == way.protocol and (open_for_all or first_to_last):
            return True
    return not ports


def _named(end: End) -> str:
    return end.name if isinstance(end, Elsewhere) else f"{end.owner}{f' ({end.group})' if end.group else ''}"
