"""Validates every object against the schema of its kind; unknown fields are faults."""

import gzip
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema.protocols import Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from tests.k8s.checks import kuberay
from tests.k8s.checks.crd import Strict
from tests.k8s.checks.model import Fault, Object, called, title, walk
from tests.k8s.checks.render import Render

Errors = tuple[tuple[str, str], ...]
"""A path and what is wrong there, each."""

KUBERNETES = ("1.27", "1.36")
"""The oldest release that the manifests are written for, and a newer one: what both of them have is taken."""

_DEFINITIONS = "/api/_definitions.json#/$defs"
_META = f"{_DEFINITIONS}/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_POD = f"{_DEFINITIONS}/io.k8s.api.core.v1.PodSpec"
_OURS = Path(__file__).parents[3] / "k8s" / "schemas"


def faults(render: Render) -> Iterator[Fault]:
    """Fields that the API server would reject."""
    for manifest in render.objects:
        version, kind = manifest.get("apiVersion", ""), manifest.get("kind", "")
        lacking = [release for release in KUBERNETES if not _validators(version, kind, release)]
        if lacking:
            expected = f"a kind of Kubernetes {' and '.join(lacking)}, or one with a schema"
            yield Fault(title(manifest), "apiVersion, kind", expected, f"{version} {kind}", "see k8s/schemas/README.md")
            continue
        text, releases = json.dumps(manifest), KUBERNETES[:1] if _own(version, kind).is_file() else KUBERNETES
        for path, _, value in walk(manifest) if "null" in text else ():
            if isinstance(value, list) and None in value:
                yield Fault(
                    title(manifest), path, "something behind each dash", "nothing", "fill it in, or leave it out"
                )
        found = {release: _errors(text, release) for release in releases}
        yield from _wrong(title(manifest), found)
        if not any(found.values()):
            yield from _pods_of_ray(manifest)


def _pods_of_ray(manifest: Object) -> Iterator[Fault]:
    """Faults of its pods by Kubernetes' schema: KubeRay's own has the pod fields of an unknown release."""
    for pod in kuberay.pods(manifest):
        for path, message in _errors_of_a_pod(json.dumps(pod.spec)):
            expected = f"what a pod's schema allows in Kubernetes {KUBERNETES[0]}"
            yield Fault(title(manifest), f"{pod.path}.spec.{path}", expected, message, "correct the field")


def _wrong(where: str, found: Mapping[str, Errors]) -> Iterator[Fault]:
    for path, message in dict.fromkeys(error for errors in found.values() for error in errors):
        releases = [release for release, errors in found.items() if (path, message) in errors]
        expected = "what its schema allows" + (f" in Kubernetes {releases[0]}" if len(releases) < len(found) else "")
        yield Fault(where, path or "(top)", expected, message, "correct the field")


@cache
def _errors(manifest: str, release: str) -> Errors:
    parsed: Object = json.loads(manifest)
    return tuple(
        (_path(parsed, [*below, *error.absolute_path]), error.message[:200])
        for below, validator in _validators(parsed["apiVersion"], parsed["kind"], release)
        for error in validator.iter_errors(_at(parsed, below))
    )


@cache
def _errors_of_a_pod(spec: str) -> Errors:
    parsed: Object = json.loads(spec)
    errors = _referring(_POD, KUBERNETES[0]).iter_errors(parsed)
    return tuple((_path(parsed, [*error.absolute_path]), error.message[:200]) for error in errors)


@cache
def _validators(version: str, kind: str, release: str) -> list[tuple[list[str], Validator]]:
    """Validators by the path of the values that they check."""
    own = _own(version, kind)
    if own.is_file():
        schema = json.loads(gzip.decompress(own.read_bytes()))
        return [([], Strict(schema)), (["metadata"], _referring(_META, release))]
    group, _, number = version.rpartition("/")
    name = "-".join(part for part in (kind.lower(), group.split(".")[0], number) if part)
    try:
        schema = _contents(name, release)
    except FileNotFoundError:
        return []
    return [([], Strict(schema, registry=_registry(release)))]


def _own(version: str, kind: str) -> Path:
    return _OURS / f"{kind.lower()}-{version.replace('/', '-')}.json.gz"


@cache
def _referring(definition: str, release: str) -> Validator:
    schema = {"$id": "https://kubernetes.io/api/part", "$ref": definition}
    return Strict(schema, registry=_registry(release))


@cache
def _registry(release: str) -> Registry:
    return Resource.from_contents(_contents("_definitions", release)) @ Registry()


def _contents(name: str, release: str) -> Any:
    return schema_contents(f"kubernetes-json-schema/v{release}.0-local-strict/{name}.json", release)


def _at(node: Object, path: list[str]) -> Object:
    for key in path:
        node = node.get(key, {})
    return node


def _path(node: object, keys: list[str | int]) -> str:
    """The path in the notation of the other checks."""
    words = ""
    for key in keys:
        below = node[key] if isinstance(node, list | dict) else None  # type: ignore[index]
        words += f"[{called(below, key)}]" if isinstance(key, int) else f".{key}"
        node = below
    return words.lstrip(".")
