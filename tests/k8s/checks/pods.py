"""The pods of an overlay: one for each pod template."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tests.k8s.checks.model import Object, part, title

_TEMPLATES = {
    **dict.fromkeys(("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "Job"), "spec.template"),
    "CronJob": "spec.jobTemplate.spec.template",
}


class Container(NamedTuple):
    """A container of a pod, and its path in the object."""

    path: str
    spec: Object
    init: bool = False
    ray: bool = False
    """Whether KubeRay starts Ray in it; such a one has KubeRay's probes."""

    @property
    def name(self) -> str:
        return self.spec.get("name", "?")


@dataclass(frozen=True, eq=False)
class Pod:
    """A pod template, including KubeRay's additions for a RayService."""

    owner: str
    namespace: str | None
    path: str
    labels: Mapping[str, str]
    spec: Object
    group: str | None = None
    """Ray's worker group, or `headgroup`."""
    added: tuple[Container, ...] = ()
    """Containers that KubeRay puts beside the template's own."""

    @cached_property
    def containers(self) -> list[Container]:
        """All containers, init containers first."""
        own = [
            Container(f"{self.path}.spec.{kind}[{container.get('name', at)}]", container, kind == "initContainers")
            for kind in ("initContainers", "containers")
            for at, container in enumerate(self.spec.get(kind) or [])
        ]
        first = next((at for at, container in enumerate(own) if not container.init), None)
        if self.group and first is not None:
            own[first] = own[first]._replace(ray=True)
        return [*own, *self.added]

    @property
    def ray(self) -> Container | None:
        """The Ray container."""
        return next((container for container in self.containers if container.ray), None)

    def port(self, wanted: int | str | None) -> int | None:
        """The number of a declared port, by number or name."""
        declared = [port for container in self.containers for port in container.spec.get("ports") or []]
        found = (port["containerPort"] for port in declared if wanted in (port["containerPort"], port.get("name")))
        return next(found, None)


def own_pods(manifest: Object) -> Iterator[Pod]:
    """The pod of a built-in workload kind."""
    path = _TEMPLATES.get(manifest.get("kind", ""))
    if path:
        template = part(manifest, path) or {}
        labels = part(template, "metadata.labels") or {}
        yield Pod(title(manifest), part(manifest, "metadata.namespace"), path, labels, template.get("spec") or {})
