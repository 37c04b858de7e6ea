"""Overlays rendered by `kubectl kustomize`."""

import subprocess
import sysconfig
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import yaml

from tests.k8s.checks import kuberay
from tests.k8s.checks.crd import without_nulls
from tests.k8s.checks.model import Fault, Object, part
from tests.k8s.checks.pods import Pod, own_pods


@dataclass(frozen=True, eq=False)
class Render:
    """The objects of one overlay."""

    name: str
    objects: list[Object]
    secrets: Mapping[str, Set[str]] = field(default_factory=dict)
    """The Secrets that the user makes, and their keys."""

    def of(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        return [manifest for manifest in self.objects if manifest.get("kind") == kind]

    def find(self, kind: str, name: str) -> Object | None:
        """The object with this kind and name."""
        return next((manifest for manifest in self.of(kind) if part(manifest, "metadata.name") == name), None)

    @cached_property
    def pods(self) -> list[Pod]:
        """Every pod template, including KubeRay's additions."""
        return [pod for manifest in self.objects for pod in (*own_pods(manifest), *kuberay.pods(manifest))]

    @cached_property
    def services(self) -> list[Object]:
        """Every Service, including those that KubeRay creates."""
        made = [service for manifest in self.of("RayService") for service in kuberay.services(manifest)]
        return [*self.of("Service"), *made]


def folders(k8s: Path) -> list[Path]:
    """The base and every overlay."""
    return [k8s / "base", *sorted(file.parent for file in k8s.glob("overlays/*/kustomization.yaml"))]


KUBECTL = Path(sysconfig.get_path("scripts"), "kubectl")


def rendered(folder: Path, secrets: Mapping[str, Set[str]]) -> Render | Fault:
    """The objects of an overlay, or kustomize's error."""
    made = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False)
    if made.returncode:
        said = made.stderr.strip().splitlines()[-1]
        remedy = f"see `kubectl kustomize {folder}`"
        return Fault("kustomization.yaml", str(folder), "a folder that kustomize renders", said, remedy)
    documents = yaml.load_all(made.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Render(folder.name, [without_nulls(document) for document in documents if document], secrets)
