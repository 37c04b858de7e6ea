"""The pods that an overlay makes: one for each pod template."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from checks.model import Object, part, title

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
    """A pod template; of a RayService with what KubeRay adds to it."""

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
        """All of them, those that run before the others first."""
        own = [
            Container(f"{self.path}.spec.{kind}[{one.get('name', at)}]", one, kind == "initContainers")
            for kind in ("initContainers", "containers")
            for at, one in enumerate(self.spec.get(kind) or [])
        ]
        first = next((at for at, one in enumerate(own) if not one.init), None)
        if self.group and first is not None:
            own[first] = own[first]._replace(ray=True)
        return [*own, *self.added]

    @property
    def ray(self) -> Container | None:
        """The container that Ray runs in."""
        return next((one for one in self.containers if one.ray), None)

    def port(self, wanted: int | str | None) -> int | None:
        """The number of a port that some container declares by that number or name."""
        declared = [port for one in self.containers for port in one.spec.get("ports") or []]
        found = (port["containerPort"] for port in declared if wanted in (port["containerPort"], port.get("name")))
        return next(found, None)


def own_pods(one: Object) -> Iterator[Pod]:
    """The pod that one of Kubernetes' own kinds makes."""
    path = _TEMPLATES.get(one.get("kind", ""))
    if path:
        template = part(one, path) or {}
        labels = part(template, "metadata.labels") or {}
        yield Pod(title(one), part(one, "metadata.namespace"), path, labels, template.get("spec") or {})
