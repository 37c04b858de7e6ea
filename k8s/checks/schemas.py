"""Every object against the schema of its kind, unknown fields refused."""

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jsonschema.protocols import Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from checks.crd import Strict, without_nulls
from checks.model import Fault, Object, called, title
from checks.render import Render

KUBERNETES = "1.34"
"""The oldest release that the manifests are written for."""

_CORE = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
_META = "/api/_definitions.json#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_OURS = Path(__file__).parents[1] / "schemas"


def faults(render: Render) -> Iterator[Fault]:
    """Fields that the API server would refuse."""
    for one in render.objects:
        version, kind = one.get("apiVersion", ""), one.get("kind", "")
        if not _validators(version, kind):
            expected, remedy = f"a kind of Kubernetes {KUBERNETES}, or one with a schema", "see k8s/schemas/README.md"
            yield Fault(title(one), "apiVersion, kind", expected, f"{version} {kind}", remedy)
            continue
        for path, message in _errors(json.dumps(without_nulls(one))):
            yield Fault(title(one), path or "(top)", "what its schema allows", message, "mend the field")


@cache
def _errors(manifest: str) -> tuple[tuple[str, str], ...]:
    one: Object = json.loads(manifest)
    return tuple(
        (_path(one, [*below, *error.absolute_path]), error.message[:200])
        for below, validator in _validators(one["apiVersion"], one["kind"])
        for error in validator.iter_errors(_at(one, below))
    )


@cache
def _validators(version: str, kind: str) -> list[tuple[list[str], Validator]]:
    """Validators, each for what stands at its path."""
    group, _, release = version.rpartition("/")
    own = _OURS / f"{kind.lower()}-{group}-{release}.json.gz"
    if own.is_file():
        schema = json.loads(gzip.decompress(own.read_bytes()))
        metadata = {"$id": "https://kubernetes.io/api/metadata", "$ref": _META}
        return [([], Strict(schema)), (["metadata"], Strict(metadata, registry=_registry()))]
    name = "-".join(part for part in (kind.lower(), group.split(".")[0], release) if part)
    try:
        schema = schema_contents(f"{_CORE}/{name}.json", KUBERNETES)
    except FileNotFoundError:
        return []
    return [([], Strict(schema, registry=_registry()))]


@cache
def _registry() -> Registry:
    definitions = Resource.from_contents(schema_contents(f"{_CORE}/_definitions.json", KUBERNETES))
    return definitions @ Registry()


def _at(one: Object, path: list[str]) -> Object:
    for key in path:
        one = one.get(key, {})
    return one


def _path(one: object, keys: list[str | int]) -> str:
    """The path in the words that the other checks use."""
    words = ""
    for key in keys:
        below = one[key] if isinstance(one, list | dict) else None  # type: ignore[index]
        words += f"[{called(below, key)}]" if isinstance(key, int) else f".{key}"
        one = below
    return words.lstrip(".")
