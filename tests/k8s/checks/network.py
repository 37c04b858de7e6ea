"""NetworkPolicies: they allow the connections that the pods need."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.k8s.checks import kuberay
from tests.k8s.checks.addresses import addresses, behind, service_of
from tests.k8s.checks.model import Fault, Object, part, title
from tests.k8s.checks.pods import Pod
from tests.k8s.checks.render import Render
from tests.k8s.checks.selectors import FOR_PODS_OF_YOURS, matches
from tests.k8s.checks.serve import Config, configs

_GCS, _DASHBOARD = 6379, 8265
_FREE = (32768, 60999)
"""The range of Linux's free ports: replicas have ports of their own there, and the ranks of a learner."""
_ANY = 1024
"""Stands for all ports where `ray start` takes a free one."""
_PINNED = ("node-manager-port", "object-manager-port", "min-worker-port", "max-worker-port")
"""Parameters of `ray start` for the ports by which Ray's nodes reach one another."""
_TOOLS, _CALLED = ("tools", "all"), ("head", "tools", "rollout", "all")
"""The roles of pods that run what a model wrote, and of pods whose free ports they reach: Ray's, and replicas'."""
_OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}  # for Helm and for kustomize


class Elsewhere(NamedTuple):
    """A peer that is not a pod of the overlay: a pod of another namespace, or an address outside the cluster."""

    name: str
    labels: Mapping[str, str] | None = None


OPERATOR = Elsewhere("KubeRay's operator", _OPERATOR)
CLIENT = Elsewhere("a pod of a client", {"trackway.io/client": "true"})
PROMETHEUS = Elsewhere("Prometheus", {"app.kubernetes.io/name": "prometheus"})
DNS = Elsewhere("the cluster's DNS", {"k8s-app": "kube-dns"})
API_SERVER = Elsewhere("the API server")
End = Pod | Elsewhere


class Way(NamedTuple):
    """A required connection."""

    source: End
    target: End
    port: int
    reason: str
    protocol: str = "TCP"


def faults(render: Render) -> Iterator[Fault]:
    """Required connections that a policy denies, and allowed ones that let a model's code reach too much."""
    reported: set[tuple[str, ...]] = set()
    chosen = {(pod, side): _isolating(render, pod, side) for pod in render.pods for side in ("ingress", "egress")}
    for way in _closed(render):
        assert isinstance(way.source, Pod)
        for policy in chosen[way.source, "egress"]:
            if _allows(policy, "egress", way):
                expected = f"no rule that lets {_named(way.source)} reach {_named(way.target)}, port {way.port}"
                yield Fault(
                    title(policy), "spec.egress", expected, f"one, which opens {way.reason}", "narrow its ports"
                )
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
    """All connections that the overlay's pods need."""
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


def _closed(render: Render) -> Iterator[Way]:
    """Connections that the pods of tools must not have."""
    for config in configs(render):
        pods = [pod for pod in render.pods if pod.owner == title(config.service)]
        for source in (pod for pod in pods if _role(pod) in _TOOLS):
            for target in pods:
                if _role(target) not in _CALLED:
                    yield from (Way(source, target, port, "a learner's ranks") for port in _FREE)
                if target.group == kuberay.HEAD:
                    yield Way(source, target, _DASHBOARD, "Ray's dashboard, which runs code")


def _of_ray(config: Config, pods: list[Pod]) -> Iterator[Way]:
    groups = {name: group for name, _, group in kuberay.groups(config.service)}
    for target in pods:
        params = groups[str(target.group)].get("rayStartParams") or {}
        pinned = [int(params.get(name, _ANY)) for name in _PINNED]
        for source in pods:
            yield from (Way(source, target, port, "Ray among its nodes") for port in (_GCS, *pinned))
            if _role(source) not in _TOOLS or _role(target) in _CALLED:
                yield from (Way(source, target, port, "replicas' own ports") for port in _FREE)
    for pod in pods:
        if pod.labels["ray.io/serve"] == "true":
            yield Way(CLIENT, pod, config.schema.http_options.port, "the services' clients")
            yield Way(PROMETHEUS, pod, config.schema.http_options.port, "the services' metrics")
        if pod.group == kuberay.HEAD:
            yield Way(OPERATOR, pod, _DASHBOARD, "the operator that deploys and watches the Serve applications")
            if kuberay.autoscales(config.service):
                yield Way(pod, API_SERVER, 443, "Ray's autoscaler")


def _role(pod: Pod) -> str | None:
    return pod.labels.get("trackway.io/role")


def _isolating(render: Render, pod: Pod, side: str) -> list[Object]:
    """The policies that select the pod for this direction."""
    found = []
    for policy in render.of("NetworkPolicy"):
        kinds = part(policy, "spec.policyTypes") or ["Ingress", *(["Egress"] if part(policy, "spec.egress") else [])]
        if side.capitalize() in kinds and matches(part(policy, "spec.podSelector") or {}, pod.labels):
            found.append(policy)
    return found


def _allows(policy: Object, side: str, way: Way) -> bool:
    far_end = way.source if side == "ingress" else way.target
    for rule in part(policy, f"spec.{side}") or []:
        peers = rule.get("from" if side == "ingress" else "to")
        if (not peers or any(_is(peer, far_end, policy) for peer in peers)) and _port(rule.get("ports"), way):
            return True
    return False


def _is(peer: Object, end: End, policy: Object) -> bool:
    """Whether a rule's peer matches this end of the connection."""
    if "ipBlock" in peer:
        return isinstance(end, Elsewhere) and end.labels is None
    namespaces, pods = peer.get("namespaceSelector"), peer.get("podSelector")
    if end.labels is None or (pods is not None and not matches(pods, end.labels)):
        return False
    if isinstance(end, Elsewhere):  # the cluster decides its namespace, unless it is one of the overlay
        yours = (part(namespaces, "matchLabels") or {}).keys() & FOR_PODS_OF_YOURS
        return namespaces is not None and yours <= end.labels.keys()
    own = {"kubernetes.io/metadata.name": part(policy, "metadata.namespace")}
    return namespaces is None or matches(namespaces, own)


def _port(ports: list[Object] | None, way: Way) -> bool:
    for entry in ports or []:
        wanted = entry.get("port")
        if isinstance(wanted, str):
            wanted = way.target.port(wanted) if isinstance(way.target, Pod) else None
        first_to_last = wanted is not None and wanted <= way.port <= entry.get("endPort", wanted)
        open_for_all = "port" not in entry
        if entry.get("protocol", "TCP") == way.protocol and (open_for_all or first_to_last):
            return True
    return not ports


def _named(end: End) -> str:
    return end.name if isinstance(end, Elsewhere) else f"{end.owner}{f' ({end.group})' if end.group else ''}"
