"""Entries of lists that Kubernetes and KubeRay complete are written in full.

`kubectl apply` compares such lists as a whole, so it would change them again each time.
"""

from collections.abc import Iterator
from typing import Any

from tests.k8s.checks.model import Fault, part, title
from tests.k8s.checks.render import Render

_CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "spec.volumeMode": "Filesystem",
    "status.phase": "Pending",
}


def faults(render: Render) -> Iterator[Fault]:
    """Ports of NetworkPolicies, claims of StatefulSets and worker groups that lack what would be added to them."""
    for policy in render.of("NetworkPolicy"):
        for way in ("ingress", "egress"):
            for index, rule in enumerate(part(policy, f"spec.{way}") or []):
                for port in rule.get("ports") or []:
                    yield from _lacking(policy, f"spec.{way}.{index}.ports", port, {"protocol": "TCP"})
    for owner in render.of("StatefulSet"):
        for claim in part(owner, "spec.volumeClaimTemplates") or []:
            yield from _lacking(owner, "spec.volumeClaimTemplates", claim, _CLAIM)
    for service in render.of("RayService"):
        for group in part(service, "spec.rayClusterConfig.workerGroupSpecs") or []:
            path = f"spec.rayClusterConfig.workerGroupSpecs.{group['groupName']}"
            yield from _lacking(service, path, group, {"scaleStrategy": {}})


def _lacking(resource: Any, path: str, entry: Any, added: dict[str, Any]) -> Iterator[Fault]:
    for name, value in added.items():
        if part(entry, name) is None:
            yield Fault(title(resource), f"{path}.{name}", f"{value!r}", "none", "a second apply would change it")
