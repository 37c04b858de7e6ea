"""Versions: Ray's is the same in manifests, pins and package; Trackway's is the same in all images."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from tests.k8s.checks.model import Fault, part, title
from tests.k8s.checks.render import Render

_ROOT = Path(__file__).parents[3]
_OURS = re.compile(r"(trackway-[a-z-]+)(?::([^@]*))?(?:@.*)?")
"""As `make image` calls them; the tags in a registry of yours are yours."""
_RAY = "spec.rayClusterConfig.rayVersion"


class Wanted(NamedTuple):
    """The versions of the repository."""

    trackway: str
    ray: str
    ray_range: Requirement


def faults(render: Render) -> Iterator[Fault]:
    """Versions that differ from the repository's."""
    wanted = repository()
    for service in render.of("RayService"):
        version = part(service, _RAY)
        if version != wanted.ray:
            expected = f"{wanted.ray}, as in constraints.txt"
            yield Fault(title(service), _RAY, expected, str(version), "change one of them")
        if version and not wanted.ray_range.specifier.contains(version):
            expected = f"{wanted.ray_range.specifier}, as in pyproject.toml"
            yield Fault(title(service), _RAY, expected, str(version), "change one of them")
    for pod in render.pods:
        for container in pod.containers:
            ours = _OURS.fullmatch(container.spec.get("image") or "")
            if ours and ours[2] not in (None, "latest", wanted.trackway):
                expected = f"{ours[1]}:{wanted.trackway}, the version of pyproject.toml"
                remedy = "change the kustomization's `images`"
                yield Fault(pod.owner, f"{container.path}.image", expected, container.spec["image"], remedy)


@cache
def repository() -> Wanted:
    """The versions in pyproject.toml and constraints.txt."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    listed = [Requirement(line) for group in project["optional-dependencies"].values() for line in group]
    ray = next(requirement for requirement in listed if requirement.name == "ray")
    pin = re.search(r"^ray==(\S+)$", (_ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pin is None:
        raise ValueError("constraints.txt: expected a line ray==VERSION, got none; run `make lock`")
    return Wanted(project["version"], pin[1], ray)
