"""What `kubectl kustomize` makes of a folder."""

import subprocess
import sysconfig
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

from checks import kuberay
from checks.crd import without_nulls
from checks.model import Fault, Object, part
from checks.pods import Pod, own_pods


@dataclass(frozen=True, eq=False)
class Render:
    """The objects of one overlay."""

    name: str
    objects: list[Object]
    secrets: Mapping[str, Set[str]] = field(default_factory=dict)
    """The Secrets that the user makes, and their keys."""

    def of(self, kind: str) -> list[Object]:
        """The objects of one kind."""
        return [one for one in self.objects if one.get("kind") == kind]

    def find(self, kind: str, name: str) -> Object | None:
        """The object of that kind and name."""
        return next((one for one in self.of(kind) if part(one, "metadata.name") == name), None)

    @cached_property
    def pods(self) -> list[Pod]:
        """Every pod template, KubeRay's additions included."""
        return [pod for one in self.objects for pod in (*own_pods(one), *kuberay.pods(one))]

    @cached_property
    def services(self) -> list[Object]:
        """Every Service, those that KubeRay makes included."""
        made = [service for one in self.of("RayService") for service in kuberay.services(one)]
        return [*self.of("Service"), *made]


def folders(k8s: Path) -> list[Path]:
    """The base and every overlay."""
    return [k8s / "base", *sorted(one.parent for one in k8s.glob("overlays/*/kustomization.yaml"))]


KUBECTL = Path(sysconfig.get_path("scripts"), "kubectl")


def rendered(folder: Path, secrets: Mapping[str, Set[str]]) -> Render | Fault:
    """One overlay's objects, or why kustomize refuses it."""
    made = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False)
    if made.returncode:
        said = made.stderr.strip().splitlines()[-1]
        remedy = f"see `kubectl kustomize {folder}`"
        return Fault("kustomization.yaml", str(folder), "a folder that kustomize renders", said, remedy)
    documents = yaml.load_all(made.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Render(folder.name, [without_nulls(one) for one in documents if one], secrets)
