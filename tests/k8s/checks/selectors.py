"""Label selectors: each selects a pod of the overlay."""

from collections.abc import Iterator, Mapping

from tests.k8s.checks import kuberay
from tests.k8s.checks.model import Fault, Object, part, title
from tests.k8s.checks.pods import Pod, own_pods
from tests.k8s.checks.render import Render

FOR_PODS_OF_YOURS = {"trackway.io/client", "trackway.io/mlflow", "trackway.io/operator"}
"""Labels by which a user's pods and namespaces are let in; see networkpolicy.yaml."""


def faults(render: Render) -> Iterator[Fault]:
    """Selectors of Services, budgets, policies, workloads and placement rules that select nothing."""
    made = [service for manifest in render.of("RayService") for service in kuberay.services(manifest)]
    for manifest in [*render.objects, *made]:
        for path, selector, chosen in _selectors(render, manifest):
            if not any(matches(selector, pod.labels) for pod in chosen):
                keys = {
                    *(selector.get("matchLabels") or {}),
                    *(rule["key"] for rule in selector.get("matchExpressions") or []),
                }
                has = sorted({f"{key}={pod.labels[key]}" for pod in chosen for key in keys & pod.labels.keys()})
                expected = f"labels that a pod has ({', '.join(has) or 'none has such a key'})"
                remedy = "kustomize's `labels:` do not reach a RayService's pods: write them into its templates"
                yield Fault(title(manifest), path, expected, said(selector), remedy)


def matches(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches these labels; an empty one matches all."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(rule, labels.get(rule["key"])) for rule in selector.get("matchExpressions") or [])


def _holds(rule: Object, value: str | None) -> bool:
    match rule["operator"]:
        case "In":
            return value in rule["values"]
        case "NotIn":
            return value not in rule["values"]
        case "Exists":
            return value is not None
        case _:
            return value is None


def _selectors(render: Render, manifest: Object) -> Iterator[tuple[str, Object, list[Pod]]]:
    """(path, selector, pods of which it should select at least one)."""
    match manifest["kind"]:
        case "Service":
            selector = part(manifest, "spec.selector")
            if selector:
                yield "spec.selector", {"matchLabels": selector}, render.pods
        case "PodDisruptionBudget":
            yield "spec.selector", part(manifest, "spec.selector") or {}, render.pods
        case "NetworkPolicy":
            yield "spec.podSelector", part(manifest, "spec.podSelector") or {}, render.pods
            yield from ((path, selector, render.pods) for path, selector in _peers(manifest))
        case "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet":
            yield "spec.selector", part(manifest, "spec.selector") or {}, list(own_pods(manifest))
    for pod in render.pods:
        if pod.owner == title(manifest):
            yield from _placement(render, pod)


def _peers(policy: Object) -> Iterator[tuple[str, Object]]:
    """Selectors of pods in this namespace among a NetworkPolicy's peers."""
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for at, rule in enumerate(part(policy, f"spec.{direction}") or []):
            for peer, spec in enumerate(rule.get(side) or []):
                yours = (part(spec, "podSelector.matchLabels") or {}).keys() & FOR_PODS_OF_YOURS
                if "podSelector" in spec and "namespaceSelector" not in spec and not yours:
                    yield f"spec.{direction}[{at}].{side}[{peer}].podSelector", spec["podSelector"] or {}


def _placement(render: Render, pod: Pod) -> Iterator[tuple[str, Object, list[Pod]]]:
    for at, rule in enumerate(pod.spec.get("topologySpreadConstraints") or []):
        yield f"{pod.path}.spec.topologySpreadConstraints[{at}].labelSelector", rule.get("labelSelector") or {}, [pod]
    for kind in ("podAffinity", "podAntiAffinity"):
        rules = part(pod.spec, f"affinity.{kind}") or {}
        terms = list(rules.get("requiredDuringSchedulingIgnoredDuringExecution") or [])
        preferred = rules.get("preferredDuringSchedulingIgnoredDuringExecution") or []
        for term in terms + [term["podAffinityTerm"] for term in preferred]:
            yield f"{pod.path}.spec.affinity.{kind}", term.get("labelSelector") or {}, render.pods


def said(selector: Object) -> str:
    """A selector on one line."""
    labels = [f"{key}={value}" for key, value in (selector.get("matchLabels") or {}).items()]
    rules = selector.get("matchExpressions") or []
    return ", ".join(
        [*labels, *(f"{rule['key']} {rule['operator']} {rule.get('values', '')}".strip() for rule in rules)]
    )
